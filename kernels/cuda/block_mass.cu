// block_mass: softmax over a sequence's blocks per query head, summed over the heads of a group. Two passes, each spread over as
// many blocks of threads as there is work for: parts of each row leave their maximum and sum, then all masses are written.
#include "common.cuh"
#include "scratch.cuh"

namespace oasis {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPartBlocks = 2048; // blocks of a sequence in one part

struct Part {
    float most, sum;
};

int64_t parts_of(const oasis_block_mass_args &a) { return at_least(ceil_div(a.blocks, kPartBlocks), int64_t{1}); }

__device__ __forceinline__ int64_t blocks_of(const oasis_block_mass_args &a, int64_t sequence) {
    return at_most(at_least(a.num_blocks[sequence], int64_t{0}), a.blocks);
}

// Grid: parts, (S, R, Hq). Threads read the same logits in both loops, the second time from cache.
__global__ void __launch_bounds__(kThreads) parts_kernel(oasis_block_mass_args a, Part *parts) {
    Carver carver;
    float *partial = carver.take<float>(32);
    const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y, part = blockIdx.x;
    if (row >= a.sequences * a.rows * a.query_heads) return;
    const int64_t sequence = row / (a.rows * a.query_heads);
    const int64_t first = part * kPartBlocks, end = at_most(blocks_of(a, sequence), first + kPartBlocks);
    const float *logits = a.logits + row * a.blocks;
    const int tid = static_cast<int>(threadIdx.x);
    float most = -INFINITY;
    for (int64_t n = first + tid; n < end; n += kThreads) most = not_below(most, logits[n]);
    most = warp_max(most);
    if (tid % 32 == 0) partial[tid / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; ++warp) most = not_below(most, partial[warp]);
    float sum = 0.0f;
    for (int64_t n = first + tid; n < end; n += kThreads) sum += expf(logits[n] - most);
    sum = block_sum(sum, partial);
    if (tid == 0) parts[row * gridDim.x + part] = {most, sum};
}

// Grid: parts, (S, R, H).
__global__ void __launch_bounds__(kThreads) mass_kernel(oasis_block_mass_args a, const Part *parts, int64_t num_parts) {
    const int64_t index = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    if (index >= a.sequences * a.rows * a.kv_heads) return;
    const int64_t head = index % a.kv_heads, row = index / a.kv_heads, group = a.query_heads / a.kv_heads;
    const int64_t count = blocks_of(a, row / a.rows), first = static_cast<int64_t>(blockIdx.x) * kPartBlocks;
    const int64_t end = at_most(a.blocks, first + kPartBlocks);
    float *mass = a.mass + index * a.blocks;
    for (int64_t n = first + threadIdx.x; n < end; n += kThreads) mass[n] = 0.0f;
    for (int64_t member = 0; member < group; ++member) {
        const int64_t query = row * a.query_heads + head * group + member;
        float most = -INFINITY;
        for (int64_t part = 0; part < num_parts; ++part) most = not_below(most, parts[query * num_parts + part].most);
        float sum = 0.0f;
        for (int64_t part = 0; part < num_parts; ++part) {
            const Part one = parts[query * num_parts + part];
            if (one.most > -INFINITY) sum += one.sum * expf(one.most - most);
        }
        const float *logits = a.logits + query * a.blocks;
        for (int64_t n = first + threadIdx.x; n < at_most(end, count); n += kThreads) mass[n] += expf(logits[n] - most) / sum;
    }
}

// Rows over y and z of a grid, since neither may be larger than 65535.
dim3 rows_grid(int64_t parts, int64_t rows) {
    const int64_t y = at_most(rows, int64_t{32768});
    return dim3(static_cast<unsigned>(parts), static_cast<unsigned>(y), static_cast<unsigned>(ceil_div(rows, y)));
}

} // namespace

int64_t mass_scratch_bytes(const oasis_block_mass_args &a) {
    return aligned(a.sequences * a.rows * a.query_heads * parts_of(a) * static_cast<int64_t>(sizeof(Part)));
}

} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_block_mass(const oasis_block_mass_args *args) {
    const auto &a = *args;
    if (a.kv_heads < 1 || a.query_heads < 1 || a.query_heads % a.kv_heads)
        return fail(OASIS_INVALID, "query_heads is %lld, no multiple of kv_heads %lld", static_cast<long long>(a.query_heads),
                    static_cast<long long>(a.kv_heads));
    if (a.scratch_bytes < mass_scratch_bytes(a))
        return fail(OASIS_INVALID, "scratch_bytes is %lld", static_cast<long long>(a.scratch_bytes));
    const int64_t rows = a.sequences * a.rows;
    if (rows == 0 || a.blocks == 0) return OASIS_OK;
    const int64_t num_parts = parts_of(a);
    auto *parts = static_cast<Part *>(a.scratch);
    if (int32_t status = launch("block_mass_parts", parts_kernel, rows_grid(num_parts, rows * a.query_heads), kThreads,
                                32 * sizeof(float), a.stream, a, parts))
        return status;
    return launch("block_mass", mass_kernel, rows_grid(num_parts, rows * a.kv_heads), kThreads, 0, a.stream, a,
                  static_cast<const Part *>(parts), num_parts);
}
