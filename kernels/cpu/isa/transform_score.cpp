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
// Blocks whose heads are scored one after the other. Logits are gathered over so many before they are written: rows of logits often
// lie a power of two apart, so that writing to all of them in turn would drive each other out of the caches.
constexpr int64_t kRun = 64;
constexpr int64_t kUnitRows = 8; // bytes of a row, of two tokens each

class Scorer {
  public:
    Scorer(const oasis_transform_score_args &a, const ScoreTables &tables)
        : a_(a), tables_(tables), half_(a.block_size / 2), units_((half_ + kUnitRows - 1) / kUnitRows),
          page_bytes_(a.num_nibbles * half_) {
        const int64_t rows = half_ - (units_ - 1) * kUnitRows;
        for (int i = 0; i < 32; ++i) last_mask_[i] = i % kUnitRows < rows ? 0xffff : 0;
        partial_ = rows < kUnitRows;
    }

    void score(int64_t sequence, int64_t first) {
        allocate();
        const int64_t *pages = a_.pages + sequence * a_.blocks;
        const int64_t end = std::min(a_.blocks, first + kBlocksPerPiece), queries = sequence * tables_.width();
        for (int64_t run = first; run < end; run += kRun) {
            const int64_t count = std::min(end - run, kRun);
            take_codes(pages + run, count);
            for (int64_t h = 0; h < a_.kv_heads; ++h) {
                for (int64_t i = 0; i < count; i += kLanes) {
                    prefetch_tile(pages + run + kRun + i, std::min<int64_t>(kLanes, a_.blocks - run - kRun - i), h);
                    take_indices(i, h);
                    for (int64_t w = 0; w < tables_.width(); ++w) score_tile(i, h, queries + w, gathered_ + w * kRun + i);
                }
                for (int64_t w = 0; w < tables_.width(); ++w)
                    give_logits(gathered_ + w * kRun, count, queries + w, h, a_.logits + tables_.logits_at(queries + w, h) + run);
            }
        }
    }

  private:
    void allocate() {
        Parts parts;
        const auto index_part = parts.add<Bytes>(units_ * 2 * tables_.most_registers() * 2 * kPairs);
        const auto row_part = parts.add<uint8_t>(2 * tables_.most_registers() * kBytes);
        const auto page_part = parts.add<uint8_t>(2 * (page_bytes_ + kBytes));
        const auto sum_part = parts.add<float>(tables_.width() * kRun);
        parts.allocate();
        indices_ = parts.at<Bytes>(index_part);
        rows_ = parts.at<uint8_t>(row_part);
        empty_ = parts.at<uint8_t>(page_part);
        gathered_ = parts.at<float>(sum_part);
        std::fill_n(rows_, 2 * tables_.most_registers() * kBytes, uint8_t{0});
        // Registers of rows may end behind the codes of a head: behind the last page, that would be behind the tensor.
        std::fill_n(empty_, 2 * (page_bytes_ + kBytes), uint8_t{0});
        if (a_.num_pages > 0) std::memcpy(empty_ + page_bytes_ + kBytes, a_.codes + (a_.num_pages - 1) * page_bytes_, page_bytes_);
    }

    void take_codes(const int64_t *pages, int64_t count) {
        for (int64_t i = 0; i < kRun; ++i) {
            const int64_t page = i < count ? pages[i] : OASIS_EMPTY;
            codes_[i] = page < 0 ? empty_ : page + 1 < a_.num_pages ? a_.codes + page * page_bytes_ : empty_ + page_bytes_ + kBytes;
        }
    }

    // Inlined, since GCC leaves out calls of functions that do nothing but prefetch.
    OASIS_INLINE void prefetch_tile(const int64_t *pages, int64_t count, int64_t h) const {
        const HeadNibbles &head = tables_.head(h);
        for (int64_t i = 0; i < count; ++i) {
            if (pages[i] < 0) continue;
            const uint8_t *begin = a_.codes + pages[i] * page_bytes_ + head.first * half_;
            for (int64_t byte = 0; byte < head.count * half_; byte += 64) prefetch(begin + byte);
        }
    }

    // The code rows of a unit, 8 bytes each: in place where they lie so, else copied.
    OASIS_INLINE const uint8_t *unit_rows(int64_t i, const HeadNibbles &head, int64_t unit, uint8_t *copy) const {
        const uint8_t *begin = codes_[i] + head.first * half_;
        if (half_ == kUnitRows) return begin;
        const auto bytes = static_cast<size_t>(std::min(kUnitRows, half_ - unit * kUnitRows));
        for (int64_t j = 0; j < head.count; ++j) {
            const uint8_t *row = begin + j * half_ + unit * kUnitRows;
            bytes == kUnitRows ? std::memcpy(copy + j * kUnitRows, row, kUnitRows) : std::memcpy(copy + j * kUnitRows, row, bytes);
        }
        return copy;
    }

