// What the attention kernels share: how work is split, which places a split reads, and where its result goes.
//
// The places of a head, those of the pool and those of the arena, are divided over `splits` blocks of threads, each of which gets
// its share of both: what comes over PCIe is not left to one of them. Each split leaves a normalised output and a logsumexp in
// scratch, and combine_kernel merges them. With one split the output is written at once.
#pragma once

#include "common.cuh"

#include <climits>

namespace oasis {

constexpr int kMaxPlaces = 256;        // of a split
constexpr int64_t kWantedBlocks = 264; // twice the multiprocessors of a large device; fixed, so that results do not depend on it
constexpr int64_t kWorthATrip = 128;   // tokens, below which another split costs more than it gains

struct AttentionPlan {
    int64_t group_rows; // query rows of a kv head: rows times heads of the group
    int64_t row_groups; // blocks of threads that share them
    int64_t splits;
    int64_t pool_share, arena_share; // places of a split
    float *outputs;                  // (S, H, splits, group_rows, D)
    float *logsumexps;               // (S, H, splits, group_rows)
};

// `block_rows`: query rows that a block of threads takes.
inline AttentionPlan plan_attention(const oasis_paged_attention_args &a, int64_t block_rows) {
    AttentionPlan plan{};
    plan.group_rows = a.rows * (a.query_heads / a.kv_heads);
    plan.row_groups = ceil_div(plan.group_rows, block_rows);
    const int64_t places = a.places + a.arena_places;
    const int64_t blocks = at_least(a.sequences * a.kv_heads * plan.row_groups, int64_t{1});
    const int64_t wanted = at_least(kWantedBlocks / blocks, int64_t{1});
    const int64_t least = ceil_div(kWorthATrip, a.block_size);
    const int64_t share = at_most(at_least(ceil_div(places, wanted), least), int64_t{kMaxPlaces - 2});
    plan.splits = at_least(ceil_div(places, share), int64_t{1});
    plan.pool_share = ceil_div(a.places, plan.splits);
    plan.arena_share = ceil_div(a.arena_places, plan.splits);
    const int64_t results = a.sequences * a.kv_heads * plan.splits * plan.group_rows;
    plan.outputs = static_cast<float *>(a.scratch);
    plan.logsumexps = reinterpret_cast<float *>(static_cast<char *>(a.scratch) +
                                                aligned(results * a.head_dim * static_cast<int64_t>(sizeof(float))));
    return plan;
}

int32_t attend_half(const oasis_paged_attention_args &a, const AttentionPlan &plan);
int32_t attend_float(const oasis_paged_attention_args &a, const AttentionPlan &plan);
int64_t half_block_rows(int64_t head_dim);
constexpr int64_t kFloatBlockRows = 16;

// The places of a split that some row may see.
template <class T> struct PlaceList {
    const T **keys; // first key of each block; its values follow block_size rows later
    int *tokens;    // position of its first token
    int count;
    int last_position; // that any row of the sequence may see
};

__device__ __forceinline__ int position_of_row(const oasis_paged_attention_args &a, int64_t sequence, int64_t row) {
    const int64_t position = a.positions[sequence * a.rows + row];
    return static_cast<int>(at_most(at_least(position, int64_t{-1}), int64_t{INT_MAX - 1}));
}

// The first warp writes the list in the order of the places; `count` is where it leaves the number. Ends with a barrier.
template <class T>
__device__ PlaceList<T> list_places(const oasis_paged_attention_args &a, const AttentionPlan &plan, int64_t sequence, int64_t head,
                                    int64_t split, const T **keys, int *tokens, int *count) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int last = -1;
    for (int64_t row = lane; row < a.rows; row += 32) last = at_least(last, position_of_row(a, sequence, row));
    for (int flip = 16; flip > 0; flip /= 2) last = at_least(last, __shfl_xor_sync(kWarp, last, flip));
    if (threadIdx.x < 32) {
        const int64_t last_block = last >= 0 ? last / a.block_size : -1, table = sequence * a.kv_heads + head;
        int listed = 0;
        for (int part = 0; part < 2; ++part) {
            const bool in_arena = part == 0; // the slow ones are asked for first
            const int64_t places = in_arena ? a.arena_places : a.places, share = in_arena ? plan.arena_share : plan.pool_share;
            const int64_t *slots = (in_arena ? a.arena_slots : a.slots) + table * places;
            const int64_t *blocks = (in_arena ? a.arena_blocks : a.blocks) + table * places;
            const auto *memory = static_cast<const T *>(in_arena ? a.arena : a.pool);
            const int64_t end = at_most(places, (split + 1) * share);
            for (int64_t first = split * share; first < end; first += 32) {
                const int64_t place = first + lane;
                const int64_t slot =
                    place < end ? entry_within(slots[place], in_arena ? a.num_arena_slots : a.num_slots) : OASIS_EMPTY;
                const int64_t block = place < end ? blocks[place] : OASIS_EMPTY;
                const bool seen = slot >= 0 && block >= 0 && block <= last_block;
                const uint32_t all = __ballot_sync(kWarp, seen);
                if (seen) {
                    const int at = listed + __popc(all & ((1u << lane) - 1u));
                    keys[at] = memory + slot * 2 * a.block_size * a.head_dim;
                    tokens[at] = static_cast<int>(block * a.block_size);
                }
                listed += __popc(all);
            }
        }
        if (lane == 0) *count = listed;
    }
    __syncthreads();
    return {keys, tokens, *count, last};
}

// Where the result of a query row goes: row `m` of the group is head m % group of row m / group.
__device__ __forceinline__ int64_t output_row(const oasis_paged_attention_args &a, int64_t sequence, int64_t head, int64_t m) {
    const int64_t group = a.query_heads / a.kv_heads;
    return (sequence * a.rows + m / group) * a.query_heads + head * group + m % group;
}

template <class T>
__device__ __forceinline__ const T *query_row(const oasis_paged_attention_args &a, int64_t sequence, int64_t head, int64_t m) {
    const int64_t group = a.query_heads / a.kv_heads;
    return static_cast<const T *>(a.queries) + sequence * a.queries_sequence_stride + m / group * a.queries_row_stride +
           (head * group + m % group) * a.queries_head_stride;
}

template <class T>
__device__ __forceinline__ void store_output(const oasis_paged_attention_args &a, const AttentionPlan &plan, int64_t sequence,
                                             int64_t head, int64_t split, int64_t m, int64_t dim, float value) {
    if (plan.splits == 1) static_cast<T *>(a.output)[output_row(a, sequence, head, m) * a.head_dim + dim] = from_float<T>(value);
    else plan.outputs[(((sequence * a.kv_heads + head) * plan.splits + split) * plan.group_rows + m) * a.head_dim + dim] = value;
}

__device__ __forceinline__ void store_logsumexp(const oasis_paged_attention_args &a, const AttentionPlan &plan, int64_t sequence,
                                                int64_t head, int64_t split, int64_t m, float value) {
    if (plan.splits == 1) a.logsumexp[output_row(a, sequence, head, m)] = value;
    else plan.logsumexps[((sequence * a.kv_heads + head) * plan.splits + split) * plan.group_rows + m] = value;
}

} // namespace oasis
