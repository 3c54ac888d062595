// select: pairs missing blocks with resident ones. A block of threads per head proposes swaps; then one per sequence keeps those of
// all heads that gain most, and writes the results.
#include "ranking.cuh"
#include "scratch.cuh"

namespace oasis {
namespace {

// Scratch of a head.
struct Room {
    uint32_t *keys;     // (N,)
    int64_t *best;      // (K,)
    int64_t *unordered; // (K,)
    int64_t *worst;     // (K,) places
    float *worth;       // (C,)
    int64_t *stamps;    // (C,)
    uint32_t *gain;     // (K,) ordered bits of what an accepted swap gains, 0 of others
    int64_t *counts;    // (2,)
};

__host__ __device__ int64_t room_bytes(const oasis_select_args &a) {
    return aligned(4 * a.blocks) + aligned(3 * 8 * a.swaps) + aligned(4 * a.places) + aligned(8 * a.places) + aligned(4 * a.swaps) +
           aligned(16);
}

__device__ Room room_of(const oasis_select_args &a, int64_t row) {
    char *at = static_cast<char *>(a.scratch) + row * room_bytes(a);
    const auto take = [&](int64_t bytes) {
        char *part = at;
        at += aligned(bytes);
        return part;
    };
    Room room;
    room.keys = reinterpret_cast<uint32_t *>(take(4 * a.blocks));
    room.best = reinterpret_cast<int64_t *>(take(3 * 8 * a.swaps));
    room.unordered = room.best + a.swaps;
    room.worst = room.unordered + a.swaps;
    room.worth = reinterpret_cast<float *>(take(4 * a.places));
    room.stamps = reinterpret_cast<int64_t *>(take(8 * a.places));
    room.gain = reinterpret_cast<uint32_t *>(take(4 * a.swaps));
    room.counts = reinterpret_cast<int64_t *>(take(16));
    return room;
}

// Scratch of a sequence, behind that of all heads: gains of all heads together, and room to find their threshold.
__host__ __device__ int64_t pooled_bytes(const oasis_select_args &a) { return aligned(4 * a.kv_heads * a.swaps); }

// The mass from which on a block is wanted: that of the C-th best candidate, at least `least` and 0.
__device__ float wanted_from(const oasis_select_args &a, const Room &room, float least, int *shared) {
    const int64_t wanted = at_most(a.places, a.blocks);
    if (wanted == 0) return not_below(least, 0.0f);
    const uint32_t key = find_threshold(room.keys, a.blocks, wanted, shared).key;
    const float mass = key == 0u ? -1.0f : __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
    return not_below(not_below(mass, least), 0.0f);
}

__global__ void __launch_bounds__(kRankThreads) propose_kernel(oasis_select_args a) {
    Carver carver;
    int *shared = carver.take<int>(kRankShared);
    int64_t *partial = carver.take<int64_t>(32);
    const int64_t row = blockIdx.x, sequence = row / a.kv_heads;
    const float *mass = a.mass + row * a.blocks;
    const int64_t *resident = a.resident + row * a.places;
    const int64_t low = a.low[sequence], high = a.high[sequence];
    const float least = a.floor[sequence];
    const Room room = room_of(a, row);

    make_keys(mass, a.blocks, low, high, nullptr, 0, room.keys);
    const float threshold = wanted_from(a, room, least, shared);
    int64_t candidates = 0;
    for (int64_t n = threadIdx.x; n < a.blocks; n += kRankThreads)
        candidates += room.keys[n] != 0u && mass[n] >= 0.0f && mass[n] >= least;
    candidates = block_sum(candidates, partial);

    int64_t hits = 0;
    for (int64_t place = threadIdx.x; place < a.places; place += kRankThreads) {
        const int64_t block = resident[place];
        const bool eligible = block >= low && block < high && block >= 0 && block < a.blocks;
        const float held = eligible ? mass[block] : -1.0f;
        const bool hit = eligible && held >= threshold;
        hits += hit;
        room.worth[place] = block >= 0 ? held : least;
        room.stamps[place] = hit ? a.step : a.selected_at[row * a.places + place];
        a.new_selected_at[row * a.places + place] = room.stamps[place];
        a.kept[row * a.places + place] = block >= 0 && least >= 0.0f && held < a.keep * least ? OASIS_EMPTY : block;
    }
    hits = block_sum(hits, partial);
    if (threadIdx.x == 0) room.counts[0] = hits, room.counts[1] = at_most(candidates, at_most(a.places, a.blocks));

    // The worst places first; of equal worth the one that was wanted longest ago, and of these the first.
    for (int64_t place = threadIdx.x; place < a.places; place += kRankThreads) {
        const float worth = room.worth[place];
        const int64_t stamp = room.stamps[place];
        int64_t rank = 0;
        for (int64_t other = 0; other < a.places; ++other) {
            const float their_worth = room.worth[other];
            const int64_t their_stamp = room.stamps[other];
            rank +=
                their_worth < worth || (their_worth == worth && (their_stamp < stamp || (their_stamp == stamp && other < place)));
        }
        if (rank < a.swaps) room.worst[rank] = place;
    }

    make_keys(mass, a.blocks, low, high, resident, a.places, room.keys);
    rank_largest(room.keys, a.blocks, a.swaps, room.best, room.unordered, shared);
    for (int64_t i = threadIdx.x; i < a.swaps; i += kRankThreads) {
        const int64_t block = room.keys[room.best[i]] != 0u ? room.best[i] : OASIS_EMPTY;
        const float gain = block >= 0 ? mass[block] : -1.0f, lost = room.worth[room.worst[i]];
        const bool replaces = resident[room.worst[i]] >= 0 && lost >= 0.0f;
        const bool accepted = block >= 0 && gain > not_below(least, 0.0f) && (!replaces || gain > lost + a.margin);
        room.best[i] = block;
        room.gain[i] = accepted ? ordered_bits(gain - not_below(lost, 0.0f)) : 0u;
    }
}

// A block of threads per sequence.
__global__ void __launch_bounds__(kRankThreads) settle_kernel(oasis_select_args a) {
    Carver carver;
    int *shared = carver.take<int>(kRankShared);
    const int64_t sequence = blockIdx.x, first_row = sequence * a.kv_heads, all = a.kv_heads * a.swaps;
    auto *gains = reinterpret_cast<uint32_t *>(static_cast<char *>(a.scratch) + a.sequences * a.kv_heads * room_bytes(a) +
                                               sequence * pooled_bytes(a));
    for (int64_t i = threadIdx.x; i < all; i += kRankThreads) gains[i] = room_of(a, first_row + i / a.swaps).gain[i % a.swaps];
    __syncthreads();
    Threshold threshold{0u, all};
    if (a.pooled < all) threshold = a.pooled > 0 ? find_threshold(gains, all, a.pooled, shared) : Threshold{~0u, 0};
    int64_t equal = 0;
    for (int64_t first = 0; first < all; first += kRankThreads) {
        const int64_t i = first + threadIdx.x;
        const uint32_t gain = i < all ? gains[i] : 0u;
        int total;
        const int before = count_before(gain == threshold.key, shared, total);
        const bool accepted = gain != 0u && (gain > threshold.key || (gain == threshold.key && equal + before < threshold.surplus));
        equal += total;
        if (i >= all) continue;
        const int64_t row = first_row + i / a.swaps, swap = i % a.swaps;
        const Room room = room_of(a, row);
        const int64_t place = room.worst[swap];
        a.swap_places[row * a.swaps + swap] = accepted ? place : OASIS_EMPTY;
        a.swap_blocks[row * a.swaps + swap] = accepted ? room.best[swap] : OASIS_EMPTY;
        if (!accepted) continue;
        a.kept[row * a.places + place] = OASIS_EMPTY;
        a.new_selected_at[row * a.places + place] = a.step;
    }
    if (threadIdx.x < 2) {
        int64_t sum = 0;
        for (int64_t head = 0; head < a.kv_heads; ++head) sum += room_of(a, first_row + head).counts[threadIdx.x];
        a.counts[sequence * 2 + threadIdx.x] = sum;
    }
}

} // namespace

int64_t select_scratch_bytes(const oasis_select_args &a) { return a.sequences * (a.kv_heads * room_bytes(a) + pooled_bytes(a)); }

} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_select(const oasis_select_args *args) {
    const auto &a = *args;
    if (a.swaps > at_most(a.blocks, a.places))
        return fail(OASIS_INVALID, "swaps is %lld of %lld blocks and %lld places", static_cast<long long>(a.swaps),
                    static_cast<long long>(a.blocks), static_cast<long long>(a.places));
    if (a.scratch_bytes < select_scratch_bytes(a))
        return fail(OASIS_INVALID, "scratch_bytes is %lld", static_cast<long long>(a.scratch_bytes));
    const int64_t heads = a.sequences * a.kv_heads;
    if (a.sequences == 0) return OASIS_OK;
    if (heads > kMaxGridX) return fail(OASIS_UNSUPPORTED, "%lld heads at once", static_cast<long long>(heads));
    const size_t shared = carved(kRankShared * sizeof(int), 32 * sizeof(int64_t));
    if (int32_t status = launch("propose", propose_kernel, dim3(static_cast<unsigned>(heads)), kRankThreads, shared, a.stream, a))
        return status;
    return launch("settle", settle_kernel, dim3(static_cast<unsigned>(a.sequences)), kRankThreads, shared, a.stream, a);
}
