// Block logits of two bits per key channel: the keys of a block are read from their codes, and scored as keys are.
#include "block_logits.h"
#include "blocks.h"
#include "declarations.h"
#include "threads.h"
#include "workspace.h"

namespace oasis::OASIS_ISA {
namespace {

constexpr int64_t kBlocksPerPiece = 32;

// The keys of a block as its codes have them, `(tokens, head_dim)`. `steps` has room for head_dim floats and a vector.
void read_block(const uint8_t *codes, const float *bounds, int64_t tokens, int64_t head_dim, float *steps, float *keys) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        const int64_t left = std::min<int64_t>(kLanes, head_dim - d);
        store(steps + d, step_between(load_first(bounds + d, left), load_first(bounds + head_dim + d, left)));
    }
    const int64_t quarter = head_dim / 4;
    for (int64_t t = 0; t < tokens; ++t, codes += quarter)
        for (int i = 0; i < 4; ++i, keys += quarter)
            for (int64_t d = 0; d < quarter; ++d)
                keys[d] = bounds[i * quarter + d] + steps[i * quarter + d] * static_cast<float>(codes[d] >> (2 * i) & 3);
}

template <class T, class Shape> void score_piece(const oasis_bit2_score_args &a, int64_t sequence, int64_t head, int64_t first, Shape shape) {
    const int64_t group = a.query_heads / a.kv_heads, count = a.rows * group, padded = (count + kQueries - 1) / kQueries * kQueries;
    Parts parts;
    const auto query_part = parts.add<float>(padded * shape.floats());
    const auto row_part = parts.add<float>(shape.floats());
    const auto step_part = parts.add<float>(shape.floats() + kLanes);
    const auto key_part = parts.add<float>(a.block_size * shape.dim());
    const auto logit_part = parts.add<F32>((a.block_size + kKeys - 1) / kKeys);
    parts.allocate();
    float *queries = parts.at<float>(query_part), *row = parts.at<float>(row_part), *keys = parts.at<float>(key_part);
    for (int64_t q = 0; q < padded; ++q) {
        const int64_t used = std::min(q, count - 1);
        const auto *from = static_cast<const T *>(a.queries) + sequence * a.queries_sequence_stride +
                           used / group * a.queries_row_stride + (head * group + used % group) * a.queries_head_stride;
        for (int64_t d = 0; d < shape.dim(); d += kLanes)
            store(row + d, load_first(from + d, std::min<int64_t>(kLanes, shape.dim() - d)));
        arrange<float>(queries + q * shape.floats(), row, shape);
    }
    const int64_t *slots = a.slots + (sequence * a.kv_heads + head) * a.blocks;
    const float *bounds = a.bounds + (sequence * a.kv_heads + head) * a.blocks * 2 * shape.dim();
    for (int64_t n = first; n < std::min(a.blocks, first + kBlocksPerPiece); ++n) {
        if (slots[n] >= 0)
            read_block(a.codes + slots[n] * a.block_size * (shape.dim() / 4), bounds + n * 2 * shape.dim(), a.block_size, shape.dim(),
                       parts.at<float>(step_part), keys);
        for (int64_t q = 0; q < count; q += kQueries) {
            F32 found = {};
            if (slots[n] >= 0)
                found = block_logits(static_cast<const float *>(keys), a.block_size, queries + q * shape.floats(), parts.at<F32>(logit_part), a.scale, 0.0f, shape);
            for (int64_t i = q; i < std::min(count, q + kQueries); ++i) {
                const int64_t at = (sequence * a.rows + i / group) * a.query_heads + head * group + i % group;
                a.logits[at * a.blocks + n] = found[(i - q) * kKeys];
            }
        }
    }
}

} // namespace

void bit2_score(const oasis_bit2_score_args &a) {
    if (a.rows == 0) return;
    with_element(a.dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t pieces = (a.blocks + kBlocksPerPiece - 1) / kBlocksPerPiece;
        const int64_t bytes = a.sequences * a.kv_heads * a.blocks * a.block_size * a.head_dim * 4; // as much work as such keys
        with_row_shape(a.head_dim, [&](auto shape) {
            parallel_for(a.sequences * a.kv_heads * pieces, a.num_threads, bytes, [&](int64_t task) {
                const int64_t pair = task / pieces;
                score_piece<T>(a, pair / a.kv_heads, pair % a.kv_heads, task % pieces * kBlocksPerPiece, shape);
            });
        });
    });
}

} // namespace oasis::OASIS_ISA
