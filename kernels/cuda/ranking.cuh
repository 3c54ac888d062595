// Finding the largest of many numbers without sorting them, by one block of threads: the bits of the k-th largest are found eight
// at a time by counting (radix selection), then those above it are collected in the order of their places and ranked.
//
// Keys are `ordered_bits` of the masses, and 0 where a block is no candidate. Of equal keys the first places win, so the result
// does not depend on how threads run.
#pragma once

#include "common.cuh"

namespace oasis {

constexpr int kRankThreads = 512;
constexpr int kRankShared = 256 + 32 + 4; // ints of shared memory

struct Threshold {
    uint32_t key;    // of the count-th largest
    int64_t surplus; // how many with that very key are among the largest
};

// `count` is 1 to `size`. Barriers before and after the use of `shared`.
__device__ inline Threshold find_threshold(const uint32_t *keys, int64_t size, int64_t count, int *shared) {
    int *histogram = shared, *found = shared + 256 + 32;
    const int tid = static_cast<int>(threadIdx.x);
    uint32_t prefix = 0;
    int64_t left = count;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        if (tid < 256) histogram[tid] = 0;
        __syncthreads();
        const uint32_t above = shift == 24 ? 0u : ~0u << (shift + 8);
        for (int64_t n = tid; n < size; n += kRankThreads)
            if ((keys[n] & above) == prefix) atomicAdd(&histogram[keys[n] >> shift & 255u], 1);
        __syncthreads();
        // Thread i has the digit 255 - i: those before it have the larger ones.
        int total;
        const int own = tid < 256 ? histogram[255 - tid] : 0, before = count_before(own, shared + 256, total);
        if (tid < 256 && before < left && left <= before + own) found[0] = 255 - tid, found[1] = before;
        __syncthreads();
        prefix |= static_cast<uint32_t>(found[0]) << shift;
        left -= found[1];
    }
    return {prefix, left};
}

// Writes the places of the `count` largest keys, the largest first, to `best`; `unordered` is room for as many. Key 0 counts too.
__device__ inline void rank_largest(const uint32_t *keys, int64_t size, int64_t count, int64_t *best, int64_t *unordered,
                                    int *shared) {
    if (count == 0) return;
    const Threshold threshold = find_threshold(keys, size, count, shared);
    const int tid = static_cast<int>(threadIdx.x);
    int64_t collected = 0, equal = 0;
    for (int64_t first = 0; first < size; first += kRankThreads) {
        const int64_t n = first + tid;
        const uint32_t key = n < size ? keys[n] : 0u;
        const bool same = n < size && key == threshold.key;
        int same_total, total;
        const int same_before = count_before(same, shared, same_total);
        const bool taken = n < size && (key > threshold.key || (same && equal + same_before < threshold.surplus));
        const int before = count_before(taken, shared, total);
        if (taken) unordered[collected + before] = n;
        collected += total;
        equal += same_total;
    }
    __syncthreads();
    for (int64_t i = tid; i < count; i += kRankThreads) {
        const int64_t own = unordered[i];
        int64_t rank = 0;
        for (int64_t j = 0; j < count; ++j) rank += keys[unordered[j]] > keys[own] || (keys[unordered[j]] == keys[own] && j < i);
        best[rank] = own;
    }
    __syncthreads();
}

// Keys of the candidates `low <= block < high`; with `resident`, those that are there already are left out. Ends with a barrier.
__device__ inline void make_keys(const float *mass, int64_t blocks, int64_t low, int64_t high, const int64_t *resident,
                                 int64_t places, uint32_t *keys) {
    for (int64_t n = threadIdx.x; n < blocks; n += kRankThreads) keys[n] = n >= low && n < high ? ordered_bits(mass[n]) : 0u;
    __syncthreads();
    for (int64_t place = threadIdx.x; place < places; place += kRankThreads) {
        const int64_t block = entry_within(resident[place], blocks);
        if (block >= 0) keys[block] = 0u;
    }
    __syncthreads();
}

} // namespace oasis
