// What takes selected blocks out of the tables, loads others from the arena and lists them. Sizes are small and memory does the work.
#include "status.h"
#include "threads.h"

#include <algorithm>
#include <cstring>

using namespace oasis;

extern "C" int32_t oasis_mark_places(const oasis_mark_places_args *args) {
    const auto &a = *args;
    if (!entries_exist("rows", a.table_rows, a.sequences, a.num_table_rows)) return OASIS_OUT_OF_RANGE;
    if (!entries_within("places", a.places, a.sequences * a.kv_heads * a.swaps, a.places_per_head)) return OASIS_OUT_OF_RANGE;
    const int64_t width = a.kv_heads * a.places_per_head;
    for (int64_t s = 0; s < a.sequences; ++s) {
        const int64_t *slots = a.slots + a.table_rows[s] * width;
        std::copy_n(a.kept + s * width, width, a.blocks + a.table_rows[s] * width);
        for (int64_t i = 0; i < a.kv_heads * a.swaps; ++i) {
            const int64_t place = a.places[s * a.kv_heads * a.swaps + i];
            a.filled[s * a.kv_heads * a.swaps + i] = place < 0 ? OASIS_EMPTY : slots[i / a.swaps * a.places_per_head + place];
        }
    }
    return OASIS_OK;
}

extern "C" int32_t oasis_load_blocks(const oasis_load_blocks_args *args) {
    const auto &a = *args;
    const int64_t heads = a.sequences * a.kv_heads;
    if (!entries_within("blocks", a.blocks, heads * a.swaps, a.num_sealed)) return OASIS_OUT_OF_RANGE;
    if (!entries_within("slots", a.slots, heads * a.swaps, a.num_slots)) return OASIS_OUT_OF_RANGE;
    for (int64_t i = 0; i < heads * a.swaps; ++i) {
        if (a.slots[i] < 0 || a.blocks[i] < 0) continue;
        const int64_t at = i / a.swaps * a.num_sealed + a.blocks[i];
        if (a.arena_slots[at] < OASIS_EMPTY || a.arena_slots[at] >= a.num_arena_slots)
            return out_of_range("arena_slots", a.arena_slots, at, a.num_arena_slots);
    }
    const auto *arena = static_cast<const char *>(a.arena);
    auto *pool = static_cast<char *>(a.pool);
    parallel_for(heads, a.num_threads, 2 * heads * a.swaps * a.slot_bytes, [&](int64_t head) {
        for (int64_t i = head * a.swaps; i < (head + 1) * a.swaps; ++i) {
            if (a.slots[i] < 0 || a.blocks[i] < 0) continue;
            const int64_t slot = a.arena_slots[head * a.num_sealed + a.blocks[i]];
            if (slot < 0) continue;
            std::memcpy(pool + a.slots[i] * a.slot_bytes, arena + slot * a.slot_bytes, static_cast<size_t>(a.slot_bytes));
        }
    });
    for (int64_t s = 0; s < a.sequences; ++s) {
        int64_t all = 0, most = 0;
        for (int64_t head = s * a.kv_heads; head < (s + 1) * a.kv_heads; ++head) {
            const int64_t *slots = a.slots + head * a.swaps;
            const auto loaded = static_cast<int64_t>(std::count_if(slots, slots + a.swaps, [](int64_t slot) { return slot >= 0; }));
            all += loaded;
            most = std::max(most, loaded);
        }
        a.counts[2 * s] = all;
        a.counts[2 * s + 1] = most;
    }
    return OASIS_OK;
}

extern "C" int32_t oasis_publish_blocks(const oasis_publish_blocks_args *args) {
    const auto &a = *args;
    if (!entries_exist("rows", a.table_rows, a.sequences, a.num_table_rows)) return OASIS_OUT_OF_RANGE;
    if (!entries_within("places", a.places, a.sequences * a.kv_heads * a.swaps, a.places_per_head)) return OASIS_OUT_OF_RANGE;
    const int64_t width = a.kv_heads * a.places_per_head;
    for (int64_t s = 0; s < a.sequences; ++s) {
        int64_t *blocks = a.blocks + a.table_rows[s] * width;
        std::copy_n(a.kept + s * width, width, blocks);
        std::copy_n(a.stamps + s * width, width, a.selected_at + a.table_rows[s] * width);
        for (int64_t i = 0; i < a.kv_heads * a.swaps; ++i) {
            const int64_t at = s * a.kv_heads * a.swaps + i;
            if (a.places[at] >= 0) blocks[i / a.swaps * a.places_per_head + a.places[at]] = a.new_blocks[at];
        }
    }
    return OASIS_OK;
}
