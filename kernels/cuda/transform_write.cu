// transform_write: the codes of sealed blocks. A block of threads per block of tokens: the nibbles of a byte belong to two tokens,
// and those of all heads lie together.
#include "block_scores.cuh"

namespace oasis {
namespace {

constexpr int kThreads = 256, kLevels = 15;

template <class T> __global__ void __launch_bounds__(kThreads) transform_write_kernel(oasis_transform_write_args a) {
    const int64_t index = blockIdx.x, page = entry_within(a.pages[index], a.num_pages);
    if (page < 0) return; // all threads alike
    const int head_dim = static_cast<int>(a.head_dim), row = head_dim + 1, half = static_cast<int>(a.block_size / 2);
    const int components = static_cast<int>(a.components), tid = static_cast<int>(threadIdx.x);
    const int64_t bytes = a.num_nibbles * half;
    Carver carver;
    uint32_t *packed = carver.take<uint32_t>(bytes); // a word per byte, since atomics have no bytes
    float *keys = carver.take<float>(a.block_size * row);
    for (int64_t i = tid; i < bytes; i += kThreads) packed[i] = 0u;
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        const auto *source = static_cast<const T *>(a.keys) + index * a.keys_block_stride + head * a.keys_head_stride;
        __syncthreads();
        for (int i = tid; i < 2 * half * head_dim; i += kThreads)
            keys[i / head_dim * row + i % head_dim] =
                to_float(source[i / head_dim * a.keys_token_stride + i % head_dim]) - a.mean[head * head_dim + i % head_dim];
        __syncthreads();
        const float *encode = a.encode + head * head_dim * components;
        for (int i = tid; i < 2 * half * components; i += kThreads) {
            const int token = i / components, component = i % components;
            float value = 0.0f;
            for (int dim = 0; dim < head_dim; ++dim)
                value += keys[token * row + dim] * encode[static_cast<int64_t>(dim) * components + component];
            if (value != value) value = 0.0f;
            const int64_t at = head * components + component;
            const float *thresholds = a.thresholds + at * kLevels;
            uint32_t code = 0;
            for (int level = 0; level < kLevels; ++level) code += value > thresholds[level];
            const int64_t nibble = entry_within(a.nibbles[at], a.num_nibbles);
            const uint32_t shift = static_cast<uint32_t>(a.shifts[at] & 3) + (token < half ? 0u : 4u);
            if (nibble >= 0 && code) atomicOr(&packed[nibble * half + token % half], code << shift);
        }
    }
    __syncthreads();
    uint8_t *codes = a.codes + page * bytes;
    for (int64_t i = tid; i < bytes; i += kThreads) codes[i] = static_cast<uint8_t>(packed[i]);
}

} // namespace
} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_transform_write(const oasis_transform_write_args *args) {
    const auto &a = *args;
    if (a.count == 0) return OASIS_OK;
    if (a.block_size < 2 || a.block_size % 2)
        return fail(OASIS_INVALID, "block_size is %lld", static_cast<long long>(a.block_size));
    if (a.count > kMaxGridX) return fail(OASIS_UNSUPPORTED, "%lld blocks at once", static_cast<long long>(a.count));
    const size_t shared = carved(a.num_nibbles * (a.block_size / 2) * static_cast<int64_t>(sizeof(uint32_t)),
                                 a.block_size * (a.head_dim + 1) * static_cast<int64_t>(sizeof(float)));
    if (int32_t status = check_shared(shared)) return status;
    return with_dtype(a.dtype, [&](auto type) {
        return launch("transform_write", transform_write_kernel<decltype(type)>, dim3(static_cast<unsigned>(a.count)), kThreads,
                      shared, a.stream, a);
    });
}
