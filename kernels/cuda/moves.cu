// Moving rows and whole slots. Each thread moves units as wide as the alignment of all that takes part allows.
#include "common.cuh"

namespace oasis {
namespace {

constexpr int kThreads = 128;
constexpr int kInFlight = 4; // units that a thread has read and not yet written
// Enough to fill a PCIe link, and few, so that attention that runs meanwhile keeps most of the device.
constexpr int64_t kCopyBlocks = 128;

// The widest of 16, 8, 4, 2 and 1 bytes that divides all of these.
template <class... Numbers> int unit_bytes(Numbers... numbers) {
    const uint64_t all = (static_cast<uint64_t>(numbers) | ...);
    for (int bytes = 16; bytes > 1; bytes /= 2)
        if (all % static_cast<uint64_t>(bytes) == 0) return bytes;
    return 1;
}

template <class Function> int32_t with_unit(int bytes, Function &&function) {
    switch (bytes) {
    case 16: return function(uint4{});
    case 8: return function(uint2{});
    case 4: return function(uint32_t{});
    case 2: return function(uint16_t{});
    default: return function(uint8_t{});
    }
}

template <class Unit> __global__ void append_rows_kernel(oasis_append_rows_args a) {
    const int64_t row_bytes = a.head_dim * a.element_bytes, row_units = row_bytes / static_cast<int64_t>(sizeof(Unit));
    const int64_t rows = a.num_tokens * a.kv_heads;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= rows * row_units) return;
    const int64_t row = index / row_units, unit = index % row_units;
    const int64_t token = row / a.kv_heads, head = row % a.kv_heads;
    const int64_t slot = entry_within(a.slots[row], a.num_slots), offset = entry_within(a.offsets[token], a.block_size);
    if (slot < 0 || offset < 0) return;
    const auto *key =
        static_cast<const char *>(a.keys) + (token * a.keys_token_stride + head * a.keys_head_stride) * a.element_bytes;
    const auto *value =
        static_cast<const char *>(a.values) + (token * a.values_token_stride + head * a.values_head_stride) * a.element_bytes;
    char *target = static_cast<char *>(a.pool) + (slot * 2 * a.block_size + offset) * row_bytes;
    reinterpret_cast<Unit *>(target)[unit] = reinterpret_cast<const Unit *>(key)[unit];
    reinterpret_cast<Unit *>(target + a.block_size * row_bytes)[unit] = reinterpret_cast<const Unit *>(value)[unit];
}

template <class Unit> __global__ void __launch_bounds__(kThreads) copy_blocks_kernel(oasis_copy_blocks_args a) {
    const int64_t units = a.slot_bytes / static_cast<int64_t>(sizeof(Unit));
    constexpr int64_t kPiece = kThreads * kInFlight;
    const int64_t pieces = ceil_div(units, kPiece);
    for (int64_t work = blockIdx.x; work < a.num_pairs * pieces; work += gridDim.x) {
        const int64_t pair = work / pieces;
        const int64_t from = entry_within(a.source_slots[pair], a.num_source_slots);
        const int64_t to = entry_within(a.target_slots[pair], a.num_target_slots);
        if (from < 0 || to < 0) continue;
        const auto *source = reinterpret_cast<const Unit *>(static_cast<const char *>(a.source) + from * a.slot_bytes);
        auto *target = reinterpret_cast<Unit *>(static_cast<char *>(a.target) + to * a.slot_bytes);
        const int64_t first = work % pieces * kPiece + threadIdx.x;
        Unit held[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (first + i * kThreads < units) held[i] = source[first + i * kThreads];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (first + i * kThreads < units) target[first + i * kThreads] = held[i];
    }
}

__global__ void zero_kernel(float *sum) {
    if (threadIdx.x == 0) *sum = 0.0f;
}

__global__ void __launch_bounds__(kThreads) read_slots_kernel(oasis_read_slots_args a) {
    Carver carver;
    float *partial = carver.take<float>(32);
    const int64_t units = a.slot_bytes / 16;
    float sum = 0.0f;
    for (int64_t work = blockIdx.x; work < a.count; work += gridDim.x) {
        const int64_t slot = entry_within(a.slots[work], a.num_slots);
        if (slot < 0) continue;
        const auto *source = reinterpret_cast<const float4 *>(static_cast<const char *>(a.pool) + slot * a.slot_bytes);
        for (int64_t i = threadIdx.x; i < units; i += kThreads) {
            const float4 four = source[i];
            sum += four.x + four.y + four.z + four.w;
        }
    }
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) atomicAdd(a.sum, sum);
}

} // namespace
} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_append_rows(const oasis_append_rows_args *args) {
    const auto &a = *args;
    const int64_t row_bytes = a.head_dim * a.element_bytes, rows = a.num_tokens * a.kv_heads;
    if (rows == 0 || row_bytes == 0) return OASIS_OK;
    const int bytes =
        unit_bytes(reinterpret_cast<uintptr_t>(a.pool), reinterpret_cast<uintptr_t>(a.keys), reinterpret_cast<uintptr_t>(a.values),
                   row_bytes, a.keys_token_stride * a.element_bytes, a.keys_head_stride * a.element_bytes,
                   a.values_token_stride * a.element_bytes, a.values_head_stride * a.element_bytes);
    return with_unit(bytes, [&](auto unit) {
        using Unit = decltype(unit);
        const int64_t blocks = ceil_div(rows * (row_bytes / static_cast<int64_t>(sizeof(Unit))), static_cast<int64_t>(kThreads));
        if (blocks > kMaxGridX) return fail(OASIS_UNSUPPORTED, "%lld rows at once", static_cast<long long>(rows));
        return launch("append_rows", append_rows_kernel<Unit>, dim3(static_cast<unsigned>(blocks)), kThreads, 0, a.stream, a);
    });
}

extern "C" int32_t oasis_copy_blocks(const oasis_copy_blocks_args *args) {
    const auto &a = *args;
    if (a.num_pairs == 0 || a.slot_bytes == 0) return OASIS_OK;
    const int bytes = unit_bytes(reinterpret_cast<uintptr_t>(a.source), reinterpret_cast<uintptr_t>(a.target), a.slot_bytes);
    return with_unit(bytes, [&](auto unit) {
        using Unit = decltype(unit);
        const int64_t units = a.slot_bytes / static_cast<int64_t>(sizeof(Unit));
        const int64_t work = a.num_pairs * ceil_div(units, static_cast<int64_t>(kThreads * kInFlight));
        const dim3 grid(static_cast<unsigned>(at_most(work, kCopyBlocks)));
        return launch("copy_blocks", copy_blocks_kernel<Unit>, grid, kThreads, 0, a.stream, a);
    });
}

extern "C" int32_t oasis_read_slots(const oasis_read_slots_args *args) {
    const auto &a = *args;
    if (a.slot_bytes % 64)
        return fail(OASIS_INVALID, "slot_bytes is %lld, no multiple of 64", static_cast<long long>(a.slot_bytes));
    if (reinterpret_cast<uintptr_t>(a.pool) % 16) return fail(OASIS_UNSUPPORTED, "pool is not aligned to 16 bytes");
    if (int32_t status = launch("zero", zero_kernel, dim3(1), 32, 0, a.stream, a.sum)) return status;
    if (a.count == 0) return OASIS_OK;
    const dim3 grid(static_cast<unsigned>(at_most(a.count, int64_t{2048})));
    return launch("read_slots", read_slots_kernel, grid, kThreads, 32 * sizeof(float), a.stream, a);
}
