// Block logits from transform codes: look-ups in registers, for 16 tokens of each of kLanes blocks at once.
//
// Kept in its head: sums of powers that all have one base per query, so that tokens, units and lanes are simply added, and no block
// needs its own maximum. Floats have the range for that, which bytes and 16-bit integers have not.
#include "declarations.h"
#include "score_tables.h"
#include "threads.h"

#include <limits>

namespace oasis::OASIS_ISA {
namespace {

constexpr int64_t kBlocksPerPiece = 256;
constexpr int64_t kAheadBytes = 16384;
constexpr int64_t kUnitRows = 8; // bytes of a row, of two tokens each

class Scorer {
  public:
    Scorer(const oasis_transform_score_args &a, const ScoreTables &tables)
        : a_(a), tables_(tables), half_(a.block_size / 2), units_((half_ + kUnitRows - 1) / kUnitRows) {
        const int64_t rows = half_ - (units_ - 1) * kUnitRows;
        for (int i = 0; i < 32; ++i) last_mask_[i] = i % kUnitRows < rows ? 0xffff : 0;
        partial_ = rows < kUnitRows;
        const int64_t tile_bytes = kLanes * a.num_nibbles * half_;
        ahead_ = kLanes * std::max<int64_t>(1, kAheadBytes / std::max<int64_t>(1, tile_bytes));
    }

    void score(int64_t sequence, int64_t first) {
        const int64_t row_bytes = tables_.most_registers() * kBytes;
        Parts parts;
        const auto index_part = parts.add<Bytes>(units_ * 2 * tables_.most_registers() * 2 * kPairs);
        const auto row_part = parts.add<uint8_t>(2 * row_bytes);
        parts.allocate();
        indices_ = parts.at<Bytes>(index_part);
        rows_ = parts.at<uint8_t>(row_part);
        std::fill_n(rows_, 2 * row_bytes, uint8_t{0});
        pages_ = a_.pages + sequence * a_.blocks;
        last_ = std::min(a_.blocks, first + kBlocksPerPiece);
        for (int64_t n = first; n < last_; n += kLanes)
            for (int64_t h = 0; h < a_.kv_heads; ++h) {
                prefetch_tile(n + ahead_, h);
                take_indices(n, h);
                const int64_t queries = sequence * tables_.width();
                for (int64_t w = queries; w < queries + tables_.width(); ++w) score_tile(n, h, w);
            }
    }

  private:
    int64_t page(int64_t n) const { return n < last_ ? pages_[n] : OASIS_EMPTY; }

    void prefetch_tile(int64_t n, int64_t h) const {
        const HeadNibbles &head = tables_.head(h);
        for (int64_t i = n; i < std::min(n + kLanes, last_); ++i) {
            if (pages_[i] < 0) continue;
            const uint8_t *begin = a_.codes + (pages_[i] * a_.num_nibbles + head.first) * half_;
            for (int64_t byte = 0; byte < head.count * half_; byte += 64) prefetch(begin + byte);
        }
    }

    // The code rows of a unit, 8 bytes each, as many as whole registers hold: in place where they lie so, else copied.
    OASIS_INLINE const uint8_t *unit_rows(int64_t n, int64_t h, int64_t unit, uint8_t *copy) const {
        const int64_t p = page(n);
        if (p < 0) return copy; // whatever it holds: the logits of an empty page mean nothing
        const HeadNibbles &head = tables_.head(h);
        const uint8_t *begin = a_.codes + (p * a_.num_nibbles + head.first) * half_;
        const uint8_t *end = a_.codes + a_.num_pages * a_.num_nibbles * half_;
        if (half_ == kUnitRows && end - begin >= head.registers * kBytes) return begin;
        const int64_t bytes = std::min(kUnitRows, half_ - unit * kUnitRows);
        begin += unit * kUnitRows;
        if (bytes == kUnitRows)
            for (int64_t j = 0; j < head.count; ++j) std::memcpy(copy + j * kUnitRows, begin + j * half_, kUnitRows);
        else
            for (int64_t j = 0; j < head.count; ++j) std::memcpy(copy + j * kUnitRows, begin + j * half_, static_cast<size_t>(bytes));
        return copy;
    }

    // Indices into tables: by unit, row of tables and pair of blocks, those of the first tokens and those of the last.
    void take_indices(int64_t n, int64_t h) {
        const int64_t registers = tables_.head(h).registers;
        Bytes *to = indices_;
        for (int64_t unit = 0; unit < units_; ++unit, to += registers * 4 * kPairs)
            for (int pair = 0; pair < kPairs; ++pair) {
                const uint8_t *a = unit_rows(n + pair, h, unit, rows_);
                const uint8_t *b = unit_rows(n + kPairs + pair, h, unit, rows_ + tables_.most_registers() * kBytes);
                Bytes *at = to + 2 * pair;
                for (int64_t r = 0; r < registers; ++r, at += 4 * kPairs) {
                    const auto first = load_as<Bytes>(a + r * kBytes), second = load_as<Bytes>(b + r * kBytes);
                    const Bytes even = rows_of<0>(first, second), odd = rows_of<1>(first, second);
                    at[0] = low_nibbles(even), at[1] = high_nibbles(even);
                    at[2 * kPairs] = low_nibbles(odd), at[2 * kPairs + 1] = high_nibbles(odd);
                }
            }
    }

