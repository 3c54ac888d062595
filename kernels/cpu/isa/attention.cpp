// Attention of a few queries over a table of blocks: one pass over keys and values, softmax corrected as larger logits appear.
//
// Work on one (sequence, kv head): its queries against tiles of kTile tokens. Logits are kept in base 2.
#include "declarations.h"
#include "rows.h"
#include "runs.h"
#include "threads.h"
#include "wide_queries.h"
#include "workspace.h"

#include <algorithm>
#include <limits>
#include <type_traits>

namespace oasis::OASIS_ISA {
namespace {

constexpr int kTile = 32;         // tokens whose logits are kept at once
constexpr int64_t kAheadBytes = 32768; // of keys and values together, how far prefetching is ahead
constexpr int64_t kPartsOfProducts = 4;   // how much longer products with kKeys keys take than adding up one pass of values
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int32_t capped(int64_t tokens) { return static_cast<int32_t>(std::min<int64_t>(tokens, std::numeric_limits<int32_t>::max() - kTile)); }

// The query rows of one sequence that are not padding.
struct Rows {
    int64_t count = 0;
    int64_t newest = -1;
    int64_t *number;
};

template <class T, class Shape> class Head {
    static constexpr bool kWide = kPairsOfBf16 && std::is_same_v<T, BF16>;

  public:
    Head(const oasis_paged_attention_args &a, int64_t sequence, int64_t head, Shape shape)
        : a_(a), shape_(shape), sequence_(sequence), head_(head), group_(a.query_heads / a.kv_heads) {}

    void attend() {
        allocate();
        take_rows();
        take_runs();
        if (num_runs_ > 0) {
            take_queries();
            for (int64_t first = 0; first < num_runs_;) first = attend_tile(first);
        }
        give_output();
    }

  private:
    void allocate() {
        const int64_t most_queries = padded(a_.rows * group_, kWide ? kLanes : kQueries);
        const int64_t runs = (a_.places + a_.arena_places) * ((a_.block_size + kTile - 1) / kTile);
        Parts parts;
        const auto rows = parts.add<int64_t>(a_.rows);
        const auto all_runs = parts.add<Run<T>>(runs);
        const auto queries = parts.add<float>(most_queries * shape_.floats());
        const auto outputs = parts.add<float>(most_queries * shape_.floats());
        const auto weights = parts.add<float>(most_queries * kTile);
        const auto largest = parts.add<float>(most_queries);
        const auto totals = parts.add<float>(most_queries * kLanes);
        const auto lags = parts.add<int32_t>(most_queries);
        const auto pairs = parts.add<uint32_t>(kWide ? most_queries * (shape_.dim() + 1) / 2 : 0);
        const auto packed = parts.add<uint32_t>(kWide ? most_queries * kTile / 2 : 0);
        parts.allocate();
        rows_.number = parts.at<int64_t>(rows);
        runs_ = parts.at<Run<T>>(all_runs);
        queries_ = parts.at<float>(queries);
        outputs_ = parts.at<float>(outputs);
        weights_ = parts.at<float>(weights);
        largest_ = parts.at<float>(largest);
        totals_ = parts.at<float>(totals);
        query_lags_ = parts.at<int32_t>(lags);
        pairs_ = parts.at<uint32_t>(pairs);
        packed_ = parts.at<uint32_t>(packed);
    }

    static int64_t padded(int64_t queries, int64_t at_once) { return (queries + at_once - 1) / at_once * at_once; }

    int64_t position(int64_t row) const { return a_.positions[sequence_ * a_.rows + row]; }

    void take_rows() {
        for (int64_t row = 0; row < a_.rows; ++row)
            if (position(row) >= 0) {
                rows_.number[rows_.count++] = row;
                rows_.newest = std::max(rows_.newest, position(row));
            }
        num_queries_ = rows_.count * group_;
        wide_ = kWide && num_queries_ > kQueries;
    }

    void take_runs() {
        const int64_t table = (sequence_ * a_.kv_heads + head_);
        take_runs(static_cast<const T *>(a_.pool), a_.slots + table * a_.places, a_.blocks + table * a_.places, a_.places);
        take_runs(static_cast<const T *>(a_.arena), a_.arena_slots + table * a_.arena_places,
                  a_.arena_blocks + table * a_.arena_places, a_.arena_places);
        const int64_t run_bytes = std::min<int64_t>(a_.block_size, kTile) * shape_.dim() * 2 * static_cast<int64_t>(sizeof(T));
        runs_ahead_ = std::max<int64_t>(1, kAheadBytes / run_bytes);
        ahead_.start(runs_, shape_.dim());
        ahead_.allow(std::min(num_runs_, runs_ahead_));
        ahead_.advance(std::numeric_limits<int64_t>::max());
        // Work on kKeys tokens: for each group of queries kPartsOfProducts parts of products, and as many of values. Their lines come
        // evenly between these parts.
        const int64_t lines = kKeys * 2 * shape_.dim() * static_cast<int64_t>(sizeof(T)) / 64;
        const int64_t parts = wide_ ? 4 * kPartsOfProducts * (padded(num_queries_, kLanes) / kLanes)
                                    : 2 * kPartsOfProducts * (padded(num_queries_, kQueries) / kQueries);
        lines_per_part_ = parts ? lines / parts + 1 : 0;
    }

    void take_runs(const T *memory, const int64_t *slots, const int64_t *blocks, int64_t places) {
        const int64_t half = a_.block_size * shape_.dim();
        for (int64_t place = 0; place < places; ++place) {
            if (slots[place] < 0 || blocks[place] < 0) continue;
            const int64_t first = blocks[place] * a_.block_size;
            const int64_t seen = std::min(a_.block_size, rows_.newest - first + 1);
            for (int64_t token = 0; token < seen; token += kTile) {
                const T *keys = memory + slots[place] * 2 * half + token * shape_.dim();
                const auto count = static_cast<int32_t>(std::min<int64_t>(kTile, seen - token));
                runs_[num_runs_++] = {keys, keys + half, count, capped(rows_.newest - first - token)};
            }
        }
    }

    void take_queries() {
        const int64_t all = padded(num_queries_, wide_ ? kLanes : kQueries);
        for (int64_t q = 0; q < all; ++q) {
            // Queries that only fill up a group see what the last one sees, and are thrown away.
            const int64_t used = std::min(q, num_queries_ - 1), row = rows_.number[used / group_];
            const auto *from = static_cast<const T *>(a_.queries) + sequence_ * a_.queries_sequence_stride +
                               row * a_.queries_row_stride + (head_ * group_ + used % group_) * a_.queries_head_stride;
            if constexpr (kWide)
                if (wide_) wide(q / kLanes * kLanes).take_query(static_cast<int>(q % kLanes), from);
            load_row(queries_ + q * shape_.floats(), from, shape_);
            query_lags_[q] = capped(rows_.newest - position(row));
            largest_[q] = -kInfinity;
        }
        std::fill_n(outputs_, all * shape_.floats(), 0.0f);
        std::fill_n(totals_, all * kLanes, 0.0f);
    }

    // Attends to as many runs as fit into a tile; returns the first that did not.
    int64_t attend_tile(int64_t first) {
        alignas(64) int32_t lags[kTile];
        int64_t last = first, columns = 0;
        for (; last < num_runs_; ++last) {
            const Run<T> &run = runs_[last];
            const int wide = (run.count + kKeys - 1) / kKeys * kKeys;
            if (columns + wide > kTile) break;
            for (int i = 0; i < wide; ++i) lags[columns + i] = i < run.count ? run.lag - i : -1;
            columns += wide;
        }
        for (; columns % kLanes; ++columns) lags[columns] = -1;
        ahead_.allow(std::min(num_runs_, last + runs_ahead_));
        if constexpr (kWide)
            if (wide_) return attend_wide(first, last, lags, columns);
        for (int64_t q = 0; q < num_queries_; q += kQueries) {
            take_products(first, last, q);
            for (int64_t i = q; i < q + kQueries; ++i) {
                cap_products(weights_ + i * kTile, columns);
                take_weights(i, lags, columns);
            }
        }
        for (int64_t q = 0; q < num_queries_; q += kQueries) add_values(first, last, q);
        return last;
    }

    // The state of the kLanes queries from `query` on.
    WideQueries<Shape> wide(int64_t query) const {
        return {shape_, pairs_ + query * (shape_.dim() / 2), weights_ + query * kTile, packed_ + query * kTile / 2,
                outputs_ + query * shape_.floats(), largest_ + query, totals_ + query * kLanes, query_lags_ + query};
    }

    int64_t attend_wide(int64_t first, int64_t last, const int32_t *lags, int64_t columns) {
        const auto each_run = [&](auto &&work) {
            for (int64_t r = first, column = 0; r < last; column += padded(runs_[r].count, kKeys), ++r)
                work(WideRun{runs_[r].keys, runs_[r].values, runs_[r].count}, column);
        };
        for (int64_t q = 0; q < num_queries_; q += kLanes) {
            const auto queries = wide(q);
            each_run([&](const WideRun &run, int64_t column) {
                queries.take_products(run, column, [&] { ahead_.advance(2 * lines_per_part_ * kPartsOfProducts); });
            });
            cap_products(weights_ + q * kTile, columns * kLanes);
            queries.take_weights(lags, columns, factor());
            each_run([&](const WideRun &run, int64_t column) {
                queries.add_values(run, column, [&] { ahead_.advance(lines_per_part_); });
            });
        }
        return last;
    }

    void take_products(int64_t first, int64_t last, int64_t query) {
        float *to = weights_ + query * kTile;
        for (int64_t r = first; r < last; ++r) {
            const Run<T> &run = runs_[r];
            for (int token = 0; token < run.count; token += kKeys, to += kKeys) {
                ahead_.advance(lines_per_part_ * kPartsOfProducts);
                const T *keys[kKeys];
                for (int k = 0; k < kKeys; ++k) keys[k] = run.keys + std::min(token + k, run.count - 1) * shape_.dim();
                const F32 found = products(keys, queries_ + query * shape_.floats(), shape_);
                for (int q = 0; q < kQueries; ++q) std::memcpy(to + q * kTile, reinterpret_cast<const float *>(&found) + q * kKeys, 16);
            }
        }
    }

    // From products to capped logits, in place, where there is a cap.
    OASIS_INLINE void cap_products(float *products, int64_t count) const {
        if (a_.softcap <= 0.0f) return;
        for (int64_t i = 0; i < count; i += kLanes) store(products + i, soft_capped(load(products + i) * a_.scale, a_.softcap));
    }

    // From what cap_products leaves to logits in base 2.
    float factor() const { return (a_.softcap > 0.0f ? 1.0f : a_.scale) * 1.44269504f; }

    // From products to weights 2^(logit - largest so far), in place.
    OASIS_INLINE void take_weights(int64_t query, const int32_t *lags, int64_t columns) {
        float *weights = weights_ + query * kTile;
        const float factor = this->factor();
        const I32 query_lag = broadcast(query_lags_[query]);
        F32 most = broadcast(-kInfinity);
        for (int64_t i = 0; i < columns; i += kLanes) {
            const F32 logit = load_as<I32>(lags + i) >= query_lag ? load(weights + i) * factor : broadcast(-kInfinity);
            most = larger(most, logit);
            store(weights + i, logit);
        }
        const float before = largest_[query], now = std::max(before, largest(most));
        F32 total = load(totals_ + query * kLanes);
        if (now > before) {
            const float shrink = before == -kInfinity ? 0.0f : exp2f(before - now);
            float *output = outputs_ + query * shape_.floats();
            for (int64_t v = 0; v < shape_.vectors(); ++v) store(output + v * kLanes, load(output + v * kLanes) * shrink);
            total *= shrink;
            largest_[query] = now;
        }
        const float base = now == -kInfinity ? 0.0f : now; // -inf - -inf is no number
        for (int64_t i = 0; i < columns; i += kLanes) {
            const F32 weight = exp2_nonpositive(load(weights + i) - base);
            store(weights + i, weight);
            total += weight;
        }
        store(totals_ + query * kLanes, total);
    }

    void add_values(int64_t first, int64_t last, int64_t query) {
        constexpr int kPairs = 2;
        int64_t p = 0;
        for (; p + kPairs <= shape_.pairs(); p += kPairs) add_pairs<kPairs>(first, last, query, p);
        for (; p < shape_.pairs(); ++p) add_pairs<1>(first, last, query, p);
        for (int64_t v = 2 * p; v < shape_.vectors(); ++v) add_rest(first, last, query, v);
    }

    template <int pairs> OASIS_INLINE void add_pairs(int64_t first, int64_t last, int64_t query, int64_t pair) {
        F32 sum[kQueries][2 * pairs];
        float *output = outputs_ + query * shape_.floats() + 2 * pair * kLanes;
        for (int q = 0; q < kQueries; ++q)
            for (int v = 0; v < 2 * pairs; ++v) sum[q][v] = load(output + q * shape_.floats() + v * kLanes);
        const float *weights = weights_ + query * kTile;
        for (int64_t r = first; r < last; ++r) {
            const Run<T> &run = runs_[r];
            const T *values = run.values + 2 * pair * kLanes;
            for (int token = 0; token < run.count; ++token) {
                if (token % kKeys == 0) ahead_.advance(lines_per_part_);
                F32 value[2 * pairs];
                for (int i = 0; i < pairs; ++i)
                    load_pair(values + token * shape_.dim() + 2 * i * kLanes, value[2 * i], value[2 * i + 1]);
                for (int q = 0; q < kQueries; ++q) {
                    const F32 weight = broadcast(weights[q * kTile + token]);
                    for (int v = 0; v < 2 * pairs; ++v) sum[q][v] += weight * value[v];
                }
            }
            weights += (run.count + kKeys - 1) / kKeys * kKeys;
        }
        for (int q = 0; q < kQueries; ++q)
            for (int v = 0; v < 2 * pairs; ++v) store(output + q * shape_.floats() + v * kLanes, sum[q][v]);
    }

    void add_rest(int64_t first, int64_t last, int64_t query, int64_t v) {
        F32 sum[kQueries];
        float *output = outputs_ + query * shape_.floats() + v * kLanes;
        for (int q = 0; q < kQueries; ++q) sum[q] = load(output + q * shape_.floats());
        const float *weights = weights_ + query * kTile;
        for (int64_t r = first; r < last; ++r) {
            const Run<T> &run = runs_[r];
            for (int token = 0; token < run.count; ++token) {
                const F32 value = load_rest(run.values + token * shape_.dim(), shape_, v);
                for (int q = 0; q < kQueries; ++q) sum[q] += weights[q * kTile + token] * value;
            }
            weights += (run.count + kKeys - 1) / kKeys * kKeys;
        }
        for (int q = 0; q < kQueries; ++q) store(output + q * shape_.floats(), sum[q]);
    }

    void give_output() {
        auto *output = static_cast<T *>(a_.output);
        for (int64_t row = 0; row < a_.rows; ++row)
            for (int64_t g = 0; g < group_; ++g) {
                const int64_t at = (sequence_ * a_.rows + row) * a_.query_heads + head_ * group_ + g;
                std::fill_n(output + at * shape_.dim(), shape_.dim(), T{});
                a_.logsumexp[at] = -kInfinity;
            }
        if (num_runs_ == 0) return;
        for (int64_t q = 0; q < num_queries_; ++q) {
            const float *totals = totals_ + q * kLanes;
            const float total = wide_ ? totals_[q / kLanes * kLanes * kLanes + q % kLanes] : sum(load(totals));
            if (total == 0.0f) continue;
            const int64_t at = (sequence_ * a_.rows + rows_.number[q / group_]) * a_.query_heads + head_ * group_ + q % group_;
            store_row(output + at * shape_.dim(), outputs_ + q * shape_.floats(), 1.0f / total, shape_);
            a_.logsumexp[at] = largest_[q] * 0.69314718f + logf(total);
        }
    }

    const oasis_paged_attention_args &a_;
    Shape shape_;
    int64_t sequence_, head_, group_;
    Rows rows_;
    int64_t num_queries_ = 0;
    bool wide_ = false; // a lane per query
    Run<T> *runs_ = nullptr;
    int64_t num_runs_ = 0;
    Ahead<T> ahead_;
    int64_t lines_per_part_ = 0, runs_ahead_ = 1;
    float *queries_, *outputs_, *weights_, *largest_, *totals_;
    int32_t *query_lags_;
    uint32_t *pairs_, *packed_;
};

} // namespace

void paged_attention(const oasis_paged_attention_args &a) {
    with_element(a.dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t tokens = (a.places + a.arena_places) * a.block_size * a.sequences * a.kv_heads;
        const int64_t bytes = tokens * a.head_dim * 2 * static_cast<int64_t>(sizeof(T));
        with_row_shape(a.head_dim, [&](auto shape) {
            parallel_for(a.sequences * a.kv_heads, a.num_threads, bytes, [&](int64_t task) {
                Head<T, decltype(shape)>(a, task / a.kv_heads, task % a.kv_heads, shape).attend();
            });
        });
    });
}

} // namespace oasis::OASIS_ISA
