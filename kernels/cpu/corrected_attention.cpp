// A layer's step of sequences that decode: what the exact queries miss most is read in place, and the share of attention that fell on
// what they saw is estimated. Made of the kernels of its parts; intermediate tables stay here.
#include "kernels.h"
#include "status.h"
#include "threads.h"
#include "workspace.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

namespace oasis {
namespace {

template <class T> std::unique_ptr<T[]> room(int64_t count) { return std::make_unique_for_overwrite<T[]>(static_cast<size_t>(count)); }

class CorrectedAttention {
  public:
    explicit CorrectedAttention(const oasis_corrected_attention_args &args)
        : a(args), group(a.query_heads / a.kv_heads), heads(a.sparse_sequences * a.kv_heads),
          count(std::min(a.per_row * a.rows, a.num_sealed)), wide(a.places + a.selected_places) {}

    int32_t run() {
        if (const int32_t status = check()) return status;
        read = room<int64_t>(heads * count);
        if (const int32_t status = choose()) return status;
        lse = room<float>(a.sequences * a.rows * a.query_heads);
        if (const int32_t status = attend()) return status;
        report();
        return OASIS_OK;
    }

  private:
    const oasis_corrected_attention_args &a;
    const int64_t group, heads, count, wide;
    std::unique_ptr<int64_t[]> read; // (M, H, count)
    std::unique_ptr<float[]> lse;    // (S, R, Hq)

    const int64_t *selected(int64_t member, int64_t head) const {
        return a.selected + (a.table_rows[member] * a.kv_heads + head) * a.selected_places;
    }
    bool real(int64_t member, int64_t row) const { return a.positions[a.members[member] * a.rows + row] >= 0; }

    int64_t in_arena(int64_t head, int64_t block) const { return block < 0 ? OASIS_EMPTY : a.arena_slots[head * a.num_sealed + block]; }

    int32_t check() const {
        if (a.kv_heads < 1 || a.query_heads < 1 || a.query_heads % a.kv_heads)
            return fail(OASIS_INVALID, "query_heads is %lld, no multiple of kv_heads %lld", static_cast<long long>(a.query_heads),
                        static_cast<long long>(a.kv_heads));
        if (a.per_row < 0) return fail(OASIS_INVALID, "per_row is %lld", static_cast<long long>(a.per_row));
        if (!entries_exist("members", a.members, a.sparse_sequences, a.sequences)) return OASIS_OUT_OF_RANGE;
        if (!entries_exist("rows", a.table_rows, a.sparse_sequences, a.num_table_rows)) return OASIS_OUT_OF_RANGE;
        for (int64_t m = 0; m < a.sparse_sequences; ++m) {
            const int64_t width = a.kv_heads * a.selected_places;
            if (!entries_within("selected_slots", a.selected_slots + a.table_rows[m] * width, width, a.num_slots))
                return OASIS_OUT_OF_RANGE;
        }
        return OASIS_OK;
    }

    // Fills `read` with the blocks that are read in place.
    int32_t choose() const {
        const auto mass = room<float>(a.sparse_sequences * a.rows * a.kv_heads * a.num_sealed);
        oasis_block_mass_args masses{};
        masses.logits = a.logits, masses.num_blocks = a.num_blocks, masses.mass = mass.get();
        masses.sequences = a.sparse_sequences, masses.rows = a.rows;
        masses.query_heads = a.query_heads, masses.kv_heads = a.kv_heads, masses.blocks = a.num_sealed;
        masses.num_threads = a.num_threads;
        kernels().block_mass(masses);
        if (a.rows != 1) need_over_rows(mass.get());

        const auto resident = room<int64_t>(heads * a.selected_places);
        for (int64_t head = 0; head < heads; ++head)
            std::copy_n(selected(head / a.kv_heads, head % a.kv_heads), a.selected_places, resident.get() + head * a.selected_places);
        const auto gain = room<float>(heads * count);
        oasis_top_missing_args missing{};
        missing.mass = mass.get(), missing.resident = resident.get(), missing.low = a.low, missing.high = a.high;
        missing.best_blocks = read.get(), missing.best_mass = gain.get();
        missing.sequences = a.sparse_sequences, missing.kv_heads = a.kv_heads;
        missing.blocks = a.num_sealed, missing.places = a.selected_places, missing.count = count;
        missing.num_threads = a.num_threads;
        if (const int32_t status = oasis_top_missing(&missing)) return status;

        for (int64_t head = 0; head < heads; ++head) {
            int64_t most = 0;
            for (int64_t row = 0; row < a.rows; ++row) most += real(head / a.kv_heads, row) ? a.per_row : 0;
            for (int64_t k = 0; k < count; ++k) {
                int64_t &block = read[head * count + k];
                if (k >= most || !(gain[head * count + k] > a.least_gain) || in_arena(head, block) < 0) block = OASIS_EMPTY;
            }
        }
        return OASIS_OK;
    }

    // From masses (M, R, H, N) to the need for each block, (M, H, N), in place: it is written no further than it was read.
    void need_over_rows(float *mass) const {
        const int64_t width = a.kv_heads * a.num_sealed;
        for (int64_t m = 0; m < a.sparse_sequences; ++m) {
            const float *weights = a.weights + m * a.rows;
            float expected = 0.0f;
            for (int64_t row = 0; row < a.rows; ++row) expected += weights[row];
            const float factor = std::sqrt(expected);
            for (int64_t i = 0; i < width; ++i) {
                float most = -std::numeric_limits<float>::infinity();
                for (int64_t row = 0; row < a.rows; ++row) {
                    const float need = mass[(m * a.rows + row) * width + i] * weights[row];
                    most = need > most || need != need ? need : most;
                    if (need != need) break; // as torch has it, NaN is the largest
                }
                mass[m * width + i] = most * factor;
            }
        }
    }

