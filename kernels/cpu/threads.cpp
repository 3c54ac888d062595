#include "threads.h"

#include <algorithm>
#include <atomic>
#include <dlfcn.h>

namespace oasis {
namespace {

// The entry point behind `#pragma omp parallel` of GCC, which LLVM's runtime offers too.
using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

Parallel find_parallel() { return reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel")); }

struct Job {
    int64_t count;
    void (*work)(void *, int64_t);
    void *context;
    std::atomic<int64_t> next{0};
};

void run_job(void *pointer) {
    Job &job = *static_cast<Job *>(pointer);
    for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) job.work(job.context, i);
}

const Parallel parallel = find_parallel();

} // namespace

bool has_threads() { return parallel != nullptr; }

void run_pieces(int64_t count, int64_t num_threads, void (*work)(void *, int64_t), void *context) {
    Job job{count, work, context};
    const auto threads = static_cast<unsigned>(std::min(num_threads, count));
    if (parallel == nullptr || threads <= 1) return run_job(&job);
    parallel(run_job, &job, threads, 0);
}

} // namespace oasis
