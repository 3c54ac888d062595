// Attention in bf16 and fp16 on tensor cores: flash decoding over the places of one kv head.
//
// Sixteen query rows (rows of the step times heads of the group) are the rows of an MMA tile. Tokens come in stages, by cp.async
// into one of two buffers while the other is worked on. Each warp takes sixteen tokens of the stage and one tile of query rows and
// keeps its own softmax; the warps of a tile are merged at the end. With more tiles of rows, a warp takes more of the tokens.
#include "attention.cuh"

#ifndef OASIS_HEAD_DIMS
#define OASIS_HEAD_DIMS(X) X(64) X(80) X(96) X(128) X(256)
#endif

namespace oasis {
namespace {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kTile = 16; // query rows and tokens of a warp

constexpr int stage_tokens(int64_t head_dim) { return head_dim > 128 ? 32 : 64; }

template <int D> struct Layout {
    static constexpr int kTokens = stage_tokens(D);
    static constexpr int kWarps = kTokens / kTile;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kChunks = D / 8; // of 16 bytes, in a row
    // An odd number of chunks from row to row: ldmatrix reads the same chunk of eight rows, which then lie in different banks. An
    // XOR of chunk and row does the same without the sixteen bytes, but only where a row is a multiple of eight chunks.
    static constexpr int kStride = kChunks | 1;
    static constexpr int kTileBytes = kTokens * kStride * 16;
    static constexpr int kStageBytes = 2 * kTileBytes;
    static constexpr int kMergeStride = D + 8;
    static constexpr int kMergeBytes = kWarps * kTile * kMergeStride * 4;
    static constexpr int kBufferBytes = 2 * kStageBytes > kMergeBytes ? 2 * kStageBytes : kMergeBytes;

    static size_t shared_bytes() {
        return carved(kBufferBytes, 2 * kTokens * sizeof(int), kMaxPlaces * sizeof(void *), kMaxPlaces * sizeof(int), sizeof(int),
                      2 * kWarps * kTile * sizeof(float));
    }
};

// Asks for the keys and values of one stage. Tokens that no row may see become zeros: nothing in memory that nobody has written
// may reach a sum, since a NaN is not silenced by a weight of 0.
template <class T, int D>
__device__ __forceinline__ void load_stage(const oasis_paged_attention_args &a, const PlaceList<T> &list, int stage,
                                           unsigned char *keys, int *positions) {
    using L = Layout<D>;
    const int block_size = static_cast<int>(a.block_size);
    unsigned char *values = keys + L::kTileBytes;
    for (int index = static_cast<int>(threadIdx.x); index < L::kTokens * L::kChunks; index += L::kThreads) {
        const int token = index / L::kChunks, chunk = index % L::kChunks;
        const int place = (stage * L::kTokens + token) / block_size, offset = (stage * L::kTokens + token) % block_size;
        const bool seen = place < list.count && list.tokens[place] + offset <= list.last_position;
        const T *source = seen ? list.keys[place] + offset * D + chunk * 8 : static_cast<const T *>(a.pool);
        const int target = (token * L::kStride + chunk) * 16;
        copy_async16(keys + target, source, seen);
        copy_async16(values + target, seen ? source + block_size * D : source, seen);
        if (chunk == 0) positions[token] = seen ? list.tokens[place] + offset : INT_MAX;
    }
}

template <class T> __device__ __forceinline__ uint32_t pack(float low, float high) {
    return bits_of(from_float<T>(low)) | bits_of(from_float<T>(high)) << 16;
}

// One warp's share: sixteen query rows against the tokens that it was given so far.
template <class T, int D> struct WarpState {
    uint32_t queries[D / 16][4];
    int limits[2];         // positions of the two rows that this lane has a part of
    float most[2], sum[2]; // largest logit, in powers of two; this lane's part of the sum
    float output[D / 8][4];

    __device__ __forceinline__ void begin(const oasis_paged_attention_args &a, int64_t sequence, int64_t head, int64_t first_row,
                                          int64_t group_rows) {
        const int lane = static_cast<int>(threadIdx.x) % 32, group = static_cast<int>(a.query_heads / a.kv_heads);
        for (int half = 0; half < 2; ++half) {
            const int64_t m = first_row + lane / 4 + 8 * half;
            const bool exists = m < group_rows;
            limits[half] = exists ? position_of_row(a, sequence, m / group) : -1;
            most[half] = -INFINITY;
            sum[half] = 0.0f;
            const T *row = query_row<T>(a, sequence, head, exists ? m : 0) + 2 * (lane % 4);
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const T *two = row + 16 * k + 8 * part;
                    queries[k][half + 2 * part] = exists ? bits_of(two[0]) | bits_of(two[1]) << 16 : 0u;
                }
        }
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) output[n][i] = 0.0f;
    }