    int32_t attend() const {
        const int64_t all = a.sequences * a.kv_heads;
        const auto slots = room<int64_t>(all * wide), blocks = room<int64_t>(all * wide);
        const auto arena_slots = room<int64_t>(all * count), arena_blocks = room<int64_t>(all * count);
        for (int64_t head = 0; head < all; ++head) {
            std::copy_n(a.slots + head * a.places, a.places, slots.get() + head * wide);
            std::copy_n(a.blocks + head * a.places, a.places, blocks.get() + head * wide);
            std::fill_n(slots.get() + head * wide + a.places, a.selected_places, int64_t{OASIS_EMPTY});
            std::fill_n(blocks.get() + head * wide + a.places, a.selected_places, int64_t{OASIS_EMPTY});
            std::fill_n(arena_slots.get() + head * count, count, int64_t{OASIS_EMPTY});
            std::fill_n(arena_blocks.get() + head * count, count, int64_t{OASIS_EMPTY});
        }
        for (int64_t own = 0; own < heads; ++own) {
            const int64_t member = own / a.kv_heads, h = own % a.kv_heads, head = a.members[member] * a.kv_heads + h;
            const int64_t *chosen = selected(member, h);
            std::copy_n(chosen, a.selected_places, blocks.get() + head * wide + a.places);
            std::copy_n(a.selected_slots + (chosen - a.selected), a.selected_places, slots.get() + head * wide + a.places);
            for (int64_t k = 0; k < count; ++k) {
                const int64_t block = read[own * count + k];
                arena_blocks[head * count + k] = block;
                arena_slots[head * count + k] = in_arena(own, block);
            }
        }
        oasis_paged_attention_args call{};
        call.queries = a.queries, call.pool = a.pool, call.slots = slots.get(), call.blocks = blocks.get();
        call.arena = a.arena, call.arena_slots = arena_slots.get(), call.arena_blocks = arena_blocks.get();
        call.positions = a.positions, call.output = a.output, call.logsumexp = lse.get();
        call.sequences = a.sequences, call.rows = a.rows, call.query_heads = a.query_heads, call.kv_heads = a.kv_heads;
        call.head_dim = a.head_dim, call.block_size = a.block_size, call.places = wide, call.arena_places = count;
        call.num_slots = a.num_slots, call.num_arena_slots = a.num_arena_slots;
        call.queries_sequence_stride = a.queries_sequence_stride, call.queries_row_stride = a.queries_row_stride;
        call.queries_head_stride = a.queries_head_stride, call.dtype = a.dtype;
        call.num_threads = a.num_threads, call.scale = a.scale, call.softcap = a.softcap;
        return oasis_paged_attention(&call);
    }

    // How many blocks were read in place, the most of any head, and the mean share of attention that the rows saw.
    void report() const {
        int64_t all = 0, most = 0;
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t *blocks = read.get() + head * count;
            const auto some = static_cast<int64_t>(std::count_if(blocks, blocks + count, [](int64_t block) { return block >= 0; }));
            all += some;
            most = std::max(most, some);
        }
        const auto shares = room<float>(heads);
        const int64_t bytes = 4 * a.sparse_sequences * a.rows * a.query_heads * a.num_sealed * static_cast<int64_t>(sizeof(float));
        parallel_for(heads, a.num_threads, bytes, [&](int64_t head) { shares[head] = share_seen(head / a.kv_heads, head % a.kv_heads); });
        float sum = 0.0f;
        for (int64_t head = 0; head < heads; ++head) sum += shares[head];
        int64_t rows = 0;
        for (int64_t m = 0; m < a.sparse_sequences; ++m)
            for (int64_t row = 0; row < a.rows; ++row) rows += real(m, row);
        a.counts[0] = static_cast<float>(all);
        a.counts[1] = static_cast<float>(most);
        a.counts[2] = sum / static_cast<float>(rows * a.query_heads);
    }

    // Summed over the rows and query heads of a kv head.
    float share_seen(int64_t member, int64_t head) const {
        const int64_t low = std::clamp<int64_t>(a.low[member], 0, a.num_sealed);
        const int64_t range = std::clamp<int64_t>(a.high[member], low, a.num_sealed) - low;
        auto *missing = reinterpret_cast<float *>(workspace(static_cast<size_t>(range + 1) * sizeof(float)));
        const auto leave_out = [&](const int64_t *blocks, int64_t places) {
            for (int64_t i = 0; i < places; ++i)
                if (blocks[i] >= low && blocks[i] < low + range) missing[blocks[i] - low] = -std::numeric_limits<float>::infinity();
        };
        float sum = 0.0f;
        for (int64_t row = 0; row < a.rows; ++row) {
            if (!real(member, row)) continue;
            for (int64_t q = head * group; q < (head + 1) * group; ++q) {
                std::copy_n(a.logits + ((member * a.rows + row) * a.query_heads + q) * a.num_sealed + low, range, missing);
                leave_out(selected(member, head), a.selected_places);
                leave_out(read.get() + (member * a.kv_heads + head) * count, count);
                const float estimate = kernels().logsumexp(missing, range);
                const float seen = lse[(a.members[member] * a.rows + row) * a.query_heads + q];
                sum += 1.0f / (1.0f + std::exp(estimate - seen));
            }
        }
        return sum;
    }
};

} // namespace
} // namespace oasis

extern "C" int32_t oasis_corrected_attention(const oasis_corrected_attention_args *args) {
    return oasis::CorrectedAttention(*args).run();
}
