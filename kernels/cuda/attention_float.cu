// Attention in float32, by FMA: the same splits and stages, sixteen query rows and sixteen tokens at a time.
#include "attention.cuh"

namespace oasis {
namespace {

constexpr int kThreads = 128, kRows = 16, kTokens = 16, kMaxDim = 256;
constexpr int kColumns = kMaxDim / kThreads; // of the output, per thread

__host__ __device__ constexpr int row_floats(int head_dim) { return head_dim + 4; } // rows lie in different banks

size_t shared_bytes(int head_dim) {
    const size_t row = static_cast<size_t>(row_floats(head_dim)) * sizeof(float);
    return carved(2 * 2 * kTokens * row, kRows * row, 2 * kTokens * sizeof(int), kMaxPlaces * sizeof(void *),
                  kMaxPlaces * sizeof(int), sizeof(int), kRows * (kTokens + 1) * sizeof(float), 3 * kRows * sizeof(float));
}

__device__ void load_stage(const oasis_paged_attention_args &a, const PlaceList<float> &list, int stage, float *keys,
                           int *positions) {
    const int head_dim = static_cast<int>(a.head_dim), block_size = static_cast<int>(a.block_size), chunks = head_dim / 4;
    float *values = keys + kTokens * row_floats(head_dim);
    for (int index = static_cast<int>(threadIdx.x); index < kTokens * chunks; index += kThreads) {
        const int token = index / chunks, chunk = index % chunks;
        const int place = (stage * kTokens + token) / block_size, offset = (stage * kTokens + token) % block_size;
        const bool seen = place < list.count && list.tokens[place] + offset <= list.last_position;
        const float *source = seen ? list.keys[place] + offset * head_dim + chunk * 4 : static_cast<const float *>(a.pool);
        const int target = token * row_floats(head_dim) + chunk * 4;
        copy_async16(keys + target, source, seen);
        copy_async16(values + target, seen ? source + block_size * head_dim : source, seen);
        if (chunk == 0) positions[token] = seen ? list.tokens[place] + offset : INT_MAX;
    }
}

__device__ __forceinline__ float dot(const float *left, const float *right, int head_dim) {
    float sum = 0.0f;
    for (int dim = 0; dim < head_dim; dim += 4) {
        const float4 x = *reinterpret_cast<const float4 *>(left + dim), y = *reinterpret_cast<const float4 *>(right + dim);
        sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
    return sum;
}

__global__ void __launch_bounds__(kThreads) attention_kernel(oasis_paged_attention_args a, AttentionPlan plan) {
    const int head_dim = static_cast<int>(a.head_dim), row = row_floats(head_dim), tid = static_cast<int>(threadIdx.x);
    Carver carver;
    float *buffers = carver.take<float>(2 * 2 * kTokens * row);
    float *queries = carver.take<float>(kRows * row);
    int *positions = carver.take<int>(2 * kTokens);
    const float **listed_keys = carver.take<const float *>(kMaxPlaces);
    int *listed_tokens = carver.take<int>(kMaxPlaces);
    int *count = carver.take<int>(1);
    float *weights = carver.take<float>(kRows * (kTokens + 1));
    float *tops = carver.take<float>(3 * kRows), *sums = tops + kRows, *shrink = sums + kRows;

    const int64_t split = blockIdx.x, head = blockIdx.y;
    const int64_t sequence = blockIdx.z / plan.row_groups, first_row = blockIdx.z % plan.row_groups * kRows;
    const int64_t group = a.query_heads / a.kv_heads;
    const PlaceList<float> list = list_places<float>(a, plan, sequence, head, split, listed_keys, listed_tokens, count);
    for (int index = tid; index < kRows * head_dim; index += kThreads) {
        const int64_t m = first_row + index / head_dim;
        queries[index / head_dim * row + index % head_dim] =
            m < plan.group_rows ? query_row<float>(a, sequence, head, m)[index % head_dim] : 0.0f;
    }
    if (tid < kRows) tops[tid] = -INFINITY, sums[tid] = 0.0f;
    const int own_row = tid / 8, own_token = tid % 8;
    const int64_t own_m = first_row + own_row;
    const int limit = own_m < plan.group_rows ? position_of_row(a, sequence, own_m / group) : -1;
    float output[kColumns][kRows] = {};

    const int stages = ceil_div(list.count * static_cast<int>(a.block_size), kTokens);
    if (stages > 0) load_stage(a, list, 0, buffers, positions);
    commit_async();
    for (int stage = 0; stage < stages; ++stage) {
        const int now = stage % 2, next = 1 - now;
        if (stage + 1 < stages) load_stage(a, list, stage + 1, buffers + next * 2 * kTokens * row, positions + next * kTokens);
        commit_async();
        wait_async<1>();
        __syncthreads();
        const float *keys = buffers + now * 2 * kTokens * row, *values = keys + kTokens * row;
        for (int token = own_token; token < kTokens; token += 8) {
            const bool seen = positions[now * kTokens + token] <= limit;
            weights[own_row * (kTokens + 1) + token] =
                seen ? soft_capped(dot(queries + own_row * row, keys + token * row, head_dim) * a.scale, a.softcap) : -INFINITY;
        }
        __syncthreads();
        if (tid < kRows) {
            float *own = weights + tid * (kTokens + 1);
            float top = tops[tid];
            for (int token = 0; token < kTokens; ++token) top = not_below(top, own[token]);
            const float base = top == -INFINITY ? 0.0f : top;
            shrink[tid] = expf(tops[tid] - base);
            float sum = sums[tid] * shrink[tid];
            for (int token = 0; token < kTokens; ++token) {
                own[token] = expf(own[token] - base);
                sum += own[token];
            }
            tops[tid] = top;
            sums[tid] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            const int dim = tid + column * kThreads;
            if (dim >= head_dim) break;
#pragma unroll
            for (int m = 0; m < kRows; ++m) output[column][m] *= shrink[m];
            for (int token = 0; token < kTokens; ++token) {
                const float value = values[token * row + dim];
#pragma unroll
                for (int m = 0; m < kRows; ++m) output[column][m] += weights[m * (kTokens + 1) + token] * value;
            }
        }
        __syncthreads();
    }
    wait_async<0>();
    __syncthreads(); // without stages, the sums were written just now
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
        const int dim = tid + column * kThreads;
        if (dim >= head_dim) break;
#pragma unroll
        for (int m = 0; m < kRows; ++m)
            if (first_row + m < plan.group_rows)
                store_output<float>(a, plan, sequence, head, split, first_row + m, dim,
                                    sums[m] > 0.0f ? output[column][m] / sums[m] : 0.0f);
    }
    if (tid < kRows && first_row + tid < plan.group_rows)
        store_logsumexp(a, plan, sequence, head, split, first_row + tid,
                        sums[tid] > 0.0f ? tops[tid] + logf(sums[tid]) : -INFINITY);
}

} // namespace

int32_t attend_float(const oasis_paged_attention_args &a, const AttentionPlan &plan) {
    if (a.head_dim > kMaxDim || a.head_dim % 4)
        return fail(OASIS_UNSUPPORTED, "head_dim is %lld, no multiple of 4 up to %d", static_cast<long long>(a.head_dim), kMaxDim);
    const dim3 grid(static_cast<unsigned>(plan.splits), static_cast<unsigned>(a.kv_heads),
                    static_cast<unsigned>(a.sequences * plan.row_groups));
    return launch("attention", attention_kernel, grid, kThreads, shared_bytes(static_cast<int>(a.head_dim)), a.stream, a, plan);
}

} // namespace oasis
