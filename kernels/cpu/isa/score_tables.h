// The tables of a transform score: what each nibble adds to a query's logits, in floats and in bytes.
//
// A logit is a sum over the nibbles of a head. The bytes count it in steps of factor / 128 octaves (powers of two), because then
// `factor * sum` is the upper half of a float that is about 2^(logit / ln 2): bits 7 to 14 of it are an exponent. The factor is the
// least integer for which no sum exceeds a byte, and each query of a head has its own, so that queries with small logits lose nothing
// to those with large ones.
//
// Why bytes are fine enough, and 16-bit entries (twice the look-ups, twice the additions) are not needed: sums are kept in bytes over
// kPartNibbles nibbles only and added in 16 bits from there on. On SmolLM2-135M with 2,048 tokens, native logits of blocks differ from
// the reference's by 0.07 nats in standard deviation and by 1.6 at most, where the logits of a query can lie more than 100 nats apart;
// KL does not move. A query for which all this fails (steps above half an octave, logits within a few steps of each other, numbers that
// are not finite) has factor 0 and is scored in floats.
#pragma once

#include "bytes.h"
#include "rows.h"
#include "workspace.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace oasis::OASIS_ISA {

inline constexpr int kPartNibbles = 8; // whose bytes are added before anything is widened
inline constexpr int kMostFactor = 63;                 // 2 * 255 * 63 fits 16 bits with a sign
inline constexpr int kMostBits = 0x7f80 - 7 * 128 - 1; // sums of 64 powers stay finite
inline constexpr float kOctave = 0.69314718f;          // in nats
inline constexpr float kFlat = 1.0f / 32;              // octaves: logits that lie closer than this are not told apart by steps
// Half of what `powers` gives too much, in nats: ln(1.0615) / 2, and half of what the lower half of the mantissa adds, 2^-8.
inline constexpr float kExcess = 0.0337f;

// Where one head's nibbles lie.
struct HeadNibbles {
    int64_t first = 0;
    int64_t count = 0;
    int64_t registers = 0; // of code rows
    int64_t table_rows = 0;  // of the heads before it
};

// How nibble `j` of a head is met: in which register of the tables, in which lane of it, and in which partial sum.
struct Place {
    explicit Place(int64_t j)
        : row(2 * (j / (2 * kByteLanes)) + j % 2), lane(j % (2 * kByteLanes) / 2), part(row / kPartNibbles * kByteLanes + lane) {}
    int64_t row, lane, part;
};