    // Sixteen tokens; `keys` and `values` are those of the stage, `first` is the first of the tokens in it. `scale` and `softcap` are
    // those of logits in powers of two.
    __device__ __forceinline__ void attend(const unsigned char *keys, const unsigned char *values, const int *positions, int first,
                                           float scale, float softcap) {
        using L = Layout<D>;
        const int lane = static_cast<int>(threadIdx.x) % 32;
        float logits[2][4] = {};
        const int key_row = first + lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            uint32_t four[4];
            load_matrices_x4(four, keys + (key_row * L::kStride + 2 * k + lane / 8 % 2) * 16);
            const uint32_t left[2] = {four[0], four[1]}, right[2] = {four[2], four[3]};
            mma_16x8x16<T>(logits[0], queries[k], left);
            mma_16x8x16<T>(logits[1], queries[k], right);
        }
        float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = most[half];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float &logit = logits[n][2 * half + i];
                    const bool seen = positions[first + 8 * n + 2 * (lane % 4) + i] <= limits[half];
                    logit = seen ? soft_capped(logit * scale, softcap) : -INFINITY;
                    top = not_below(top, logit);
                }
            top = not_below(top, __shfl_xor_sync(kWarp, top, 1));
            top = not_below(top, __shfl_xor_sync(kWarp, top, 2));
            const float base = top == -INFINITY ? 0.0f : top;
            shrink[half] = exp2f(most[half] - base);
            most[half] = top;
            sum[half] *= shrink[half];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float &weight = logits[n][2 * half + i];
                    weight = exp2f(weight - base);
                    sum[half] += weight;
                }
        }
        const uint32_t weights[4] = {pack<T>(logits[0][0], logits[0][1]), pack<T>(logits[0][2], logits[0][3]),
                                     pack<T>(logits[1][0], logits[1][1]), pack<T>(logits[1][2], logits[1][3])};
        const int value_row = first + lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            uint32_t four[4];
            load_matrices_x4_transposed(four, values + (value_row * L::kStride + 2 * k + lane / 16) * 16);
            const uint32_t left[2] = {four[0], four[1]}, right[2] = {four[2], four[3]};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float (&sums)[4] = output[2 * k + n];
                sums[0] *= shrink[0], sums[1] *= shrink[0], sums[2] *= shrink[1], sums[3] *= shrink[1];
                mma_16x8x16<T>(sums, weights, n ? right : left);
            }
        }
    }

    // Leaves the warp's part in shared memory: sums of weighted values (16, kMergeStride), largest logits and sums (16,).
    __device__ __forceinline__ void leave(float *outputs, float *tops, float *sums) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        for (int half = 0; half < 2; ++half) {
            float all = sum[half];
            all += __shfl_xor_sync(kWarp, all, 1);
            all += __shfl_xor_sync(kWarp, all, 2);
            const int row = lane / 4 + 8 * half;
            if (lane % 4 == 0) tops[row] = most[half], sums[row] = all;
#pragma unroll
            for (int n = 0; n < D / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    outputs[row * Layout<D>::kMergeStride + 8 * n + 2 * (lane % 4) + i] = output[n][2 * half + i];
        }
    }
};