    // Indices into tables: by unit, row of tables and pair of blocks, those of the first tokens and those of the last.
    void take_indices(int64_t i, int64_t h) {
        const HeadNibbles head = tables_.head(h);
        Bytes *to = indices_;
        for (int64_t unit = 0; unit < units_; ++unit, to += head.registers * 4 * kPairs)
            for (int pair = 0; pair < kPairs; ++pair) {
                const uint8_t *a = unit_rows(i + pair, head, unit, rows_);
                const uint8_t *b = unit_rows(i + kPairs + pair, head, unit, rows_ + tables_.most_registers() * kBytes);
                Bytes *at = to + 2 * pair;
                for (int64_t r = 0; r < head.registers; ++r, at += 4 * kPairs) {
                    const auto first = load_as<Bytes>(a + r * kBytes), second = load_as<Bytes>(b + r * kBytes);
                    const Bytes even = rows_of<0>(first, second), odd = rows_of<1>(first, second);
                    at[0] = low_nibbles(even), at[1] = high_nibbles(even);
                    at[2 * kPairs] = low_nibbles(odd), at[2 * kPairs + 1] = high_nibbles(odd);
                }
            }
    }

    // Sums of at most kPartNibbles look-ups, for all pairs.
    OASIS_INLINE static void take_sums(const uint8_t *tables, const Bytes *indices, int64_t rows, int factor, Pair *pairs) {
        Bytes low[kPairs], high[kPairs];
        const auto first = load_as<Bytes>(tables);
#pragma GCC unroll 8
        for (int i = 0; i < kPairs; ++i) low[i] = look_up(first, indices[2 * i]), high[i] = look_up(first, indices[2 * i + 1]);
        for (int64_t row = 1; row < rows; ++row) {
            indices += 2 * kPairs;
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

    // Of one unit of each of kLanes blocks.
    OASIS_INLINE F32 unit_sums(const uint8_t *tables, const Bytes *indices, int64_t rows, int factor, bool partial) const {
        Pair pairs[kPairs];
        if (rows <= kPartNibbles && !partial) { // the usual case, that needs no memory for the pairs
            take_sums(tables, indices, rows, factor, pairs);
            return sums_of_powers(pairs);
        }
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

    // Sums of powers of kLanes blocks; logits where the query has no factor.
    OASIS_INLINE void score_tile(int64_t i, int64_t h, int64_t w, float *sums) const {
        const int factor = tables_.factor(w, h);
        if (factor == 0) return score_in_floats(i, h, w, sums);
        const int64_t rows = 2 * tables_.head(h).registers;
        const uint8_t *tables = tables_.bytes(w, h);
        F32 total = unit_sums(tables, indices_, rows, factor, partial_ && units_ == 1);
        for (int64_t unit = 1; unit < units_; ++unit)
            total += unit_sums(tables, indices_ + unit * rows * 2 * kPairs, rows, factor, partial_ && unit + 1 == units_);
        store(sums, total);
    }

    void give_logits(const float *sums, int64_t count, int64_t w, int64_t h, float *logits) const {
        if (tables_.factor(w, h) == 0) {
            std::memcpy(logits, sums, static_cast<size_t>(count) * sizeof(float));
            return;
        }
        const float shift = tables_.shift(w, h);
        for (int64_t i = 0; i < count; i += kLanes)
            store_first(logits + i, log_of(load(sums + i)) + shift, std::min<int64_t>(kLanes, count - i));
    }

    // For the rare query whose logits are too far apart for bytes, or not finite.
    [[gnu::noinline]] void score_in_floats(int64_t first, int64_t h, int64_t w, float *logits) const {
        const HeadNibbles &head = tables_.head(h);
        const float *tables = tables_.floats(w, h);
        const auto logit_of = [&](const uint8_t *codes, int64_t token) {
            float logit = 0.0f;
            for (int64_t j = 0; j < head.count; ++j)
                logit += tables[j * 16 + (codes[j * half_ + token % half_] >> (token < half_ ? 0 : 4) & 15)];
            return logit;
        };
        for (int64_t i = first; i < first + kLanes; ++i) {
            const uint8_t *codes = codes_[i] + head.first * half_;
            float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
            for (int64_t t = 0; t < a_.block_size; ++t) most = std::max(most, logit_of(codes, t));
            const float base = std::isfinite(most) ? most : 0.0f;
            for (int64_t t = 0; t < a_.block_size; ++t) total += expf(logit_of(codes, t) - base);
            logits[i - first] = logf(total) + base + tables_.shift(w, h);
        }
    }

    const oasis_transform_score_args &a_;
    const ScoreTables &tables_;
    const int64_t half_, units_, page_bytes_;
    bool partial_;
    uint16_t last_mask_[32];
    const uint8_t *codes_[kRun]; // of each block of a run
    Bytes *indices_ = nullptr;
    uint8_t *rows_ = nullptr, *empty_ = nullptr; // a page of zeros, and then the last page
    float *gathered_ = nullptr;                  // (width, kRun)
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
