// How a kernel says what went wrong: a status, and a message of the calling thread.
#pragma once

#include "oasiskv.h"

namespace oasis {

// Keeps the message for oasis_last_error() and returns `status`. printf-like.
[[gnu::format(printf, 2, 3)]] int32_t fail(oasis_status status, const char *format, ...);

// Fails, with a message that names an entry which is neither OASIS_EMPTY nor below `limit`.
int32_t out_of_range(const char *table, const int64_t *entries, int64_t at, int64_t limit);

// Whether each of `count` entries is OASIS_EMPTY or below `limit`; if not, the message names `table` and the first that is neither.
bool entries_within(const char *table, const int64_t *entries, int64_t count, int64_t limit);

// The same of a table none of whose entries may be OASIS_EMPTY.
bool entries_exist(const char *table, const int64_t *entries, int64_t count, int64_t limit);

} // namespace oasis
