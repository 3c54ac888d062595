// Blocks, fibers, barriers, and what the lanes of a warp do together.
#include "emulator.h"

#include "machine.h"
#include "shadow.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/mman.h>

namespace emu {

Machine machine;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kMaxClosure = 4096;

char *stacks = nullptr;
alignas(1024) char shared_with_guards[kGuard + kMaxShared + kGuard];
alignas(64) char closure_copy[kMaxClosure];
void (*kernel_body)(const void *);
std::string findings;

void wait_for(const uint64_t &counter, const char *what) {
    Thread &self = *machine.current;
    self.waits_for = &counter;
    self.waits_since = counter;
    self.waits_at = what;
    Fiber::change(self.fiber, machine.host);
}

void run_thread() {
    Fiber::arrived();
    kernel_body(closure_copy);
    Thread &self = *machine.current;
    if (!self.uncommitted.empty() || !self.committed.empty()) find("a thread ends with a cp.async that it never waited for");
    self.uncommitted.clear();
    self.committed.clear();
    self.ended = true;
    Fiber::change(self.fiber, machine.host, true);
    std::abort();
}

// Barriers must hold whatever the order in which threads get to run, so tests try several.
int in_order(int step, int pass) {
    const int n = machine.num_threads;
    switch (machine.order) {
    case 0: return step;
    case 1: return n - 1 - step;
    default:
        return static_cast<int>((static_cast<unsigned>(step) * 37u + static_cast<unsigned>(pass) * 11u) % static_cast<unsigned>(n));
    }
}

void report_deadlock() {
    int ended = 0, barrier = 0, warp = 0;
    for (int i = 0; i < machine.num_threads; ++i) {
        const Thread &thread = machine.threads[i];
        if (thread.ended) ++ended;
        else if (thread.waits_for == &machine.barriers) ++barrier;
        else ++warp;
    }
    find("deadlock: %d threads wait at __syncthreads, %d for their warp, %d have ended", barrier, warp, ended);
}

void run_block() {
    const int n = machine.num_threads;
    int left = n;
    for (int pass = 0; left > 0; ++pass) {
        bool progress = false;
        for (int step = 0; step < n; ++step) {
            Thread &thread = machine.threads[in_order(step, pass)];
            if (thread.ended || (thread.waits_for && *thread.waits_for == thread.waits_since)) continue;
            progress = true;
            thread.waits_for = nullptr;
            machine.current = &thread;
            Fiber::change(machine.host, thread.fiber);
            machine.current = nullptr;
            if (!findings.empty()) return;
            if (thread.ended) --left;
        }
        if (!progress) return report_deadlock();
    }
}

void begin_block(Dim index) {
    machine.block_index = index;
    machine.at_barrier = 0;
    std::memset(shared_with_guards, 0xA5, kGuard);
    std::memset(machine.shared, 0xFF, machine.shared_bytes); // NaN, whatever the floating-point type
    std::memset(machine.shared + machine.shared_bytes, 0xA5, kGuard);
    shadow_begin_block();
    for (Warp &warp : machine.warps) warp.arrived = 0;
    for (int i = 0; i < machine.num_threads; ++i) {
        Thread &thread = machine.threads[i];
        thread.number = i;
        thread.ended = false;
        thread.waits_for = nullptr;
        thread.uncommitted.clear();
        thread.committed.clear();
        const unsigned x = machine.block.x, y = machine.block.y, u = static_cast<unsigned>(i);
        thread.index = Dim(u % x, u / x % y, u / x / y);
        thread.fiber.prepare(stacks + static_cast<size_t>(i) * kStackBytes, kStackBytes, run_thread);
    }
}

void check_guards() {
    for (size_t i = 0; i < kGuard; ++i)
        if (shared_with_guards[i] != static_cast<char>(0xA5) || machine.shared[machine.shared_bytes + i] != static_cast<char>(0xA5))
            return find("something wrote outside of shared memory");
}

} // namespace

bool on_a_stack(const void *where) {
    const char *byte = static_cast<const char *>(where);
    return byte >= stacks && byte < stacks + kMaxThreads * kStackBytes;
}

