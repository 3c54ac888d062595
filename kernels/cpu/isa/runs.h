// What attention reads, in the order in which it reads it, and prefetching of it.
#pragma once

#include "simd.h"

namespace oasis::OASIS_ISA {

// Tokens of one block that follow each other and that some row sees.
template <class T> struct Run {
    const T *keys;
    const T *values;
    int32_t count;
    int32_t lag; // how many tokens its first one lies before the newest position of the rows
};

// Prefetches runs line by line, a few lines at a time: requests that come evenly overlap with arithmetic, bursts stall it.
template <class T> class Ahead {
  public:
    void start(const Run<T> *runs, int64_t dim) { runs_ = runs, row_bytes_ = dim * static_cast<int64_t>(sizeof(T)); }

    // Runs from `limit` on are left alone for now.
    void allow(int64_t limit) { limit_ = limit; }

    OASIS_INLINE void advance(int64_t lines) {
        while (lines > 0 && run_ < limit_) {
            const Run<T> &run = runs_[run_];
            const auto *part = reinterpret_cast<const char *>(values_ ? run.values : run.keys);
            const int64_t bytes = run.count * row_bytes_, left = (bytes - byte_ + 63) / 64, now = lines < left ? lines : left;
            for (int64_t i = 0; i < now; ++i) prefetch(part + byte_ + i * 64);
            lines -= now;
            byte_ += now * 64;
            if (byte_ < bytes) continue;
            byte_ = 0;
            run_ += values_;
            values_ = !values_;
        }
    }

  private:
    const Run<T> *runs_ = nullptr;
    int64_t row_bytes_ = 0, limit_ = 0, run_ = 0, byte_ = 0;
    bool values_ = false;
};

} // namespace oasis::OASIS_ISA
