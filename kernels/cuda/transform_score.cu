// transform_score: block logits from transform codes. One kernel makes a table of sixteen entries per nibble and query row, another
// looks up every token's nibbles in shared memory and takes the logsumexp of each block in the same pass.
//
// Four query rows are worked on at once: an entry of a table is then sixteen bytes, one access.
#include "block_scores.cuh"
#include "scratch.cuh"

namespace oasis {
namespace {

constexpr int kThreads = 128, kRows = 4, kEntries = 16;
constexpr int kNibbles = 64;   // whose tables fit into shared memory at once
constexpr int64_t kGroups = 8; // of kThreads tokens, that a block of threads walks over

struct Tables {
    float4 *entries; // (S, row groups, M, 16)
    float4 *biases;  // (S, row groups, H)
};

int64_t row_groups(const QueryView &q) { return ceil_div(q.group_rows(), int64_t{kRows}); }
int64_t entries_bytes(const oasis_transform_score_args &a) {
    return aligned(a.sequences * row_groups(query_view(a)) * a.num_nibbles * kEntries * static_cast<int64_t>(sizeof(float4)));
}

struct Nibbles {
    int64_t first, count;
};

__device__ __forceinline__ Nibbles nibbles_of(const oasis_transform_score_args &a, int64_t head) {
    const int64_t first = at_most(at_least(a.offsets[head], int64_t{0}), a.num_nibbles);
    const int64_t next = head + 1 < a.kv_heads ? a.offsets[head + 1] : a.num_nibbles;
    return {first, at_least(at_most(next, a.num_nibbles) - first, int64_t{0})};
}

// Grid: heads, row groups, sequences.
template <class T>
__global__ void __launch_bounds__(kThreads) tables_kernel(oasis_transform_score_args a, QueryView q, Tables tables) {
    const int head_dim = static_cast<int>(a.head_dim), tid = static_cast<int>(threadIdx.x), lane = tid % 32;
    const int64_t head = blockIdx.x, group = blockIdx.y, sequence = blockIdx.z, table = sequence * gridDim.y + group;
    Carver carver;
    float *queries = carver.take<float>(kRows * head_dim);
    float *rotated = carver.take<float>((a.num_components + 1) * kRows); // the last one is the mean's
    load_queries<T>(q, sequence, head, group * kRows, a.scale, kRows, head_dim, queries);
    __syncthreads();
    for (int64_t component = tid / 32; component <= a.num_components; component += kThreads / 32) {
        const float *direction =
            component < a.num_components ? a.decode + (head * a.num_components + component) * head_dim : a.mean + head * head_dim;
        float sums[kRows] = {};
        for (int dim = lane; dim < head_dim; dim += 32)
            for (int m = 0; m < kRows; ++m) sums[m] += queries[m * head_dim + dim] * direction[dim];
        for (int m = 0; m < kRows; ++m) {
            const float sum = warp_sum(sums[m]);
            if (lane == 0) rotated[component * kRows + m] = sum;
        }
    }
    __syncthreads();
    const Nibbles nibbles = nibbles_of(a, head);
    for (int64_t i = tid; i < nibbles.count * kEntries; i += kThreads) {
        const int64_t nibble = nibbles.first + i / kEntries;
        const float *levels = a.levels + (nibble * kEntries + i % kEntries) * 4;
        float sums[kRows] = {};
        for (int part = 0; part < 4; ++part) {
            // A place without a component names any, with levels of 0.
            const int64_t component = a.components[nibble * 4 + part] - head * a.num_components;
            if (component < 0 || component >= a.num_components) continue;
            for (int m = 0; m < kRows; ++m) sums[m] += levels[part] * rotated[component * kRows + m];
        }
        tables.entries[(table * a.num_nibbles + nibble) * kEntries + i % kEntries] =
            make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
    if (tid == 0) {
        const float *bias = rotated + a.num_components * kRows;
        tables.biases[table * a.kv_heads + head] = make_float4(bias[0], bias[1], bias[2], bias[3]);
    }
}

// Grid: kGroups groups of tokens, heads, sequences times row groups. Unit: what codes are read by.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    transform_score_kernel(oasis_transform_score_args a, QueryView q, Tables tables, int64_t groups) {
    const int tid = static_cast<int>(threadIdx.x), block_size = static_cast<int>(a.block_size), half = block_size / 2;
    const int blocks_at_once = kThreads / block_size;
    Carver carver;
    float4 *entries = carver.take<float4>(kNibbles * kEntries);
    uint8_t *codes = carver.take<uint8_t>(static_cast<int64_t>(kNibbles) * kThreads / 2);
    float *sums = carver.take<float>(kThreads * (kRows + 1));
    const int64_t head = blockIdx.y, sequence = blockIdx.z / groups, first_row = blockIdx.z % groups * kRows, table = blockIdx.z;
    const int64_t end = at_most(a.blocks, static_cast<int64_t>(blockIdx.x + 1) * kGroups * blocks_at_once);
    const Nibbles nibbles = nibbles_of(a, head);
    const float4 bias = tables.biases[table * a.kv_heads + head];
    const float biases[kRows] = {bias.x, bias.y, bias.z, bias.w};
    const int own_block = tid / block_size, own_token = tid % block_size;
    for (int64_t first = blockIdx.x * kGroups * blocks_at_once; first < end; first += blocks_at_once) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int64_t done = 0; done < nibbles.count; done += kNibbles) {
            const int count = static_cast<int>(at_most(nibbles.count - done, int64_t{kNibbles}));
            __syncthreads(); // all have read what is overwritten now
            if (nibbles.count > kNibbles || first == blockIdx.x * kGroups * blocks_at_once)
                for (int i = tid; i < count * kEntries; i += kThreads)
                    entries[i] = tables.entries[(table * a.num_nibbles + nibbles.first + done) * kEntries + i];
            const int units = count * half / static_cast<int>(sizeof(Unit)); // of a block
            for (int i = tid; i < blocks_at_once * units; i += kThreads) {
                const int64_t block = first + i / units;
                const int64_t page = block < end ? entry_within(a.pages[sequence * a.blocks + block], a.num_pages) : OASIS_EMPTY;
                const uint8_t *source = a.codes + (page * a.num_nibbles + nibbles.first + done) * half;
                reinterpret_cast<Unit *>(codes)[i] = page < 0 ? Unit{} : reinterpret_cast<const Unit *>(source)[i % units];
            }
            __syncthreads();
            if (own_block >= blocks_at_once) continue;
            const uint8_t *own = codes + (own_block * count) * half + own_token % half;
            const int shift = own_token < half ? 0 : 4;
            for (int nibble = 0; nibble < count; ++nibble) {
                const float4 entry = entries[nibble * kEntries + (own[nibble * half] >> shift & 15)];
                sum.x += entry.x, sum.y += entry.y, sum.z += entry.z, sum.w += entry.w;
            }
        }
        float *own = sums + tid * (kRows + 1);
        own[0] = sum.x, own[1] = sum.y, own[2] = sum.z, own[3] = sum.w;
        __syncthreads();
        for (int i = tid; i < blocks_at_once * kRows; i += kThreads) {
            const int64_t block = first + i / kRows, m = first_row + i % kRows;
            if (block >= end || m >= q.group_rows()) continue;
            a.logits[q.logit(sequence, head, m, a.blocks) + block] =
                biases[i % kRows] + logsumexp_of(sums + (i / kRows * block_size) * (kRows + 1) + i % kRows, block_size, kRows + 1);
        }
        __syncthreads();
    }
}

} // namespace

