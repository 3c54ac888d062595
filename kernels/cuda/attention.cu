// paged_attention: checks, choice of kernel, and merging what the splits have left.
#include "attention.cuh"
#include "scratch.cuh"

namespace oasis {
namespace {

// A block of threads per output row.
template <class T> __global__ void __launch_bounds__(64) combine_kernel(oasis_paged_attention_args a, AttentionPlan plan) {
    const int64_t row = blockIdx.x, group = a.query_heads / a.kv_heads;
    const int64_t query_head = row % a.query_heads, query_row = row / a.query_heads % a.rows,
                  sequence = row / a.query_heads / a.rows;
    const int64_t head = query_head / group, m = query_row * group + query_head % group;
    const int64_t first = (sequence * a.kv_heads + head) * plan.splits * plan.group_rows + m;
    float most = -INFINITY;
    for (int64_t split = 0; split < plan.splits; ++split) most = not_below(most, plan.logsumexps[first + split * plan.group_rows]);
    const float base = most == -INFINITY ? 0.0f : most;
    float sum = 0.0f;
    for (int64_t split = 0; split < plan.splits; ++split) sum += expf(plan.logsumexps[first + split * plan.group_rows] - base);
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    auto *output = static_cast<T *>(a.output) + row * a.head_dim;
    for (int64_t dim = threadIdx.x; dim < a.head_dim; dim += blockDim.x) {
        float value = 0.0f;
        for (int64_t split = 0; split < plan.splits; ++split) {
            const int64_t from = first + split * plan.group_rows;
            value += expf(plan.logsumexps[from] - base) * plan.outputs[from * a.head_dim + dim];
        }
        output[dim] = from_float<T>(value * inverse);
    }
    if (threadIdx.x == 0) a.logsumexp[row] = sum > 0.0f ? base + logf(sum) : -INFINITY;
}

int64_t block_rows(const oasis_paged_attention_args &a) {
    return a.dtype == OASIS_FLOAT32 ? kFloatBlockRows : half_block_rows(a.head_dim);
}

bool on_16_bytes(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

} // namespace

int64_t attention_scratch_bytes(const oasis_paged_attention_args &a) {
    if (a.kv_heads < 1 || a.block_size < 1) return 0;
    const AttentionPlan plan = plan_attention(a, block_rows(a));
    if (plan.splits == 1) return 0;
    const int64_t results = a.sequences * a.kv_heads * plan.splits * plan.group_rows, bytes = sizeof(float);
    return aligned(results * a.head_dim * bytes) + aligned(results * bytes);
}

} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_paged_attention(const oasis_paged_attention_args *args) {
    const auto &a = *args;
    const auto shown = [](int64_t number) { return static_cast<long long>(number); };
    if (a.kv_heads < 1 || a.query_heads < 1 || a.query_heads % a.kv_heads)
        return fail(OASIS_INVALID, "query_heads is %lld, no multiple of kv_heads %lld", shown(a.query_heads), shown(a.kv_heads));
    if (a.dtype < OASIS_FLOAT32 || a.dtype > OASIS_FLOAT16) return fail(OASIS_INVALID, "dtype is %lld", shown(a.dtype));
    if (a.block_size < 1 || a.head_dim < 1)
        return fail(OASIS_INVALID, "block_size is %lld and head_dim %lld", shown(a.block_size), shown(a.head_dim));
    if (!(a.softcap >= 0.0f)) return fail(OASIS_INVALID, "softcap is %g", static_cast<double>(a.softcap));
    if (!on_16_bytes(a.pool) || !on_16_bytes(a.arena)) return fail(OASIS_UNSUPPORTED, "pool and arena are not aligned to 16 bytes");
    const AttentionPlan plan = plan_attention(a, block_rows(a));
    if (a.kv_heads > kMaxGridYZ || a.sequences * plan.row_groups > kMaxGridYZ)
        return fail(OASIS_UNSUPPORTED, "%lld sequences of %lld rows are too many", shown(a.sequences), shown(a.rows));
    const int64_t needed = attention_scratch_bytes(a);
    if (a.scratch_bytes < needed)
        return fail(OASIS_INVALID, "scratch_bytes is %lld, not %lld", shown(a.scratch_bytes), shown(needed));
    if (a.sequences == 0 || a.rows == 0) return OASIS_OK;
    if (int32_t status = a.dtype == OASIS_FLOAT32 ? attend_float(a, plan) : attend_half(a, plan)) return status;
    if (plan.splits == 1) return OASIS_OK;
    return with_dtype(a.dtype, [&](auto type) {
        const dim3 grid(static_cast<unsigned>(a.sequences * a.rows * a.query_heads));
        return launch("combine", combine_kernel<decltype(type)>, grid, 64, 0, a.stream, a, plan);
    });
}