    // Sums of at most kPartNibbles look-ups, for all pairs.
    OASIS_INLINE void take_sums(const uint8_t *tables, const Bytes *indices, int64_t rows, int factor, Pair *pairs) const {
        Bytes low[kPairs] = {}, high[kPairs] = {};
        for (int64_t row = 0; row < rows; ++row, indices += 2 * kPairs) {
            const auto table = load_as<Bytes>(tables + row * kBytes);
#pragma GCC unroll 8
            for (int i = 0; i < kPairs; ++i) {
                low[i] += look_up(table, indices[2 * i]);
                high[i] += look_up(table, indices[2 * i + 1]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kPairs; ++i) pairs[i] = add_lanes(low[i], high[i], factor);
    }

    OASIS_INLINE F32 unit_powers(const uint8_t *tables, const Bytes *indices, int64_t rows, int factor, bool partial) const {
        Pair pairs[kPairs];
        take_sums(tables, indices, std::min<int64_t>(rows, kPartNibbles), factor, pairs);
        for (int64_t row = kPartNibbles; row < rows; row += kPartNibbles) {
            Pair more[kPairs];
            take_sums(tables + row * kBytes, indices + row * 2 * kPairs, std::min<int64_t>(rows - row, kPartNibbles), factor, more);
            for (int i = 0; i < kPairs; ++i) pairs[i] += more[i];
        }
        if (partial)
            for (Pair &pair : pairs) pair = masked(pair, last_mask_);
        return sums_of_powers(pairs);
    }

    void score_tile(int64_t n, int64_t h, int64_t w) const {
        float *logits = a_.logits + tables_.logits_at(w, h);
        const int factor = tables_.factor(w, h);
        if (factor == 0) return score_in_floats(n, h, w, logits);
        const int64_t rows = 2 * tables_.head(h).registers;
        const uint8_t *tables = tables_.bytes(w, h);
        F32 total = unit_powers(tables, indices_, rows, factor, partial_ && units_ == 1);
        for (int64_t unit = 1; unit < units_; ++unit)
            total += unit_powers(tables, indices_ + unit * rows * 2 * kPairs, rows, factor, partial_ && unit + 1 == units_);
        store_first(logits + n, log_from_one(total) + tables_.shift(w, h), std::min<int64_t>(kLanes, last_ - n));
    }

    // For the rare query whose logits are too far apart for bytes, or not finite.
    void score_in_floats(int64_t n, int64_t h, int64_t w, float *logits) const {
        const HeadNibbles &head = tables_.head(h);
        const float *tables = tables_.floats(w, h);
        const auto logit_of = [&](const uint8_t *codes, int64_t token) {
            float logit = 0.0f;
            for (int64_t j = 0; j < head.count; ++j)
                logit += tables[j * 16 + (codes[j * half_ + token % half_] >> (token < half_ ? 0 : 4) & 15)];
            return logit;
        };
        for (int64_t i = n; i < std::min(n + kLanes, last_); ++i) {
            const uint8_t *codes = a_.codes + (std::max<int64_t>(pages_[i], 0) * a_.num_nibbles + head.first) * half_;
            logits[i] = 0.0f;
            if (pages_[i] < 0) continue;
            float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
            for (int64_t t = 0; t < a_.block_size; ++t) most = std::max(most, logit_of(codes, t));
            const float base = std::isfinite(most) ? most : 0.0f;
            for (int64_t t = 0; t < a_.block_size; ++t) total += expf(logit_of(codes, t) - base);
            logits[i] = logf(total) + base + tables_.shift(w, h);
        }
    }

    const oasis_transform_score_args &a_;
    const ScoreTables &tables_;
    const int64_t half_, units_;
    int64_t ahead_, last_ = 0;
    bool partial_;
    uint16_t last_mask_[32];
    const int64_t *pages_ = nullptr;
    Bytes *indices_ = nullptr;
    uint8_t *rows_ = nullptr;
};

} // namespace

void transform_score(const oasis_transform_score_args &a) {
    ScoreTables tables(a);
    const int64_t queries = a.sequences * tables.width();
    const int64_t book_bytes = a.kv_heads * a.num_components * a.head_dim * 4 + a.num_nibbles * 256;
    with_element(a.dtype, [&](auto element) {
        parallel_for(queries, a.num_threads, queries * book_bytes, [&](int64_t w) { tables.fill<decltype(element)>(w); });
    });
    const int64_t pieces = (a.blocks + kBlocksPerPiece - 1) / kBlocksPerPiece;
    const int64_t bytes = a.sequences * a.blocks * a.num_nibbles * a.block_size / 2 * tables.width();
    parallel_for(a.sequences * pieces, a.num_threads, bytes,
                 [&](int64_t task) { Scorer(a, tables).score(task / pieces, task % pieces * kBlocksPerPiece); });
}

} // namespace oasis::OASIS_ISA
