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
constexpr int64_t kPartRegisters = kPartNibbles / 2;

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
                    score_tile(sequence, i, h);
                }
                for (int64_t w = 0; w < tables_.width(); ++w)
                    give_logits(w, count, queries + w, h, a_.logits + tables_.logits_at(queries + w, h) + run);
            }
        }
    }

  private:
    void allocate() {
        Parts parts;
        const auto row_part = parts.add<uint8_t>(2 * tables_.most_registers() * kBytes);
        const auto page_part = parts.add<uint8_t>(2 * (page_bytes_ + kBytes));
        const auto tile_part = parts.add<F32>(tables_.width() * kPairs);
        const auto sum_part = parts.add<float>(tables_.width() * kRun);
        parts.allocate();
        rows_ = parts.at<uint8_t>(row_part);
        empty_ = parts.at<uint8_t>(page_part);
        tile_ = parts.at<F32>(tile_part);
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

    // Sums of powers of kLanes blocks for all queries of a head.
    void score_tile(int64_t sequence, int64_t i, int64_t h) const {
        const HeadNibbles head = tables_.head(h);
        const int64_t width = tables_.width();
        const uint8_t *tables = tables_.bytes(sequence, h);
        for (int pair = 0; pair < kPairs; ++pair)
            for (int64_t unit = 0; unit < units_; ++unit) {
                const uint8_t *a = unit_rows(i + pair, head, unit, rows_);
                const uint8_t *b = unit_rows(i + kPairs + pair, head, unit, rows_ + tables_.most_registers() * kBytes);
                const auto add = [&]<int queries>(int64_t w) {
                    const auto score = head.registers > kPartRegisters ? &Scorer::score_pair<queries, true> : &Scorer::score_pair<queries, false>;
                    (this->*score)(a, b, head.registers, tables + w * kBytes, tables_.factors(sequence, h) + w, unit, tile_ + w * kPairs + pair);
                };
                int64_t w = 0;
                for (; w + 4 <= width; w += 4) add.template operator()<4>(w);
                for (; w + 2 <= width; w += 2) add.template operator()<2>(w);
                if (w < width) add.template operator()<1>(w);
            }
        for (int64_t w = 0; w < width; ++w) {
            F32 *pairs = tile_ + w * kPairs;
            fold_all<kLanes / 4>(pairs);
            store(gathered_ + w * kRun + i, pairs[0]);
        }
    }

    // One unit of each of two blocks, for a few queries. The code rows are unpacked again for the next queries: four of them are what
    // the sums in registers allow, and storing what was unpacked costs as much as unpacking it.
    template <int queries, bool long_heads>
    [[gnu::noinline]] void score_pair(const uint8_t *a, const uint8_t *b, int64_t registers, const uint8_t *tables, const int32_t *factors,
                                 int64_t unit, F32 *to) const {
        Pair sums[queries];
        take_sums<queries>(a, b, std::min(registers, kPartRegisters), tables, factors, sums);
        if constexpr (long_heads)
            for (int64_t r = kPartRegisters; r < registers; r += kPartRegisters) {
                Pair more[queries];
                take_sums<queries>(a + r * kBytes, b + r * kBytes, std::min(registers - r, kPartRegisters),
                                   tables + 2 * r * tables_.width() * kBytes, factors, more);
                for (int q = 0; q < queries; ++q) sums[q] += more[q];
            }
        if (partial_ && unit + 1 == units_)
            for (Pair &sum : sums) sum = masked(sum, last_mask_);
#pragma GCC unroll 4
        for (int q = 0; q < queries; ++q) {
            const F32 sum = powers(sums[q]);
            to[q * kPairs] = unit == 0 ? sum : to[q * kPairs] + sum;
        }
    }

    // Sums of the look-ups of at most kPartNibbles nibbles per lane.
    template <int queries>
    OASIS_INLINE void take_sums(const uint8_t *a, const uint8_t *b, int64_t registers, const uint8_t *tables, const int32_t *factors,
                                Pair *sums) const {
        Bytes low[queries] = {}, high[queries] = {};
        const int64_t row_bytes = tables_.width() * kBytes;
#pragma GCC unroll 1
        for (int64_t r = 0; r < registers; ++r, tables += 2 * row_bytes) {
            const auto first = load_as<Bytes>(a + r * kBytes), second = load_as<Bytes>(b + r * kBytes);
            const Bytes even = rows_of<0>(first, second), odd = rows_of<1>(first, second);
            const Bytes even_low = low_nibbles(even), even_high = high_nibbles(even), odd_low = low_nibbles(odd), odd_high = high_nibbles(odd);
#pragma GCC unroll 4
            for (int q = 0; q < queries; ++q) {
                const auto table = load_as<Bytes>(tables + q * kBytes);
                low[q] += look_up(table, even_low), high[q] += look_up(table, even_high);
            }
#pragma GCC unroll 4
            for (int q = 0; q < queries; ++q) {
                const auto table = load_as<Bytes>(tables + row_bytes + q * kBytes);
                low[q] += look_up(table, odd_low), high[q] += look_up(table, odd_high);
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < queries; ++q) sums[q] = add_lanes(low[q], high[q], factors[q]);
    }

    void give_logits(int64_t w, int64_t count, int64_t query, int64_t h, float *logits) const {
        if (tables_.factor(query, h) == 0) return score_in_floats(count, h, query, logits);
        const float shift = tables_.shift(query, h);
        for (int64_t i = 0; i < count; i += kLanes)
            store_first(logits + i, log_of(load(gathered_ + w * kRun + i)) + shift, std::min<int64_t>(kLanes, count - i));
    }

    // For the rare query whose logits are too far apart for bytes, or not finite.
    [[gnu::noinline]] void score_in_floats(int64_t count, int64_t h, int64_t w, float *logits) const {
        const HeadNibbles &head = tables_.head(h);
        const float *tables = tables_.floats(w, h);
        const auto logit_of = [&](const uint8_t *codes, int64_t token) {
            float logit = 0.0f;
            for (int64_t j = 0; j < head.count; ++j)
                logit += tables[j * 16 + (codes[j * half_ + token % half_] >> (token < half_ ? 0 : 4) & 15)];
            return logit;
        };
        for (int64_t i = 0; i < count; ++i) {
            const uint8_t *codes = codes_[i] + head.first * half_;
            float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
            for (int64_t t = 0; t < a_.block_size; ++t) most = std::max(most, logit_of(codes, t));
            const float base = std::isfinite(most) ? most : 0.0f;
            for (int64_t t = 0; t < a_.block_size; ++t) total += expf(logit_of(codes, t) - base);
            logits[i] = logf(total) + base + tables_.shift(w, h);
        }
    }

    const oasis_transform_score_args &a_;
    const ScoreTables &tables_;
    const int64_t half_, units_, page_bytes_;
    bool partial_;
    uint16_t last_mask_[32];
    const uint8_t *codes_[kRun]; // of each block of a run
    uint8_t *rows_ = nullptr, *empty_ = nullptr; // a page of zeros, and then the last page
    F32 *tile_ = nullptr;                        // (width, kPairs)
    float *gathered_ = nullptr;                  // (width, kRun): sums of powers
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
