// A shadow of shared memory and of the tensors that a kernel writes: who touched each byte last, and when. It finds
// - accesses of two threads, one of them a write, with no barrier between them (of two blocks: ever, within one launch),
// - reads of shared memory that nobody wrote, or that a cp.async has yet to fill,
// - accesses outside of shared memory and of the tensors of the call, writes to those that are only read, and misaligned ones.
//
// The compiler reports every access: code is compiled with -fsanitize=thread but linked with hooks.cpp in place of that runtime.
#pragma once

#include <cstddef>

namespace emu {

enum class Access { kRead, kWrite, kAtomic, kAsyncBegin, kAsyncEnd };

void shadow_access(const void *where, size_t bytes, Access access);
void shadow_begin_launch();
void shadow_begin_block();
void shadow_barrier();
void shadow_warp_barrier(int warp);

// The memory that kernels may use from now on. `name` is kept by copy.
void shadow_tensor(const char *name, const void *data, size_t bytes, bool writable);
void shadow_forget_tensors();

} // namespace emu
