// Switching between stacks: a few instructions on x86-64, ucontext elsewhere. AddressSanitizer is told of every switch.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emu {

class Fiber {
  public:
    // `entry` must not return.
    void prepare(void *stack, size_t stack_bytes, void (*entry)());
    // Leaves `from`, which goes on when somebody switches to it. A fiber that will never run again says so.
    static void change(Fiber &from, Fiber &to, bool from_ends = false);
    // The first thing a fiber does.
    static void arrived();

  private:
#if defined(__x86_64__)
    void *stack_pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
    const void *stack_ = nullptr; // null: the thread's own
    size_t stack_bytes_ = 0;
    void *shadow_stack_ = nullptr;
};

} // namespace emu