void find(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const Dim b = machine.block_index;
    char where[128];
    std::snprintf(where, sizeof where, " [%s, block %u %u %u, thread %d]\n", machine.kernel, b.x, b.y, b.z,
                  machine.current ? machine.current->number : -1);
    findings += text;
    findings += where;
    if (machine.current) Fiber::change(machine.current->fiber, machine.host, true); // for good
}

Dim thread_index() { return machine.current->index; }
Dim block_index() { return machine.block_index; }
Dim block_size() { return machine.block; }
Dim grid_size() { return machine.grid; }
int lane() { return machine.current->number % 32; }
void *shared_memory() { return machine.shared; }

void sync_threads() {
    if (++machine.at_barrier < machine.num_threads) return wait_for(machine.barriers, "__syncthreads");
    machine.at_barrier = 0;
    ++machine.barriers;
    shadow_barrier();
}

void meet(uint32_t mask, const char *kind, void *operand, Combine combine) {
    if (mask != kFullWarp) find("%s of part of a warp, which the emulator does not know", kind);
    const int number = machine.current->number;
    Warp &warp = machine.warps[number / 32];
    if (warp.arrived && std::strcmp(warp.kind, kind) != 0) find("lanes of one warp meet in %s and %s", warp.kind, kind);
    warp.kind = kind;
    warp.operands[number % 32] = operand;
    warp.arrived |= 1u << (number % 32);
    if (warp.arrived != kFullWarp) return wait_for(warp.meetings, kind);
    combine(warp.operands);
    warp.arrived = 0;
    ++warp.meetings;
}

void sync_warp(uint32_t mask) {
    meet(mask, "__syncwarp", nullptr, [](void *const[32]) { shadow_warp_barrier(machine.current->number / 32); });
}

uint32_t ballot(uint32_t mask, bool predicate) {
    uint32_t word = predicate;
    meet(mask, "ballot", &word, [](void *const operands[32]) {
        uint32_t all = 0;
        for (int i = 0; i < 32; ++i) all |= *static_cast<uint32_t *>(operands[i]) << i;
        for (int i = 0; i < 32; ++i) *static_cast<uint32_t *>(operands[i]) = all;
    });
    return word;
}

void run_grid(const char *kernel, Dim grid, Dim block, size_t shared_bytes, const void *closure, size_t closure_bytes,
              void (*body)(const void *)) {
    if (stacks == nullptr) {
        void *memory =
            mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        stacks = static_cast<char *>(memory);
    }
    if (!findings.empty()) return;
    machine.kernel = kernel;
    machine.num_threads = static_cast<int>(block.x * block.y * block.z);
    const bool fits = machine.num_threads % 32 == 0 && machine.num_threads <= kMaxThreads && shared_bytes <= kMaxShared;
    if (!fits || closure_bytes > kMaxClosure || grid.y > 65535 || grid.z > 65535)
        return find("a launch of %d threads with %zu bytes of shared memory and a grid of %u %u %u", machine.num_threads,
                    shared_bytes, grid.x, grid.y, grid.z);
    std::memcpy(closure_copy, closure, closure_bytes);
    kernel_body = body;
    machine.host = Fiber{};
    machine.grid = grid;
    machine.block = block;
    machine.shared = shared_with_guards + kGuard;
    machine.shared_bytes = shared_bytes;
    shadow_begin_launch();
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                begin_block(Dim(x, y, z));
                run_block();
                if (findings.empty()) check_guards();
                if (!findings.empty()) return;
            }
}

} // namespace emu

// What tests ask.
extern "C" {
[[gnu::visibility("default")]] void emu_set_order(int order) { emu::machine.order = order; }
[[gnu::visibility("default")]] const char *emu_findings(void) { return emu::findings.c_str(); }
[[gnu::visibility("default")]] void emu_clear(void) {
    emu::findings.clear();
    emu::shadow_forget_tensors();
}
[[gnu::visibility("default")]] void emu_tensor(const char *name, const void *data, size_t bytes, int writable) {
    emu::shadow_tensor(name, data, bytes, writable != 0);
}
}
