// exchange_slots: a block of threads per sequence pushes the slots of empty places onto the stack and hands slots to filled ones.
#include "common.cuh"

namespace oasis {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) exchange_slots_kernel(oasis_exchange_slots_args a) {
    Carver carver;
    int *partial = carver.take<int>(32);
    const int64_t sequence = blockIdx.x, tid = threadIdx.x;
    const int64_t heads = a.kv_heads, places = a.places_per_head, own_places = heads * places, filled = heads * a.swaps;
    const int64_t row = entry_within(a.rows[sequence], a.table_rows);
    const int64_t *wanted = a.places + sequence * filled;
    int64_t *granted = a.granted + sequence * filled;
    if (row < 0) { // all threads alike
        for (int64_t i = tid; i < filled; i += kThreads) granted[i] = OASIS_EMPTY;
        return;
    }
    const int64_t *kept = a.kept + sequence * own_places;
    int64_t *slots = a.slots + row * own_places, *stack = a.free_slots + row * a.capacity;
    int64_t depth = at_most(at_least(a.free_count[row], int64_t{0}), a.capacity);

    // Slots of places that stay empty go onto the stack, in the order of heads and places.
    for (int64_t first = 0; first < own_places; first += kThreads) {
        const int64_t i = first + tid;
        bool given = i < own_places && kept[i] < 0 && slots[i] >= 0;
        for (int64_t swap = 0; given && swap < a.swaps; ++swap) given = wanted[i / places * a.swaps + swap] != i % places;
        int total;
        const int64_t top = depth + count_before(given, partial, total);
        if (given) {
            if (top < a.capacity) stack[top] = slots[i];
            slots[i] = OASIS_EMPTY;
        }
        depth += total;
    }
    depth = at_most(depth, a.capacity);
    __syncthreads();

    // The best blocks of all heads are served first.
    int64_t asked = 0;
    for (int64_t first = 0; first < filled; first += kThreads) {
        const int64_t i = first + tid, head = i % heads, swap = i / heads;
        const int64_t place = i < filled ? entry_within(wanted[head * a.swaps + swap], places) : OASIS_EMPTY;
        const bool needs = place >= 0 && slots[head * places + place] < 0;
        int total;
        const int64_t order = asked + count_before(needs, partial, total);
        const bool served = needs && order < depth;
        if (i < filled) granted[head * a.swaps + swap] = needs && !served ? OASIS_EMPTY : place;
        if (served) slots[head * places + place] = stack[depth - 1 - order];
        asked += total;
    }
    if (tid == 0) a.free_count[row] = depth - at_most(asked, depth);
}

} // namespace
} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_exchange_slots(const oasis_exchange_slots_args *args) {
    const auto &a = *args;
    if (a.sequences == 0) return OASIS_OK;
    if (a.sequences > kMaxGridX) return fail(OASIS_UNSUPPORTED, "%lld sequences at once", static_cast<long long>(a.sequences));
    return launch("exchange_slots", exchange_slots_kernel, dim3(static_cast<unsigned>(a.sequences)), kThreads, 32 * sizeof(int),
                  a.stream, a);
}