template <class T, int D>
__global__ void __launch_bounds__(Layout<D>::kThreads) attention_kernel(oasis_paged_attention_args a, AttentionPlan plan) {
    using L = Layout<D>;
    Carver carver;
    unsigned char *buffers = carver.take<unsigned char>(L::kBufferBytes);
    int *positions = carver.take<int>(2 * L::kTokens);
    const T **listed_keys = carver.take<const T *>(kMaxPlaces);
    int *listed_tokens = carver.take<int>(kMaxPlaces);
    int *count = carver.take<int>(1);
    float *tops = carver.take<float>(2 * L::kWarps * kTile), *sums = tops + L::kWarps * kTile;

    const int64_t split = blockIdx.x, head = blockIdx.y;
    const int64_t sequence = blockIdx.z / plan.row_groups, block_row = blockIdx.z % plan.row_groups * L::kWarps * kTile;
    const PlaceList<T> list = list_places<T>(a, plan, sequence, head, split, listed_keys, listed_tokens, count);
    const int stages = ceil_div(list.count * static_cast<int>(a.block_size), L::kTokens);

    // Tiles of query rows: 1, 2 or 4, so that they divide the warps.
    const int64_t rows_left = plan.group_rows - block_row;
    int tiles = 1;
    while (tiles < L::kWarps && tiles * kTile < rows_left) tiles *= 2;
    const int warp = static_cast<int>(threadIdx.x) / 32, tile = warp % tiles, first_part = warp / tiles, parts = L::kWarps / tiles;
    WarpState<T, D> state;
    state.begin(a, sequence, head, block_row + tile * kTile, plan.group_rows);

    const float scale = a.scale * kLog2E, softcap = a.softcap * kLog2E;
    if (stages > 0) load_stage<T, D>(a, list, 0, buffers, positions);
    commit_async();
    for (int stage = 0; stage < stages; ++stage) {
        const int now = stage % 2, next = 1 - now;
        if (stage + 1 < stages)
            load_stage<T, D>(a, list, stage + 1, buffers + next * L::kStageBytes, positions + next * L::kTokens);
        commit_async();
        wait_async<1>(); // this stage is here; the next may be under way
        __syncthreads();
        const unsigned char *keys = buffers + now * L::kStageBytes;
        for (int part = first_part; part < L::kTokens / kTile; part += parts)
            state.attend(keys, keys + L::kTileBytes, positions + now * L::kTokens, part * kTile, scale, softcap);
        __syncthreads(); // all have read it: it may be overwritten
    }
    wait_async<0>();

    auto *outputs = reinterpret_cast<float *>(buffers);
    state.leave(outputs + warp * kTile * L::kMergeStride, tops + warp * kTile, sums + warp * kTile);
    __syncthreads();
    for (int index = static_cast<int>(threadIdx.x); index < tiles * kTile * D; index += L::kThreads) {
        const int row = index / D, dim = index % D; // row: of all tiles, which lie in the order of the first warps
        const int64_t m = block_row + row;
        if (m >= plan.group_rows) break;
        float top = -INFINITY;
        for (int part = 0; part < parts; ++part) top = not_below(top, tops[part * tiles * kTile + row]);
        const float base = top == -INFINITY ? 0.0f : top;
        float weight = 0.0f, value = 0.0f;
        for (int part = 0; part < parts; ++part) {
            const int at = part * tiles * kTile + row;
            const float share = exp2f(tops[at] - base);
            weight += share * sums[at];
            value += share * outputs[at * L::kMergeStride + dim];
        }
        store_output<T>(a, plan, sequence, head, split, m, dim, weight > 0.0f ? value / weight : 0.0f);
        if (dim == 0) store_logsumexp(a, plan, sequence, head, split, m, weight > 0.0f ? (base + log2f(weight)) * kLn2 : -INFINITY);
    }
}

template <class T, int D> int32_t launch_attention(const oasis_paged_attention_args &a, const AttentionPlan &plan) {
    const dim3 grid(static_cast<unsigned>(plan.splits), static_cast<unsigned>(a.kv_heads),
                    static_cast<unsigned>(a.sequences * plan.row_groups));
    return launch("attention", attention_kernel<T, D>, grid, Layout<D>::kThreads, Layout<D>::shared_bytes(), a.stream, a, plan);
}

} // namespace

int64_t half_block_rows(int64_t head_dim) { return stage_tokens(head_dim); }

int32_t attend_half(const oasis_paged_attention_args &a, const AttentionPlan &plan) {
    if (a.block_size < 4 || a.block_size > 64)
        return fail(OASIS_UNSUPPORTED, "block_size is %lld, not 4 to 64", static_cast<long long>(a.block_size));
    switch (a.head_dim) {
#define OASIS_CASE(D)                                                                                                              \
    case D: return a.dtype == OASIS_BFLOAT16 ? launch_attention<__nv_bfloat16, D>(a, plan) : launch_attention<__half, D>(a, plan);
        OASIS_HEAD_DIMS(OASIS_CASE)
#undef OASIS_CASE
    default: return fail(OASIS_UNSUPPORTED, "head_dim is %lld", static_cast<long long>(a.head_dim));
    }
}

} // namespace oasis
