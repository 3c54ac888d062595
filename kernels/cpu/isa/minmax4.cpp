// Bounds in 4 bits. Compiled without fused multiply-adds: what is stored must be what the reference stores, bit for bit.
#include "blocks.h"
#include "declarations.h"
#include "threads.h"
#include "workspace.h"

namespace oasis::OASIS_ISA {
namespace {

constexpr float kLargest = 60000.0f, kSlack = 0x1p-10f, kTiny = 0x1p-24f; // as in reference_summaries.py
constexpr int64_t kRowsPerPiece = 64;

float as_half(float x) {
    F16 half;
    store_first(&half, broadcast(x), 1);
    return load_first(&half, 1)[0];
}

// amin and amax of a row as torch has them: NaN if any is NaN.
template <bool largest> float extreme(const float *row, int64_t count) {
    float found = row[0];
    for (int64_t i = 1; i < count; ++i) {
        if (row[i] != row[i]) return row[i];
        if (largest ? row[i] > found : row[i] < found) found = row[i];
    }
    return found;
}

// Codes of a row of bounds. `up`: rounded up, else down; only with `outward`.
void write_row(const float *row, int64_t head_dim, bool outward, bool up, uint8_t *codes, F16 *range, int32_t *levels) {
    const float low = extreme<false>(row, head_dim), high = extreme<true>(row, head_dim);
    const float zero = as_half(low - kSlack * std::fabs(low) - kTiny);
    const float step = as_half((high - zero) / 15 * (1 + 2 * kSlack) + kTiny);
    store_first(range, broadcast(zero), 1);
    store_first(range + 1, broadcast(step), 1);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        const int64_t left = std::min<int64_t>(kLanes, head_dim - d);
        F32 level = (load_first(row + d, left) - zero) / step;
        if (outward) {
            level = level > 0.0f ? level : F32{};
            level = level < 15.0f ? level : broadcast(15.0f);
            const I32 whole = __builtin_convertvector(level, I32);
            const F32 below = __builtin_convertvector(whole, F32);
            level = up ? (below < level ? below + 1.0f : below) : below;
        }
        store(levels + d, rounded(level, 15.0f));
    }
    for (int64_t d = 0; d < head_dim / 2; ++d) codes[d] = static_cast<uint8_t>(levels[d] | levels[d + head_dim / 2] << 4);
}

} // namespace

void minmax4_write(const oasis_minmax4_write_args &a) {
    with_element(a.dtype, [&](auto element) {
        using T = decltype(element);
        parallel_for(a.count, a.num_threads, key_bytes<T>(a), [&](int64_t i) {
            if (a.pages[i] < 0) return;
            Parts parts;
            const auto bound_part = parts.add<float>(2 * a.head_dim);
            const auto level_part = parts.add<int32_t>(a.head_dim + kLanes);
            parts.allocate();
            float *bounds = parts.at<float>(bound_part);
            for (int64_t h = 0; h < a.kv_heads; ++h) {
                const T *keys = keys_of<T>(a, i, h);
                for (int64_t d = 0; d < a.head_dim; d += kLanes) {
                    const int64_t left = std::min<int64_t>(kLanes, a.head_dim - d);
                    F32 both[2];
                    channel_bounds(keys + d, a.block_size, a.keys_token_stride, left, both[0], both[1]);
                    for (int side = 0; side < 2; ++side) {
                        F32 bound = both[side] > kLargest ? broadcast(kLargest) : both[side];
                        bound = bound < -kLargest ? broadcast(-kLargest) : bound;
                        store_first(bounds + side * a.head_dim + d, bound, left);
                    }
                }
                const int64_t at = a.pages[i] * a.kv_heads + h;
                for (int side = 0; side < 2; ++side)
                    write_row(bounds + side * a.head_dim, a.head_dim, a.outward != 0, side == 1,
                              a.codes + (2 * at + side) * (a.head_dim / 2), static_cast<F16 *>(a.ranges) + (2 * at + side) * 2,
                              parts.at<int32_t>(level_part));
            }
        });
    });
}

void minmax4_read(const oasis_minmax4_read_args &a) {
    const int64_t sides = 2 * a.inner, half = a.head_dim / 2;
    const int64_t pieces = (a.count + kRowsPerPiece - 1) / kRowsPerPiece;
    parallel_for(pieces, a.num_threads, a.count * sides * half * 9, [&](int64_t piece) {
        for (int64_t i = piece * kRowsPerPiece; i < std::min(a.count, (piece + 1) * kRowsPerPiece); ++i) {
            float *bounds = a.bounds + i * sides * a.head_dim;
            if (a.rows[i] < 0) {
                std::fill_n(bounds, sides * a.head_dim, 0.0f);
                continue;
            }
            for (int64_t side = 0; side < sides; ++side, bounds += a.head_dim) {
                const uint8_t *codes = a.codes + (a.rows[i] * sides + side) * half;
                const auto *range = static_cast<const F16 *>(a.ranges) + (a.rows[i] * sides + side) * 2;
                const float zero = load_first(range, 1)[0], step = load_first(range + 1, 1)[0];
                for (int64_t d = 0; d < half; ++d) bounds[d] = zero + step * static_cast<float>(codes[d] & 15);
                for (int64_t d = 0; d < half; ++d) bounds[half + d] = zero + step * static_cast<float>(codes[d] >> 4);
            }
        }
    });
}

} // namespace oasis::OASIS_ISA
