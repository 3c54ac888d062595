// Block logits from keys: logsumexp over a block's tokens of scale * q.k. The keys come from a Source, which knows how they are kept.
//
// A block of threads takes sixteen query rows of one kv head and walks over some blocks: keys to shared memory as float, all dot
// products, one logsumexp per row.
#pragma once

#include "common.cuh"

namespace oasis {

constexpr int kScoreThreads = 128, kScoreRows = 16;
constexpr int64_t kScoreBlocks = 4; // that a block of threads walks over

struct QueryView {
    const void *data;
    int64_t sequence_stride, row_stride, head_stride;
    int64_t sequences, rows, query_heads, kv_heads, head_dim;

    __host__ __device__ int64_t group() const { return query_heads / kv_heads; }
    __host__ __device__ int64_t group_rows() const { return rows * group(); }

    // Row m of a group is head m % group of row m / group.
    template <class T> __device__ __forceinline__ const T *row(int64_t sequence, int64_t head, int64_t m) const {
        return static_cast<const T *>(data) + sequence * sequence_stride + m / group() * row_stride +
               (head * group() + m % group()) * head_stride;
    }
    // Of the logits (S, R, Hq, N).
    __device__ __forceinline__ int64_t logit(int64_t sequence, int64_t head, int64_t m, int64_t blocks) const {
        return ((sequence * rows + m / group()) * query_heads + head * group() + m % group()) * blocks;
    }
};

template <class Args> QueryView query_view(const Args &a) {
    return {a.queries,
            a.queries_sequence_stride,
            a.queries_row_stride,
            a.queries_head_stride,
            a.sequences,
            a.rows,
            a.query_heads,
            a.kv_heads,
            a.head_dim};
}

// Checks that scoring ops have in common.
inline int32_t check_queries(const QueryView &q) {
    if (q.kv_heads < 1 || q.query_heads < 1 || q.query_heads % q.kv_heads)
        return fail(OASIS_INVALID, "query_heads is %lld, no multiple of kv_heads %lld", static_cast<long long>(q.query_heads),
                    static_cast<long long>(q.kv_heads));
    if (q.head_dim < 1 || q.head_dim % 4)
        return fail(OASIS_UNSUPPORTED, "head_dim is %lld, no multiple of 4", static_cast<long long>(q.head_dim));
    if (q.kv_heads > kMaxGridYZ || q.sequences * ceil_div(q.group_rows(), int64_t{4}) > kMaxGridYZ)
        return fail(OASIS_UNSUPPORTED, "%lld sequences of %lld rows are too many", static_cast<long long>(q.sequences),
                    static_cast<long long>(q.rows));
    return OASIS_OK;
}

// More shared memory than every device has.
inline int32_t check_shared(size_t bytes) {
    constexpr size_t kEverywhere = 99 * 1024;
    return bytes <= kEverywhere ? OASIS_OK : fail(OASIS_UNSUPPORTED, "%zu bytes of shared memory", bytes);
}

// Sixteen query rows as float, times `scale`, into (16, row_floats); zeros where there are no more.
template <class T>
__device__ __forceinline__ void load_queries(const QueryView &q, int64_t sequence, int64_t head, int64_t first_row, float scale,
                                             int num_rows, int row_floats, float *queries) {
    const int head_dim = static_cast<int>(q.head_dim);
    for (int index = static_cast<int>(threadIdx.x); index < num_rows * head_dim; index += static_cast<int>(blockDim.x)) {
        const int row = index / head_dim, dim = index % head_dim;
        const int64_t m = first_row + row;
        queries[row * row_floats + dim] = m < q.group_rows() ? to_float(q.row<T>(sequence, head, m)[dim]) * scale : 0.0f;
    }
}

__device__ __forceinline__ float dot4(const float *left, const float *right, int count) {
    float sum = 0.0f;
    for (int i = 0; i < count; i += 4) {
        const float4 x = *reinterpret_cast<const float4 *>(left + i), y = *reinterpret_cast<const float4 *>(right + i);
        sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
    return sum;
}

// The logarithm of the sum of exponentials of values `stride` apart.
__device__ __forceinline__ float logsumexp_of(const float *values, int count, int stride) {
    float most = -INFINITY, sum = 0.0f;
    for (int i = 0; i < count; ++i) most = not_below(most, values[i * stride]);
    const float base = most == -INFINITY ? 0.0f : most;
    for (int i = 0; i < count; ++i) sum += expf(values[i * stride] - base);
    return base + logf(sum);
}

// Source: `bool find(sequence, head, block)` for all threads alike, then `float key(token, dim)` of what was found.
template <class T, class Source>
__global__ void __launch_bounds__(kScoreThreads)
    block_scores_kernel(QueryView q, Source source, int64_t blocks, int64_t block_size_, float scale, float softcap,
                        float *logits) {
    const int head_dim = static_cast<int>(q.head_dim), block_size = static_cast<int>(block_size_), row = head_dim + 4;
    const int tid = static_cast<int>(threadIdx.x);
    Carver carver;
    float *queries = carver.take<float>(kScoreRows * row);
    float *keys = carver.take<float>(static_cast<int64_t>(block_size) * row);
    float *products = carver.take<float>(kScoreRows * (block_size + 1));
    const int64_t tiles = ceil_div(q.group_rows(), int64_t{kScoreRows});
    const int64_t head = blockIdx.y, sequence = blockIdx.z / tiles, first_row = blockIdx.z % tiles * kScoreRows;
    const int rows = static_cast<int>(at_most(q.group_rows() - first_row, int64_t{kScoreRows}));
    load_queries<T>(q, sequence, head, first_row, scale, kScoreRows, row, queries);
    const int64_t first = blockIdx.x * kScoreBlocks;
    for (int64_t block = first; block < at_most(blocks, first + kScoreBlocks); ++block) {
        if (!source.find(sequence, head, block)) {
            for (int m = tid; m < rows; m += kScoreThreads)
                logits[q.logit(sequence, head, first_row + m, blocks) + block] = -INFINITY;
            continue;
        }
        for (int index = tid; index < block_size * head_dim; index += kScoreThreads)
            keys[index / head_dim * row + index % head_dim] = source.key(index / head_dim, index % head_dim);
        __syncthreads();
        for (int pair = tid; pair < rows * block_size; pair += kScoreThreads) {
            const int m = pair / block_size, token = pair % block_size;
            products[m * (block_size + 1) + token] = soft_capped(dot4(queries + m * row, keys + token * row, head_dim), softcap);
        }
        __syncthreads();
        for (int m = tid; m < rows; m += kScoreThreads)
            logits[q.logit(sequence, head, first_row + m, blocks) + block] =
                logsumexp_of(products + m * (block_size + 1), block_size, 1);
    }
}

template <class Source>
int32_t score_blocks(const char *name, const QueryView &q, const Source &source, int64_t dtype, int64_t blocks, int64_t block_size,
                     float scale, float softcap, float *logits, void *stream) {
    if (int32_t status = check_queries(q)) return status;
    if (q.sequences == 0 || q.rows == 0 || blocks == 0 || block_size < 1) return OASIS_OK;
    const int64_t row = (q.head_dim + 4) * static_cast<int64_t>(sizeof(float));
    const size_t shared = carved(kScoreRows * row, block_size * row, kScoreRows * (block_size + 1) * sizeof(float));
    if (int32_t status = check_shared(shared)) return status;
    const dim3 grid(static_cast<unsigned>(ceil_div(blocks, kScoreBlocks)), static_cast<unsigned>(q.kv_heads),
                    static_cast<unsigned>(q.sequences * ceil_div(q.group_rows(), int64_t{kScoreRows})));
    return with_dtype(dtype, [&](auto type) {
        return launch(name, block_scores_kernel<decltype(type), Source>, grid, kScoreThreads, shared, stream, q, source, blocks,
                      block_size, scale, softcap, logits);
    });
}

} // namespace oasis
