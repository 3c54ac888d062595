// What code that is compiled with -fsanitize=thread calls for each access. Linked in place of that sanitizer's runtime.
#include "machine.h"
#include "shadow.h"

#if defined(OASIS_EMU_CHECKED)
using emu::Access;

namespace {
void access(void *where, size_t bytes, size_t alignment, Access kind) {
    if (emu::machine.current == nullptr) return;
    if (reinterpret_cast<uintptr_t>(where) % alignment && !emu::on_a_stack(where))
        emu::find("%zu bytes are accessed at an address that is not aligned to %zu", bytes, alignment);
    emu::shadow_access(where, bytes, kind);
}
} // namespace

#define OASIS_EMU_HOOKS(bytes)                                                                                                     \
    void __tsan_read##bytes(void *where) { access(where, bytes, bytes, Access::kRead); }                                           \
    void __tsan_write##bytes(void *where) { access(where, bytes, bytes, Access::kWrite); }                                         \
    void __tsan_unaligned_read##bytes(void *where) { access(where, bytes, 1, Access::kRead); }                                     \
    void __tsan_unaligned_write##bytes(void *where) { access(where, bytes, 1, Access::kWrite); }

extern "C" {
OASIS_EMU_HOOKS(1)
OASIS_EMU_HOOKS(2)
OASIS_EMU_HOOKS(4)
OASIS_EMU_HOOKS(8)
OASIS_EMU_HOOKS(16)
void __tsan_read_range(void *where, size_t bytes) { access(where, bytes, 1, Access::kRead); }
void __tsan_write_range(void *where, size_t bytes) { access(where, bytes, 1, Access::kWrite); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
}
#endif