class ScoreTables {
  public:
    explicit ScoreTables(const oasis_transform_score_args &a)
        : a_(a), group_(a.query_heads / a.kv_heads), width_(a.rows * group_), heads_(a.kv_heads) {
        int64_t rows = 0;
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            HeadNibbles &head = heads_[h];
            head.first = a.offsets[h];
            head.count = (h + 1 < a.kv_heads ? a.offsets[h + 1] : a.num_nibbles) - head.first;
            head.registers = (head.count + 2 * kByteLanes - 1) / (2 * kByteLanes);
            head.table_rows = rows;
            rows += 2 * head.registers;
            most_registers_ = std::max(most_registers_, head.registers);
        }
        rows_per_sequence_ = rows;
        const int64_t queries = a.sequences * width_;
        bytes_ = std::make_unique_for_overwrite<uint8_t[]>(queries * rows * kBytes + kBytes);
        floats_ = std::make_unique_for_overwrite<float[]>(queries * a.num_nibbles * 16);
        factors_.resize(queries * a.kv_heads);
        shifts_.resize(queries * a.kv_heads);
    }

    int64_t width() const { return width_; } // queries of a sequence per kv head
    int64_t most_registers() const { return most_registers_; }
    const HeadNibbles &head(int64_t h) const { return heads_[h]; }

    // Queries are counted over sequences. A factor of 0 means: to be scored with the floats.
    int factor(int64_t w, int64_t h) const { return factors(w / width_, h)[w % width_]; }
    const int32_t *factors(int64_t sequence, int64_t h) const { return factors_.data() + (sequence * a_.kv_heads + h) * width_; }
    // What its logits are above the logarithms of sums of powers, or of exponentials where the factor is 0.
    float shift(int64_t w, int64_t h) const { return shifts_[w * a_.kv_heads + h]; }
    // (2 * registers, width, kBytes)
    const uint8_t *bytes(int64_t sequence, int64_t h) const {
        return aligned() + (sequence * rows_per_sequence_ + heads_[h].table_rows) * width_ * kBytes;
    }
    const float *floats(int64_t w, int64_t h) const { return floats_.get() + (w * a_.num_nibbles + heads_[h].first) * 16; }

    int64_t logits_at(int64_t w, int64_t h) const {
        const int64_t row = w / group_; // counted over sequences, too
        return (row * a_.query_heads + h * group_ + w % group_) * a_.blocks;
    }

    template <class T> void fill(int64_t w) {
        Parts parts;
        const auto query_part = parts.add<float>(a_.head_dim + kLanes);
        const auto rotated_part = parts.add<float>(a_.kv_heads * a_.num_components);
        const auto sum_part = parts.add<float>(a_.num_nibbles + 4 * kByteLanes);
        parts.allocate();
        float *rotated = parts.at<float>(rotated_part);
        for (int64_t h = 0; h < a_.kv_heads; ++h) {
            float *query = parts.at<float>(query_part);
            take_query<T>(query, w, h);
            for (int64_t c = 0; c < a_.num_components; ++c)
                rotated[h * a_.num_components + c] = dot(query, a_.decode + (h * a_.num_components + c) * a_.head_dim);
            shifts_[w * a_.kv_heads + h] = dot(query, a_.mean + h * a_.head_dim);
        }
        float *tables = floats_.get() + w * a_.num_nibbles * 16;
        for (int64_t m = 0; m < a_.num_nibbles; ++m)
            for (int v = 0; v < 16; ++v) {
                float sum = 0.0f;
                for (int j = 0; j < 4; ++j) sum += a_.levels[(m * 16 + v) * 4 + j] * rotated[a_.components[m * 4 + j]];
                tables[m * 16 + v] = sum;
            }
        for (int64_t h = 0; h < a_.kv_heads; ++h) to_bytes(w, h, parts.at<float>(sum_part));
    }

  private:
    uint8_t *aligned() const {
        const auto address = reinterpret_cast<uintptr_t>(bytes_.get());
        return bytes_.get() + (kBytes - address % kBytes) % kBytes;
    }

    template <class T> void take_query(float *query, int64_t w, int64_t h) {
        const int64_t row = w / group_, sequence = row / a_.rows;
        const auto *from = static_cast<const T *>(a_.queries) + sequence * a_.queries_sequence_stride +
                           row % a_.rows * a_.queries_row_stride + (h * group_ + w % group_) * a_.queries_head_stride;
        for (int64_t d = 0; d < a_.head_dim; d += kLanes)
            store(query + d, load_first(from + d, std::min<int64_t>(kLanes, a_.head_dim - d)) * a_.scale);
    }

    float dot(const float *a, const float *b) const {
        F32 total = {};
        for (int64_t d = 0; d < a_.head_dim; d += kLanes) total += load(a + d) * load_first(b + d, std::min<int64_t>(kLanes, a_.head_dim - d));
        return sum(total);
    }

    // Fills the bytes, the factor and the shift of a query. `octaves` has room for the spread of each partial sum.
    void to_bytes(int64_t w, int64_t h, float *octaves) {
        const HeadNibbles &head = heads_[h];
        const int factor = common_factor(w, h, octaves);
        int32_t &kept = factors_[(w / width_ * a_.kv_heads + h) * width_ + w % width_];
        kept = 0;
        const float *tables = floats(w, h);
        const int64_t row_bytes = width_ * kBytes;
        uint8_t *to = aligned() + (w / width_ * rows_per_sequence_ + head.table_rows) * row_bytes + w % width_ * kBytes;
        for (int64_t row = 0; row < 2 * head.registers; ++row) std::fill_n(to + row * row_bytes, kBytes, uint8_t{0});
        if (factor == 0) return;
        const float steps = 128 / (factor * kOctave);             // per nat
        const int floor = (127 + factor) / factor;                // bits of at least 128: a normal float
        float least = 0.0f;
        int most = floor;
        for (int64_t j = 0; j < head.count; ++j) {
            const float *entries = tables + j * 16;
            const float low = *std::min_element(entries, entries + 16);
            const Place place(j);
            uint8_t *bytes = to + place.row * row_bytes + place.lane * 16;
            for (int v = 0; v < 16; ++v) bytes[v] = static_cast<uint8_t>(static_cast<int>((entries[v] - low) * steps + 0.5f) + (j ? 0 : floor));
            most += *std::max_element(bytes, bytes + 16) - (j ? 0 : floor);
            least += low;
        }
        if (factor * most > kMostBits) return;
        kept = factor;
        shifts_[w * a_.kv_heads + h] += least + kOctave * (127.0f - static_cast<float>(factor * floor) / 128) - kExcess;
    }

    // 0 if there is none.
    int common_factor(int64_t w, int64_t h, float *octaves) const {
        const HeadNibbles &head = heads_[h];
        if (head.count == 0) return 0;
        const float *tables = floats(w, h);
        const int64_t num_parts = Place(head.count + 2 * kByteLanes - 1).part + kByteLanes;
        std::fill_n(octaves, num_parts, 1.0f); // for the floor
        for (int64_t j = 0; j < head.count; ++j) {
            float low = tables[j * 16], high = low;
            bool finite = true;
            for (int v = 0; v < 16; ++v) {
                low = std::min(low, tables[j * 16 + v]), high = std::max(high, tables[j * 16 + v]);
                finite = finite && std::isfinite(tables[j * 16 + v]);
            }
            if (!finite) return 0;
            octaves[Place(j).part] += (high - low) / kOctave;
        }
        // Half a step of rounding for each nibble, and two steps: the floor is rounded up, and so may products be.
        const float most = *std::max_element(octaves, octaves + num_parts), needed = 128.0f * most / (253.0f - kPartNibbles / 2.0f);
        return most >= 1.0f + kFlat && needed <= kMostFactor ? static_cast<int>(std::ceil(needed)) : 0;
    }

    const oasis_transform_score_args &a_;
    int64_t group_, width_, rows_per_sequence_ = 0, most_registers_ = 0;
    std::vector<HeadNibbles> heads_;
    std::unique_ptr<uint8_t[]> bytes_;
    std::unique_ptr<float[]> floats_;
    std::vector<int32_t> factors_;
    std::vector<float> shifts_;
};

} // namespace oasis::OASIS_ISA
