// What the kernels need of the device beyond CUDA C++: launches, dynamic shared memory, asynchronous copies, tensor cores.
// kernels/emu/include/device.cuh offers the same for the emulator; the include path chooses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define OASIS_STRING_(x) #x
#define OASIS_STRING(x) OASIS_STRING_(x)

namespace oasis {

inline const char *const kCompiler = "nvcc " OASIS_STRING(__CUDACC_VER_MAJOR__) "." OASIS_STRING(__CUDACC_VER_MINOR__);

__device__ __forceinline__ unsigned char *shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory, zeros if they are not wanted. They are there after the wait for their group.
__device__ __forceinline__ void copy_async16(void *target, const void *source, bool wanted) {
    const int source_bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source), "r"(source_bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the latest kMissing.
template <int kMissing> __device__ __forceinline__ void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kMissing) : "memory");
}

// c += a b: a is 16 x 16, b is 16 x 8, c is 16 x 8 in float.
template <class T> __device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <> __device__ __forceinline__ void mma_16x8x16<__half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8. Lane i gets of each matrix the
// elements 2 (i % 4) and the one after it, of row i / 4.
__device__ __forceinline__ void load_matrices_x4(uint32_t (&result)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void load_matrices_x4_transposed(uint32_t (&result)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(shared_address(row))
                 : "memory");
}

inline const char *error_text(cudaError_t error) { return cudaGetErrorString(error); }

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(const char *, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                          cudaStream_t stream, Arguments... arguments) {
    constexpr size_t kWithoutAsking = 48 * 1024;
    if (shared_bytes > kWithoutAsking) {
        const auto bytes = static_cast<int>(shared_bytes);
        if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    }
    kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
    return cudaGetLastError(); // without asking, a launch that failed looks like one that did not
}

} // namespace oasis
