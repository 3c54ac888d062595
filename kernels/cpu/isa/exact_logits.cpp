// How much a block's keys themselves say of its logits: the logsumexp over its tokens.
#include "block_logits.h"
#include "declarations.h"
#include "threads.h"
#include "workspace.h"

#include <algorithm>
#include <limits>

namespace oasis::OASIS_ISA {
namespace {

constexpr int64_t kBlocksPerPiece = 256;
constexpr int64_t kAheadBytes = 16384;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T, class Shape> void piece_logits(const oasis_exact_logits_args &a, int64_t sequence, int64_t head, int64_t first, Shape shape) {
    const int64_t group = a.query_heads / a.kv_heads, count = a.rows * group, padded = (count + kQueries - 1) / kQueries * kQueries;
    Parts parts;
    const auto query_part = parts.add<float>(padded * shape.floats());
    const auto logit_part = parts.add<F32>((a.block_size + kKeys - 1) / kKeys);
    parts.allocate();
    float *queries = parts.at<float>(query_part);
    for (int64_t q = 0; q < padded; ++q) {
        const int64_t used = std::min(q, count - 1);
        const auto *from = static_cast<const T *>(a.queries) + sequence * a.queries_sequence_stride +
                           used / group * a.queries_row_stride + (head * group + used % group) * a.queries_head_stride;
        load_row(queries + q * shape.floats(), from, shape);
    }
    const int64_t slot = 2 * a.block_size * shape.dim(), key_bytes = slot / 2 * static_cast<int64_t>(sizeof(T));
    const int64_t ahead = std::max<int64_t>(1, kAheadBytes / key_bytes), last = std::min(a.blocks, first + kBlocksPerPiece);
    const auto *arena = static_cast<const T *>(a.arena);
    const int64_t *pages = a.pages + sequence * a.blocks;
    for (int64_t n = first; n < last; ++n) {
        if (n + ahead < last && pages[n + ahead] >= 0) {
            const auto *next = reinterpret_cast<const char *>(arena + (pages[n + ahead] * a.kv_heads + head) * slot);
            for (int64_t byte = 0; byte < key_bytes; byte += 64) prefetch(next + byte);
        }
        for (int64_t q = 0; q < count; q += kQueries) {
            F32 found = broadcast(-kInfinity);
            if (pages[n] >= 0)
                found = block_logits(arena + (pages[n] * a.kv_heads + head) * slot, a.block_size, queries + q * shape.floats(),
                                     parts.at<F32>(logit_part), a.scale, a.softcap, shape);
            for (int64_t i = q; i < std::min(count, q + kQueries); ++i) {
                const int64_t at = (sequence * a.rows + i / group) * a.query_heads + head * group + i % group;
                a.logits[at * a.blocks + n] = found[(i - q) * kKeys];
            }
        }
    }
}

} // namespace

void exact_logits(const oasis_exact_logits_args &a) {
    with_element(a.dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t pieces = (a.blocks + kBlocksPerPiece - 1) / kBlocksPerPiece, tasks = a.sequences * a.kv_heads * pieces;
        const int64_t bytes = a.sequences * a.kv_heads * a.blocks * a.block_size * a.head_dim * static_cast<int64_t>(sizeof(T));
        with_row_shape(a.head_dim, [&](auto shape) {
            parallel_for(tasks, a.num_threads, bytes, [&](int64_t task) {
                const int64_t pair = task / pieces;
                piece_logits<T>(a, pair / a.kv_heads, pair % a.kv_heads, task % pieces * kBlocksPerPiece, shape);
            });
        });
    });
}

} // namespace oasis::OASIS_ISA