int64_t transform_scratch_bytes(const oasis_transform_score_args &a) {
    if (a.kv_heads < 1) return 0;
    return entries_bytes(a) + aligned(a.sequences * row_groups(query_view(a)) * a.kv_heads * static_cast<int64_t>(sizeof(float4)));
}

} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_transform_score(const oasis_transform_score_args *args) {
    const auto &a = *args;
    const QueryView q = query_view(a);
    if (int32_t status = check_queries(q)) return status;
    if (a.block_size < 2 || a.block_size % 2)
        return fail(OASIS_INVALID, "block_size is %lld", static_cast<long long>(a.block_size));
    if (a.block_size > kThreads) return fail(OASIS_UNSUPPORTED, "block_size is %lld", static_cast<long long>(a.block_size));
    if (a.scratch_bytes < transform_scratch_bytes(a))
        return fail(OASIS_INVALID, "scratch_bytes is %lld", static_cast<long long>(a.scratch_bytes));
    if (a.sequences == 0 || a.rows == 0 || a.blocks == 0) return OASIS_OK;
    const Tables tables{static_cast<float4 *>(a.scratch),
                        reinterpret_cast<float4 *>(static_cast<char *>(a.scratch) + entries_bytes(a))};
    const int64_t groups = row_groups(q);
    const size_t tables_shared = carved(kRows * a.head_dim * static_cast<int64_t>(sizeof(float)),
                                        (a.num_components + 1) * kRows * static_cast<int64_t>(sizeof(float)));
    if (int32_t status = check_shared(tables_shared)) return status;
    const int32_t made = with_dtype(a.dtype, [&](auto type) {
        const dim3 grid(static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(groups), static_cast<unsigned>(a.sequences));
        return launch("transform_tables", tables_kernel<decltype(type)>, grid, kThreads, tables_shared, a.stream, a, q, tables);
    });
    if (made != OASIS_OK) return made;
    const int64_t at_once = kGroups * (kThreads / a.block_size);
    const dim3 grid(static_cast<unsigned>(ceil_div(a.blocks, at_once)), static_cast<unsigned>(a.kv_heads),
                    static_cast<unsigned>(a.sequences * groups));
    const size_t shared =
        carved(kNibbles * kEntries * sizeof(float4), kNibbles * kThreads / 2, kThreads * (kRows + 1) * sizeof(float));
    const bool by_word = a.block_size % 8 == 0 && reinterpret_cast<uintptr_t>(a.codes) % 4 == 0;
    return by_word
               ? launch("transform_score", transform_score_kernel<uint32_t>, grid, kThreads, shared, a.stream, a, q, tables, groups)
               : launch("transform_score", transform_score_kernel<uint8_t>, grid, kThreads, shared, a.stream, a, q, tables, groups);
}
