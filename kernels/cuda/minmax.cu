// Bounds of every key channel: minmax_write and minmax_score.
#include "block_scores.cuh"

namespace oasis {
namespace {

constexpr int kThreads = 128, kRows = 16;
constexpr int kPages = 16; // that a block of threads scores

// The extremes of a channel over a block; a NaN stays, as in torch.
template <class T> __global__ void __launch_bounds__(kThreads) minmax_write_kernel(oasis_minmax_write_args a) {
    const int64_t index = blockIdx.x, head = blockIdx.y, page = entry_within(a.pages[index], a.num_pages);
    if (page < 0) return;
    const auto *keys = static_cast<const T *>(a.keys) + index * a.keys_block_stride + head * a.keys_head_stride;
    T *bounds = static_cast<T *>(a.bounds) + (page * a.kv_heads + head) * 2 * a.head_dim;
    for (int64_t dim = threadIdx.x; dim < a.head_dim; dim += kThreads) {
        float low = to_float(keys[dim]), high = low;
        for (int64_t token = 1; token < a.block_size; ++token) {
            const float key = to_float(keys[token * a.keys_token_stride + dim]);
            if (key < low || key != key) low = key;
            if (key > high || key != key) high = key;
        }
        bounds[dim] = from_float<T>(low);
        bounds[a.head_dim + dim] = from_float<T>(high);
    }
}

template <class Q, class T>
__global__ void __launch_bounds__(kThreads) minmax_score_kernel(oasis_minmax_score_args a, QueryView q) {
    const int head_dim = static_cast<int>(a.head_dim), row = head_dim + 4, tid = static_cast<int>(threadIdx.x);
    Carver carver;
    float *queries = carver.take<float>(kRows * row);
    float *bounds = carver.take<float>(kPages * 2 * row);
    const int64_t tiles = ceil_div(q.group_rows(), int64_t{kRows}), first_block = static_cast<int64_t>(blockIdx.x) * kPages;
    const int64_t head = blockIdx.y, sequence = blockIdx.z / tiles, first_row = blockIdx.z % tiles * kRows;
    load_queries<Q>(q, sequence, head, first_row, a.scale, kRows, row, queries);
    const int pages = static_cast<int>(at_most(a.blocks - first_block, int64_t{kPages}));
    for (int index = tid; index < pages * 2 * head_dim; index += kThreads) {
        const int at = index / (2 * head_dim), within = index % (2 * head_dim);
        const int64_t page = entry_within(a.pages[sequence * a.blocks + first_block + at], a.num_pages);
        const auto *kept = static_cast<const T *>(a.bounds) + (page * a.kv_heads + head) * 2 * a.head_dim;
        bounds[(2 * at + within / head_dim) * row + within % head_dim] = page < 0 ? 0.0f : to_float(kept[within]);
    }
    __syncthreads();
    const int rows = static_cast<int>(at_most(q.group_rows() - first_row, int64_t{kRows}));
    for (int pair = tid; pair < rows * pages; pair += kThreads) {
        const int m = pair / pages, at = pair % pages;
        const float *query = queries + m * row, *lows = bounds + 2 * at * row, *highs = lows + row;
        float sum = 0.0f;
        for (int dim = 0; dim < head_dim; ++dim) sum += query[dim] * (query[dim] < 0.0f ? lows[dim] : highs[dim]);
        a.logits[q.logit(sequence, head, first_row + m, a.blocks) + first_block + at] = sum;
    }
}

} // namespace
} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_minmax_write(const oasis_minmax_write_args *args) {
    const auto &a = *args;
    if (a.count == 0 || a.kv_heads == 0) return OASIS_OK;
    if (a.block_size < 1) return fail(OASIS_INVALID, "block_size is %lld", static_cast<long long>(a.block_size));
    if (a.kv_heads > kMaxGridYZ || a.count > kMaxGridX)
        return fail(OASIS_UNSUPPORTED, "%lld blocks at once", static_cast<long long>(a.count));
    const dim3 grid(static_cast<unsigned>(a.count), static_cast<unsigned>(a.kv_heads));
    return with_dtype(a.dtype, [&](auto type) {
        return launch("minmax_write", minmax_write_kernel<decltype(type)>, grid, kThreads, 0, a.stream, a);
    });
}

extern "C" int32_t oasis_minmax_score(const oasis_minmax_score_args *args) {
    const auto &a = *args;
    const QueryView q = query_view(a);
    if (int32_t status = check_queries(q)) return status;
    if (a.sequences == 0 || a.rows == 0 || a.blocks == 0) return OASIS_OK;
    const int64_t row = (a.head_dim + 4) * static_cast<int64_t>(sizeof(float));
    const size_t shared = carved(kRows * row, kPages * 2 * row);
    if (int32_t status = check_shared(shared)) return status;
    const dim3 grid(static_cast<unsigned>(ceil_div(a.blocks, int64_t{kPages})), static_cast<unsigned>(a.kv_heads),
                    static_cast<unsigned>(a.sequences * ceil_div(q.group_rows(), int64_t{kRows})));
    return with_dtype(a.queries_dtype, [&](auto query) {
        return with_dtype(a.bounds_dtype, [&](auto bound) {
            return launch("minmax_score", minmax_score_kernel<decltype(query), decltype(bound)>, grid, kThreads, shared, a.stream,
                          a, q);
        });
    });
}
