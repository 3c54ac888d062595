// Slots that selected blocks give back and take, from a stack per sequence.
#include "status.h"

#include <algorithm>
#include <vector>

using namespace oasis;

namespace {

bool tables_fit(const oasis_exchange_slots_args &a) {
    const int64_t heads = a.sequences * a.kv_heads;
    if (!entries_exist("rows", a.rows, a.sequences, a.table_rows)) return false;
    if (!entries_within("places", a.places, heads * a.swaps, a.places_per_head)) return false;
    for (int64_t s = 0; s < a.sequences; ++s) {
        if (const int64_t count = a.free_count[a.rows[s]]; count < 0 || count > a.capacity)
            return fail(OASIS_OUT_OF_RANGE, "count holds %lld for row %lld; a stack has room for %lld", static_cast<long long>(count),
                        static_cast<long long>(a.rows[s]), static_cast<long long>(a.capacity)) == OASIS_OK;
    }
    return true;
}

// One sequence: its row of the tables.
struct Exchange {
    const oasis_exchange_slots_args &a;
    int64_t sequence;
    int64_t *slots, *stack, *count;

    int64_t place(int64_t head, int64_t k) const { return a.places[(sequence * a.kv_heads + head) * a.swaps + k]; }

    // False if the stack is full.
    bool give_back() {
        std::vector<uint8_t> filled_anew(static_cast<size_t>(a.places_per_head));
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            std::fill(filled_anew.begin(), filled_anew.end(), uint8_t{0});
            for (int64_t k = 0; k < a.swaps; ++k)
                if (place(h, k) >= 0) filled_anew[static_cast<size_t>(place(h, k))] = 1;
            for (int64_t c = 0; c < a.places_per_head; ++c) {
                const int64_t at = (sequence * a.kv_heads + h) * a.places_per_head + c;
                int64_t &slot = slots[h * a.places_per_head + c];
                if (a.kept[at] >= 0 || slot < 0 || filled_anew[static_cast<size_t>(c)]) continue;
                if (*count == a.capacity) return false;
                stack[(*count)++] = slot;
                slot = OASIS_EMPTY;
            }
        }
        return true;
    }

    // The best of all heads first.
    void take() {
        for (int64_t k = 0; k < a.swaps; ++k)
            for (int64_t h = 0; h < a.kv_heads; ++h) {
                int64_t &granted = a.granted[(sequence * a.kv_heads + h) * a.swaps + k];
                granted = place(h, k);
                if (granted < 0) continue;
                int64_t &slot = slots[h * a.places_per_head + granted];
                if (slot >= 0) continue;
                if (*count > 0)
                    slot = stack[--*count];
                else
                    granted = OASIS_EMPTY;
            }
    }
};

} // namespace

extern "C" int32_t oasis_exchange_slots(const oasis_exchange_slots_args *args) {
    const auto &a = *args;
    if (!tables_fit(a)) return OASIS_OUT_OF_RANGE;
    for (int64_t s = 0; s < a.sequences; ++s) {
        const int64_t row = a.rows[s];
        Exchange exchange{a, s, a.slots + row * a.kv_heads * a.places_per_head, a.free_slots + row * a.capacity, a.free_count + row};
        if (!exchange.give_back())
            return fail(OASIS_INVALID, "the stack of row %lld has room for %lld slots only", static_cast<long long>(row),
                        static_cast<long long>(a.capacity));
        exchange.take();
    }
    return OASIS_OK;
}
