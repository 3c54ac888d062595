// The exported ops of the key summaries: arguments are checked here, before any memory that a table points into is read or written.
#include "kernels.h"
#include "status.h"

#include <initializer_list>

using namespace oasis;

namespace {

// Sizes that must be at least 1.
struct Size {
    const char *name;
    int64_t value;
};

bool positive(std::initializer_list<Size> sizes) {
    for (const Size &size : sizes)
        if (size.value < 1) return fail(OASIS_INVALID, "%s is %lld", size.name, static_cast<long long>(size.value)) == OASIS_OK;
    return true;
}

bool divides(Size size, int64_t divisor) {
    return size.value % divisor == 0 || fail(OASIS_INVALID, "%s is %lld, no multiple of %lld", size.name,
                                             static_cast<long long>(size.value), static_cast<long long>(divisor)) == OASIS_OK;
}

bool known(const char *name, int64_t dtype) {
    return (dtype >= OASIS_FLOAT32 && dtype <= OASIS_FLOAT16) ||
           fail(OASIS_INVALID, "%s is %lld", name, static_cast<long long>(dtype)) == OASIS_OK;
}

// As entries_within, where OASIS_EMPTY is no entry.
bool numbers_within(const char *table, const int64_t *entries, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (entries[i] < 0 || entries[i] >= limit)
            return fail(OASIS_OUT_OF_RANGE, "%s holds %lld at entry %lld; entries must be 0 to %lld", table,
                        static_cast<long long>(entries[i]), static_cast<long long>(i), static_cast<long long>(limit - 1)) == OASIS_OK;
    return true;
}

template <class Args> bool write_fits(const Args &a) {
    return known("dtype", a.dtype) && positive({{"kv_heads", a.kv_heads}, {"block_size", a.block_size}, {"head_dim", a.head_dim}});
}

template <class Args> bool score_fits(const Args &a) {
    return positive({{"kv_heads", a.kv_heads}, {"query_heads", a.query_heads}, {"head_dim", a.head_dim}}) &&
           divides({"query_heads", a.query_heads}, a.kv_heads);
}

} // namespace

extern "C" int32_t oasis_minmax_write(const oasis_minmax_write_args *args) {
    if (!write_fits(*args)) return OASIS_INVALID;
    if (!entries_within("pages", args->pages, args->count, args->num_pages)) return OASIS_OUT_OF_RANGE;
    kernels().minmax_write(*args);
    return OASIS_OK;
}

extern "C" int32_t oasis_minmax_score(const oasis_minmax_score_args *args) {
    if (!score_fits(*args) || !known("queries_dtype", args->queries_dtype) || !known("bounds_dtype", args->bounds_dtype))
        return OASIS_INVALID;
    if (!entries_within("pages", args->pages, args->sequences * args->blocks, args->num_pages)) return OASIS_OUT_OF_RANGE;
    kernels().minmax_score(*args);
    return OASIS_OK;
}

extern "C" int32_t oasis_minmax4_write(const oasis_minmax4_write_args *args) {
    if (!write_fits(*args) || !divides({"head_dim", args->head_dim}, 2)) return OASIS_INVALID;
    if (!entries_within("pages", args->pages, args->count, args->num_pages)) return OASIS_OUT_OF_RANGE;
    kernels().minmax4_write(*args);
    return OASIS_OK;
}

extern "C" int32_t oasis_minmax4_read(const oasis_minmax4_read_args *args) {
    if (!positive({{"inner", args->inner}, {"head_dim", args->head_dim}}) || !divides({"head_dim", args->head_dim}, 2))
        return OASIS_INVALID;
    if (!entries_within("rows", args->rows, args->count, args->num_rows)) return OASIS_OUT_OF_RANGE;
    kernels().minmax4_read(*args);
    return OASIS_OK;
}

extern "C" int32_t oasis_bit2_write(const oasis_bit2_write_args *args) {
    if (!write_fits(*args) || !divides({"head_dim", args->head_dim}, 4)) return OASIS_INVALID;
    if (!entries_within("pages", args->pages, args->count, args->num_pages)) return OASIS_OUT_OF_RANGE;
    kernels().bit2_write(*args);
    return OASIS_OK;
}

extern "C" int32_t oasis_bit2_score(const oasis_bit2_score_args *args) {
    if (!score_fits(*args) || !known("dtype", args->dtype) || !positive({{"block_size", args->block_size}}) ||
        !divides({"head_dim", args->head_dim}, 4))
        return OASIS_INVALID;
    const int64_t entries = args->sequences * args->kv_heads * args->blocks;
    if (!entries_within("slots", args->slots, entries, args->num_slots)) return OASIS_OUT_OF_RANGE;
    kernels().bit2_score(*args);
    return OASIS_OK;
}

extern "C" int32_t oasis_transform_write(const oasis_transform_write_args *args) {
    const auto &a = *args;
    if (!write_fits(a) || !divides({"block_size", a.block_size}, 2)) return OASIS_INVALID;
    if (!entries_within("pages", a.pages, a.count, a.num_pages)) return OASIS_OUT_OF_RANGE;
    if (!numbers_within("nibbles", a.nibbles, a.kv_heads * a.components, a.num_nibbles)) return OASIS_OUT_OF_RANGE;
    if (!numbers_within("shifts", a.shifts, a.kv_heads * a.components, 4)) return OASIS_OUT_OF_RANGE;
    kernels().transform_write(a);
    return OASIS_OK;
}

extern "C" int32_t oasis_transform_score(const oasis_transform_score_args *args) {
    const auto &a = *args;
    if (!score_fits(a) || !known("dtype", a.dtype) || !positive({{"block_size", a.block_size}}) || !divides({"block_size", a.block_size}, 2))
        return OASIS_INVALID;
    if (a.block_size > 64) return fail(OASIS_UNSUPPORTED, "block_size is %lld", static_cast<long long>(a.block_size));
    if (!entries_within("pages", a.pages, a.sequences * a.blocks, a.num_pages)) return OASIS_OUT_OF_RANGE;
    if (!numbers_within("components", a.components, a.num_nibbles * 4, a.kv_heads * a.num_components)) return OASIS_OUT_OF_RANGE;
    if (!numbers_within("offsets", a.offsets, a.kv_heads, a.num_nibbles + 1)) return OASIS_OUT_OF_RANGE;
    for (int64_t h = 1; h < a.kv_heads; ++h)
        if (a.offsets[h] < a.offsets[h - 1]) return fail(OASIS_INVALID, "offsets do not ascend at entry %lld", static_cast<long long>(h));
    kernels().transform_score(a);
    return OASIS_OK;
}
