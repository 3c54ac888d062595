// What native/device.cuh is for nvcc, for the emulator: launches, dynamic shared memory, and the instructions without a C++ name.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"
#include "mma.h"

#include <tuple>

namespace oasis {

inline const char *const kCompiler = "emulated on the CPU, " __VERSION__;

inline unsigned char *shared_memory() { return static_cast<unsigned char *>(emu::shared_memory()); }

inline void copy_async16(void *target, const void *source, bool wanted) { emu::copy_async(target, source, 16, wanted ? 16 : 0); }
inline void commit_async() { emu::commit_async(); }
template <int kMissing> void wait_async() { emu::wait_async(kMissing); }

inline const char *error_text(cudaError_t) { return "no error"; }

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(const char *name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
                          Arguments... arguments) {
    struct Closure {
        void (*kernel)(Parameters...);
        std::tuple<Parameters...> parameters;
    };
    const Closure closure{kernel, {static_cast<Parameters>(arguments)...}};
    emu::run_grid(name, grid, block, shared_bytes, &closure, sizeof closure, [](const void *bytes) {
        const auto *copy = static_cast<const Closure *>(bytes);
        std::apply(copy->kernel, copy->parameters);
    });
    return cudaSuccess;
}

} // namespace oasis
