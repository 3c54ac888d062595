// Runs CUDA kernels on the CPU, for tests: every CUDA thread is a fiber, blocks run one after the other.
//
// What is emulated is the contract, not the hardware: barriers, warp functions, cp.async whose data arrives at the wait and no
// earlier, and mma.sync with the fragment layouts of the PTX manual. What it cannot show is speed, what the memory system may
// reorder, and what nvcc makes of the code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace emu {

constexpr uint32_t kFullWarp = 0xffffffffu;
constexpr int kMaxThreads = 1024;

struct Dim {
    unsigned x = 1, y = 1, z = 1;
    Dim(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

Dim thread_index();
Dim block_index();
Dim block_size();
Dim grid_size();
int lane();
void *shared_memory();

void sync_threads();
void sync_warp(uint32_t mask);

// What the lanes of a warp do together. Each brings an operand; when the last one has come, `combine` sees all 32 and writes
// results into them. `kind` names the operation: lanes that meet in different ones are an error.
using Combine = void (*)(void *const operands[32]);
void meet(uint32_t mask, const char *kind, void *operand, Combine combine);

template <class T> struct ShuffleOperand {
    T value, result;
    int source;
};

template <class T> T shuffle(uint32_t mask, T value, int source) {
    ShuffleOperand<T> mine{value, value, source};
    meet(mask, "shuffle", &mine, [](void *const operands[32]) [[gnu::no_sanitize("thread")]] {
        for (int i = 0; i < 32; ++i) {
            auto *to = static_cast<ShuffleOperand<T> *>(operands[i]);
            to->result = static_cast<ShuffleOperand<T> *>(operands[to->source])->value;
        }
    });
    return mine.result;
}

uint32_t ballot(uint32_t mask, bool predicate);

// cp.async: the bytes arrive when the thread that asked for them waits for their group. Bytes beyond `source_bytes` are zero.
void copy_async(void *target, const void *source, int bytes, int source_bytes);
void commit_async();
void wait_async(int groups_that_may_be_missing);

void note_atomic(const void *where, size_t bytes);
// An access that no instrumented code makes, but one that stands for it.
void note_read(const void *where, size_t bytes);

// A launch copies the closure, as a launch copies a kernel's arguments.
void run_grid(const char *kernel, Dim grid, Dim block, size_t shared_bytes, const void *closure, size_t closure_bytes,
              void (*body)(const void *closure));

} // namespace emu
