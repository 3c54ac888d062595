// Bounds of the keys of a block, in the keys' own type: writing them, and the largest logit that they allow.
#include "blocks.h"
#include "declarations.h"
#include "threads.h"
#include "workspace.h"

namespace oasis::OASIS_ISA {
namespace {

constexpr int64_t kBlocksPerPiece = 128;
// Blocks whose heads are scored one after the other: queries of a head stay in the first-level cache for so many. Logits are gathered
// over as many before they are written: rows of logits often lie a power of two apart, so that writing to all of them in turn would
// drive each other out of the caches.
constexpr int64_t kRun = 32;

// A block's bounds are a row of 2 D numbers, and a score is the product with another such row: the negative part of the query for
// the smallest keys, then its positive part for the largest.
template <class T, class Shape> class Piece {
  public:
    Piece(const oasis_minmax_score_args &a, int64_t sequence, Shape shape)
        : a_(a), shape_(shape), sequence_(sequence), group_(a.query_heads / a.kv_heads), count_(a.rows * group_),
          padded_((count_ + kQueries - 1) / kQueries * kQueries), pages_(a.pages + sequence * a.blocks) {}

    void score(int64_t first) {
        take_queries();
        const int64_t end = std::min(a_.blocks, first + kBlocksPerPiece);
        for (int64_t run = first; run < end; run += kRun)
            for (int64_t h = 0; h < a_.kv_heads; ++h) {
                const int64_t last = std::min(end, run + kRun);
                for (int64_t n = run; n < last; n += kKeys) {
                    prefetch_rows(n + kRun, h);
                    score_blocks(n, std::min<int64_t>(kKeys, last - n), h, gathered_ + n - run);
                }
                for (int64_t q = 0; q < count_; ++q) {
                    const int64_t at = (sequence_ * a_.rows + q / group_) * a_.query_heads + h * group_ + q % group_;
                    std::memcpy(a_.logits + at * a_.blocks + run, gathered_ + q * kRun, static_cast<size_t>(last - run) * sizeof(float));
                }
            }
    }

  private:
    void take_queries() {
        Parts parts;
        const auto queries = parts.add<float>(a_.kv_heads * padded_ * shape_.floats());
        const auto row = parts.add<float>(shape_.floats() + kLanes);
        const auto gathered = parts.add<float>(padded_ * kRun);
        parts.allocate();
        gathered_ = parts.at<float>(gathered);
        queries_ = parts.at<float>(queries);
        with_element(a_.queries_dtype, [&](auto element) {
            for (int64_t h = 0; h < a_.kv_heads; ++h)
                for (int64_t q = 0; q < padded_; ++q)
                    take_query<decltype(element)>(h, std::min(q, count_ - 1), parts.at<float>(row), queries_ + (h * padded_ + q) * shape_.floats());
        });
    }

    template <class Q> void take_query(int64_t h, int64_t q, float *row, float *to) {
        const auto *from = static_cast<const Q *>(a_.queries) + sequence_ * a_.queries_sequence_stride +
                           q / group_ * a_.queries_row_stride + (h * group_ + q % group_) * a_.queries_head_stride;
        for (int64_t d = 0; d < a_.head_dim; d += kLanes) {
            const int64_t left = std::min<int64_t>(kLanes, a_.head_dim - d);
            const F32 query = load_first(from + d, left) * a_.scale;
            store_first(row + d, query > 0.0f ? F32{} : query, left);
            store_first(row + a_.head_dim + d, query < 0.0f ? F32{} : query, left);
        }
        arrange<T>(to, row, shape_);
    }

    const T *bounds(int64_t n, int64_t h) const {
        return static_cast<const T *>(a_.bounds) + (std::max<int64_t>(pages_[n], 0) * a_.kv_heads + h) * shape_.dim();
    }

    // Inlined, since GCC leaves out calls of functions that do nothing but prefetch.
    OASIS_INLINE void prefetch_rows(int64_t n, int64_t h) const {
        for (int64_t i = n; i < std::min(a_.blocks, n + kKeys); ++i) {
            const auto *row = reinterpret_cast<const char *>(bounds(i, h));
            for (int64_t byte = 0; byte < shape_.dim() * static_cast<int64_t>(sizeof(T)); byte += 64) prefetch(row + byte);
        }
    }

    void score_blocks(int64_t n, int64_t count, int64_t h, float *logits) {
        const T *rows[kKeys];
        for (int k = 0; k < kKeys; ++k) rows[k] = bounds(n + std::min<int64_t>(k, count - 1), h);
        for (int64_t q = 0; q < padded_; q += kQueries) {
            const F32 found = products(rows, queries_ + (h * padded_ + q) * shape_.floats(), shape_);
            for (int i = 0; i < kQueries; ++i)
                std::memcpy(logits + (q + i) * kRun, reinterpret_cast<const float *>(&found) + i * kKeys, kKeys * sizeof(float));
        }
    }

    const oasis_minmax_score_args &a_;
    Shape shape_;
    int64_t sequence_, group_, count_, padded_;
    const int64_t *pages_;
    float *queries_ = nullptr, *gathered_ = nullptr; // (kv_heads, padded, 2 D) and (padded, kRun)
};

} // namespace

void minmax_score(const oasis_minmax_score_args &a) {
    if (a.num_pages == 0 || a.rows == 0) { // nothing but EMPTY pages
        std::fill_n(a.logits, a.sequences * a.rows * a.query_heads * a.blocks, 0.0f);
        return;
    }
    with_element(a.bounds_dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t pieces = (a.blocks + kBlocksPerPiece - 1) / kBlocksPerPiece;
        const int64_t bytes = a.sequences * a.blocks * a.kv_heads * 2 * a.head_dim * static_cast<int64_t>(sizeof(T));
        with_row_shape(2 * a.head_dim, [&](auto shape) {
            parallel_for(a.sequences * pieces, a.num_threads, bytes, [&](int64_t task) {
                Piece<T, decltype(shape)>(a, task / pieces, shape).score(task % pieces * kBlocksPerPiece);
            });
        });
    });
}

void minmax_write(const oasis_minmax_write_args &a) {
    with_element(a.dtype, [&](auto element) {
        using T = decltype(element);
        parallel_for(a.count, a.num_threads, key_bytes<T>(a), [&](int64_t i) {
            if (a.pages[i] < 0) return;
            for (int64_t h = 0; h < a.kv_heads; ++h) {
                const T *keys = keys_of<T>(a, i, h);
                auto *bounds = static_cast<T *>(a.bounds) + (a.pages[i] * a.kv_heads + h) * 2 * a.head_dim;
                for (int64_t d = 0; d < a.head_dim; d += kLanes) {
                    const int64_t left = std::min<int64_t>(kLanes, a.head_dim - d);
                    F32 low, high;
                    channel_bounds(keys + d, a.block_size, a.keys_token_stride, left, low, high);
                    store_first(bounds + d, low, left);
                    store_first(bounds + a.head_dim + d, high, left);
                }
            }
        });
    });
}

} // namespace oasis::OASIS_ISA
