#include "fiber.h"

#include <cstdint>

#if defined(__x86_64__)
// Saves what a callee must keep, stores the stack pointer, and takes up another one.
extern "C" void oasis_emu_switch(void **from, void *to);
asm(R"(
.text
.globl oasis_emu_switch
.hidden oasis_emu_switch
.type oasis_emu_switch, @function
oasis_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size oasis_emu_switch, .-oasis_emu_switch
)");
#endif

namespace emu {
namespace {
Fiber *left = nullptr; // who switched last
}

void Fiber::prepare(void *stack, size_t stack_bytes, void (*entry)()) {
    stack_ = stack;
    stack_bytes_ = stack_bytes;
    shadow_stack_ = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, stack_bytes); // the fiber before this one left its frames
#endif
#if defined(__x86_64__)
    auto *top = reinterpret_cast<uintptr_t *>((reinterpret_cast<uintptr_t>(stack) + stack_bytes) & ~uintptr_t{15});
    *--top = 0; // the caller of `entry`
    *--top = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; ++i) *--top = 0;
    stack_pointer_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = stack_bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
}

void Fiber::arrived() {
#if defined(__SANITIZE_ADDRESS__)
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (left->stack_ == nullptr) {
        left->stack_ = bottom;
        left->stack_bytes_ = bytes;
    }
#endif
}

void Fiber::change(Fiber &from, Fiber &to, bool from_ends) {
    left = &from;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.shadow_stack_, to.stack_, to.stack_bytes_);
#else
    static_cast<void>(from_ends);
#endif
#if defined(__x86_64__)
    oasis_emu_switch(&from.stack_pointer_, to.stack_pointer_);
#else
    swapcontext(&from.context_, &to.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.shadow_stack_, nullptr, nullptr);
#endif
}

} // namespace emu
