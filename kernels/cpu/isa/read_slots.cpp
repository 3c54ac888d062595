// The yardstick of the benchmarks: how fast can slots be read, if nothing is done with them?
#include "kernels.h"
#include "simd.h"
#include "threads.h"

#include <atomic>

namespace oasis::OASIS_ISA {

constexpr int64_t kAhead = 4; // slots

float read_slots(const oasis_read_slots_args &a) {
    const auto *pool = static_cast<const char *>(a.pool);
    std::atomic<float> total{0.0f};
    constexpr int64_t kPiece = 64;
    parallel_for((a.count + kPiece - 1) / kPiece, a.num_threads, a.count * a.slot_bytes, [&](int64_t piece) {
        F32 sums[4] = {};
        const int64_t end = a.count < (piece + 1) * kPiece ? a.count : (piece + 1) * kPiece;
        for (int64_t i = piece * kPiece; i < end; ++i) {
            if (a.slots[i] < 0) continue;
            const char *slot = pool + a.slots[i] * a.slot_bytes;
            const int64_t later = i + kAhead < a.count ? a.slots[i + kAhead] : a.slots[i];
            const char *next = pool + (later < 0 ? 0 : later) * a.slot_bytes;
            for (int64_t byte = 0; byte < a.slot_bytes; byte += 64) {
                prefetch(next + byte);
                for (int64_t part = 0; part < 64; part += sizeof(F32))
                    sums[(byte + part) / static_cast<int64_t>(sizeof(F32)) % 4] +=
                        load(reinterpret_cast<const float *>(slot + byte + part));
            }
        }
        total.fetch_add(sum(sums[0] + sums[1] + sums[2] + sums[3]), std::memory_order_relaxed);
    });
    return total;
}

} // namespace oasis::OASIS_ISA
