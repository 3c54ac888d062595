// Runs pieces of work on the threads of the OpenMP runtime that is in the process already (torch's), so that there is one pool and
// not two that spin against each other. Without such a runtime everything runs on the calling thread.
#pragma once

#include <cstdint>
#include <type_traits>

namespace oasis {

// What one thread should have to do before a second one pays: waking it takes about as long as reading this much.
inline constexpr int64_t kBytesPerThread = 256 * 1024;

bool has_threads();

// Calls work(context, i) for each i below `count`, handed out one at a time in order, on at most `num_threads` threads.
void run_pieces(int64_t count, int64_t num_threads, void (*work)(void *, int64_t), void *context);

// As run_pieces, for a callable. `bytes` is what all pieces together read and write: little of it stays on this thread.
template <class Work> void parallel_for(int64_t count, int64_t num_threads, int64_t bytes, Work &&work) {
    if (bytes < num_threads * kBytesPerThread) num_threads = bytes / kBytesPerThread;
    if (num_threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; ++i) work(i);
        return;
    }
    using Callable = std::remove_reference_t<Work>;
    run_pieces(count, num_threads, [](void *context, int64_t i) { (*static_cast<Callable *>(context))(i); }, &work);
}

} // namespace oasis
