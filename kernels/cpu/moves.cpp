// Moving rows and whole slots. Memory does the work here, so there is one version for all processors.
#include "status.h"
#include "threads.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace oasis {
namespace {

// Pairs handed to a thread at once: enough to be worth it, few enough to share out evenly.
constexpr int64_t kPairsPerPiece = 8;

bool overlap(const oasis_copy_blocks_args &a) {
    const auto *source = static_cast<const char *>(a.source), *target = static_cast<const char *>(a.target);
    return source < target + a.num_target_slots * a.slot_bytes && target < source + a.num_source_slots * a.slot_bytes;
}

// Whether some slot's memory is both read and written. Source and target share memory.
bool reads_what_it_writes(const oasis_copy_blocks_args &a) {
    using Range = std::pair<const char *, const char *>;
    std::vector<Range> written;
    for (int64_t i = 0; i < a.num_pairs; ++i)
        if (a.source_slots[i] >= 0 && a.target_slots[i] >= 0) {
            const char *first = static_cast<const char *>(a.target) + a.target_slots[i] * a.slot_bytes;
            written.emplace_back(first, first + a.slot_bytes);
        }
    std::sort(written.begin(), written.end());
    for (int64_t i = 0; i < a.num_pairs; ++i) {
        if (a.source_slots[i] < 0 || a.target_slots[i] < 0) continue;
        const char *first = static_cast<const char *>(a.source) + a.source_slots[i] * a.slot_bytes;
        // The last written range that begins before this one ends: ranges are of one length and apart, so no other can meet it.
        auto after = std::lower_bound(written.begin(), written.end(), Range{first + a.slot_bytes, nullptr});
        if (after != written.begin() && std::prev(after)->second > first) return true;
    }
    return false;
}

} // namespace
} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_append_rows(const oasis_append_rows_args *args) {
    const auto &a = *args;
    if (!entries_within("slots", a.slots, a.num_tokens * a.kv_heads, a.num_slots)) return OASIS_OUT_OF_RANGE;
    if (!entries_within("offsets", a.offsets, a.num_tokens, a.block_size)) return OASIS_OUT_OF_RANGE;
    const int64_t row_bytes = a.head_dim * a.element_bytes;
    const auto *keys = static_cast<const char *>(a.keys), *values = static_cast<const char *>(a.values);
    auto *pool = static_cast<char *>(a.pool);
    parallel_for(a.num_tokens, a.num_threads, 4 * a.num_tokens * a.kv_heads * row_bytes, [&](int64_t token) {
        if (a.offsets[token] < 0) return;
        for (int64_t head = 0; head < a.kv_heads; ++head) {
            const int64_t slot = a.slots[token * a.kv_heads + head];
            if (slot < 0) continue;
            char *row = pool + (slot * 2 * a.block_size + a.offsets[token]) * row_bytes;
            const int64_t key = token * a.keys_token_stride + head * a.keys_head_stride;
            const int64_t value = token * a.values_token_stride + head * a.values_head_stride;
            std::memcpy(row, keys + key * a.element_bytes, row_bytes);
            std::memcpy(row + a.block_size * row_bytes, values + value * a.element_bytes, row_bytes);
        }
    });
    return OASIS_OK;
}

extern "C" int32_t oasis_copy_blocks(const oasis_copy_blocks_args *args) {
    const auto &a = *args;
    if (!entries_within("source_slots", a.source_slots, a.num_pairs, a.num_source_slots)) return OASIS_OUT_OF_RANGE;
    if (!entries_within("target_slots", a.target_slots, a.num_pairs, a.num_target_slots)) return OASIS_OUT_OF_RANGE;
    if (overlap(a) && reads_what_it_writes(a)) return fail(OASIS_UNSUPPORTED, "a slot is both read and written");
    const auto *source = static_cast<const char *>(a.source);
    auto *target = static_cast<char *>(a.target);
    const int64_t pieces = (a.num_pairs + kPairsPerPiece - 1) / kPairsPerPiece;
    parallel_for(pieces, a.num_threads, 2 * a.num_pairs * a.slot_bytes, [&](int64_t piece) {
        const int64_t end = std::min(a.num_pairs, (piece + 1) * kPairsPerPiece);
        for (int64_t i = piece * kPairsPerPiece; i < end; ++i)
            if (a.source_slots[i] >= 0 && a.target_slots[i] >= 0)
                std::memcpy(target + a.target_slots[i] * a.slot_bytes, source + a.source_slots[i] * a.slot_bytes, a.slot_bytes);
    });
    return OASIS_OK;
}
