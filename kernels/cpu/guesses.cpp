// Queries guessed from a residual stream, and the moving average of how far off the guesses were.
#include "status.h"
#include "threads.h"

#include <algorithm>

using namespace oasis;

namespace {

template <class Args> int32_t check(const Args &a) {
    if (a.planes < 0 || 2 * a.planes > a.head_dim)
        return fail(OASIS_INVALID, "turns have %lld planes, and head_dim is %lld", static_cast<long long>(a.planes),
                    static_cast<long long>(a.head_dim));
    return entries_exist("rows", a.table_rows, a.sequences, a.num_table_rows) ? OASIS_OK : OASIS_OUT_OF_RANGE;
}

} // namespace

extern "C" int32_t oasis_guess_queries(const oasis_guess_queries_args *args) {
    const auto &a = *args;
    if (const int32_t status = check(a)) return status;
    const int64_t rows = a.sequences * a.rows;
    const int64_t bytes = 3 * rows * a.query_heads * a.head_dim * static_cast<int64_t>(sizeof(float));
    parallel_for(rows, a.num_threads, bytes, [&](int64_t row) {
        const float *errors = a.errors + a.table_rows[row / a.rows] * a.query_heads * a.head_dim;
        const float *cosines = a.turns + row * 2 * a.planes, *sines = cosines + a.planes;
        for (int64_t head = 0; head < a.query_heads; ++head) {
            const float *raw = a.raw + (row * a.query_heads + head) * a.head_dim, *error = errors + head * a.head_dim;
            float *to = a.queries + (row * a.query_heads + head) * a.head_dim;
            for (int64_t p = 0; p < a.planes; ++p) {
                const float first = raw[p] + error[p], second = raw[a.planes + p] + error[a.planes + p];
                to[p] = first * cosines[p] - second * sines[p];
                to[a.planes + p] = second * cosines[p] + first * sines[p];
            }
            for (int64_t d = 2 * a.planes; d < a.head_dim; ++d) to[d] = raw[d] + error[d];
        }
    });
    return OASIS_OK;
}

extern "C" int32_t oasis_learn_errors(const oasis_learn_errors_args *args) {
    const auto &a = *args;
    if (const int32_t status = check(a)) return status;
    const float back = 1.0f / (a.scaling * a.scaling), rate = 1.0f - a.keep;
    for (int64_t s = 0; s < a.sequences; ++s) {
        if (a.rows < 1 || a.positions[s * a.rows] != a.guessed_positions[s * a.rows]) continue;
        const float *cosines = a.turns + s * a.rows * 2 * a.planes, *sines = cosines + a.planes;
        for (int64_t head = 0; head < a.query_heads; ++head) {
            const float *query = a.queries + s * a.queries_sequence_stride + head * a.queries_head_stride;
            const float *guessed = a.guessed + (s * a.rows * a.query_heads + head) * a.head_dim;
            float *error = a.errors + (a.table_rows[s] * a.query_heads + head) * a.head_dim;
            for (int64_t p = 0; p < a.planes; ++p) {
                const float first = query[p], second = query[a.planes + p];
                const float cosine = cosines[p] * back, sine = -sines[p] * back;
                error[p] = a.keep * error[p] + rate * (first * cosine - second * sine - guessed[p]);
                error[a.planes + p] = a.keep * error[a.planes + p] + rate * (second * cosine + first * sine - guessed[a.planes + p]);
            }
            for (int64_t d = 2 * a.planes; d < a.head_dim; ++d)
                error[d] = a.keep * error[d] + rate * (query[d] - guessed[d]);
        }
    }
    return OASIS_OK;
}
