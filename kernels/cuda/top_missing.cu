// top_missing: the best candidates that are not resident, by one block of threads per head.
#include "ranking.cuh"
#include "scratch.cuh"

namespace oasis {
namespace {

// Scratch of a head: keys of its blocks, then `count` places twice.
__host__ __device__ int64_t keys_bytes(int64_t blocks) { return aligned(blocks * static_cast<int64_t>(sizeof(uint32_t))); }
__host__ __device__ int64_t head_bytes(const oasis_top_missing_args &a) {
    return keys_bytes(a.blocks) + aligned(2 * a.count * static_cast<int64_t>(sizeof(int64_t)));
}

__global__ void __launch_bounds__(kRankThreads) top_missing_kernel(oasis_top_missing_args a) {
    Carver carver;
    int *shared = carver.take<int>(kRankShared);
    const int64_t row = blockIdx.x, sequence = row / a.kv_heads;
    const float *mass = a.mass + row * a.blocks;
    char *scratch = static_cast<char *>(a.scratch) + row * head_bytes(a);
    auto *keys = reinterpret_cast<uint32_t *>(scratch);
    auto *best = reinterpret_cast<int64_t *>(scratch + keys_bytes(a.blocks));
    make_keys(mass, a.blocks, a.low[sequence], a.high[sequence], a.resident + row * a.places, a.places, keys);
    rank_largest(keys, a.blocks, a.count, best, best + a.count, shared);
    for (int64_t i = threadIdx.x; i < a.count; i += kRankThreads) {
        const bool candidate = keys[best[i]] != 0u;
        a.best_blocks[row * a.count + i] = candidate ? best[i] : OASIS_EMPTY;
        a.best_mass[row * a.count + i] = candidate ? mass[best[i]] : -1.0f;
    }
}

} // namespace

int64_t missing_scratch_bytes(const oasis_top_missing_args &a) { return a.sequences * a.kv_heads * head_bytes(a); }

} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_top_missing(const oasis_top_missing_args *args) {
    const auto &a = *args;
    if (a.count > a.blocks)
        return fail(OASIS_INVALID, "count is %lld of %lld blocks", static_cast<long long>(a.count),
                    static_cast<long long>(a.blocks));
    if (a.scratch_bytes < missing_scratch_bytes(a))
        return fail(OASIS_INVALID, "scratch_bytes is %lld", static_cast<long long>(a.scratch_bytes));
    const int64_t heads = a.sequences * a.kv_heads;
    if (heads == 0 || a.count == 0) return OASIS_OK;
    if (heads > kMaxGridX) return fail(OASIS_UNSUPPORTED, "%lld heads at once", static_cast<long long>(heads));
    return launch("top_missing", top_missing_kernel, dim3(static_cast<unsigned>(heads)), kRankThreads, kRankShared * sizeof(int),
                  a.stream, a);
}
