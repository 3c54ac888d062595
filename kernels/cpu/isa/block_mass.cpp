// Softmax over a sequence's blocks, summed over the query heads of each group.
#include "declarations.h"
#include "simd.h"
#include "threads.h"
#include "workspace.h"

#include <algorithm>
#include <limits>

namespace oasis::OASIS_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Vector of the elements from `i`, -inf beyond `count`.
OASIS_INLINE F32 load_logits(const float *logits, int64_t i, int64_t count) {
    if (i + kLanes <= count) return load(logits + i);
    const auto left = static_cast<int32_t>(count - i);
    return lane_numbers() < broadcast(left) ? load_first(logits + i, left) : broadcast(-kInfinity);
}

// mass += softmax(logits), or = for the `first` head. `shares` has room for `count` floats and a vector.
void add_softmax(const float *logits, int64_t count, float *shares, float *mass, bool first) {
    F32 most = broadcast(-kInfinity);
    for (int64_t i = 0; i < count; i += kLanes) most = larger(most, load_logits(logits, i, count));
    const float base = largest(most);
    F32 total = {};
    for (int64_t i = 0; i < count; i += kLanes) {
        const F32 share = exp2_nonpositive((load_logits(logits, i, count) - base) * 1.44269504f);
        // Where all logits are -inf the lanes beyond are no numbers either, which is what the sum must be then.
        total += share;
        store(shares + i, share);
    }
    const float factor = 1.0f / sum(total);
    for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t left = std::min<int64_t>(kLanes, count - i);
        const F32 before = first ? F32{} : load_first(mass + i, left);
        store_first(mass + i, before + load(shares + i) * factor, left);
    }
}

} // namespace

void block_mass(const oasis_block_mass_args &a) {
    const int64_t group = a.query_heads / a.kv_heads;
    // Exponentials take longer than the reading of what they are taken of.
    const int64_t bytes = 4 * a.sequences * a.rows * a.query_heads * a.blocks * static_cast<int64_t>(sizeof(float));
    parallel_for(a.sequences * a.rows * a.kv_heads, a.num_threads, bytes, [&](int64_t task) {
        const int64_t row = task / a.kv_heads, head = task % a.kv_heads;
        const int64_t count = std::clamp<int64_t>(a.num_blocks[row / a.rows], 0, a.blocks);
        float *mass = a.mass + task * a.blocks;
        auto *shares = reinterpret_cast<float *>(workspace((count + kLanes) * sizeof(float)));
        for (int64_t g = 0; g < group; ++g)
            add_softmax(a.logits + (row * a.query_heads + head * group + g) * a.blocks, count, shares, mass, g == 0);
        std::fill(mass + count, mass + a.blocks, 0.0f);
    });
}

} // namespace oasis::OASIS_ISA
