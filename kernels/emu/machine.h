// The state of the emulated device. One block runs at a time, in one thread of the operating system.
#pragma once

#include "emulator.h"
#include "fiber.h"

#include <deque>
#include <vector>

namespace emu {

constexpr size_t kMaxShared = 232448;
constexpr size_t kGuard = 4096;

// Something that a thread asked cp.async for.
struct AsyncCopy {
    char *target;
    const char *source;
    int bytes, source_bytes;
};

struct Thread {
    Fiber fiber;
    Dim index;
    int number = 0;
    bool ended = false;
    const uint64_t *waits_for = nullptr; // a counter that moves on when the wait is over
    uint64_t waits_since = 0;
    const char *waits_at = nullptr;
    std::vector<AsyncCopy> uncommitted;
    std::deque<std::vector<AsyncCopy>> committed;
};

struct Warp {
    uint64_t meetings = 0;
    uint32_t arrived = 0;
    const char *kind = nullptr;
    void *operands[32] = {};
};

struct Machine {
    Thread threads[kMaxThreads];
    Warp warps[kMaxThreads / 32];
    Thread *current = nullptr; // null outside of kernels
    Fiber host;
    Dim grid, block, block_index;
    int num_threads = 0;
    uint64_t barriers = 0;
    int at_barrier = 0;
    const char *kernel = "";
    size_t shared_bytes = 0;
    char *shared = nullptr;
    int order = 0;
};

extern Machine machine;

// Where the fibers' stacks lie.
bool on_a_stack(const void *where);

// Keeps a finding for emu_findings(), and ends the launch: a kernel does not come back from here, so that it can do no harm with what
// was wrong. Launches do nothing until emu_clear(). printf-like.
[[gnu::format(printf, 1, 2)]] void find(const char *format, ...);

} // namespace emu
