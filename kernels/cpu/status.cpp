#include "status.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace oasis {
namespace {
thread_local char message[512] = "";
}

int32_t fail(oasis_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

int32_t out_of_range(const char *table, const int64_t *entries, int64_t at, int64_t limit) {
    return fail(OASIS_OUT_OF_RANGE, "%s holds %lld at entry %lld; entries must be EMPTY (-1) or 0 to %lld", table,
                static_cast<long long>(entries[at]), static_cast<long long>(at), static_cast<long long>(limit - 1));
}

bool entries_within(const char *table, const int64_t *entries, int64_t count, int64_t limit) {
    int64_t least = OASIS_EMPTY, most = OASIS_EMPTY;
    for (int64_t i = 0; i < count; ++i) {
        least = std::min(least, entries[i]);
        most = std::max(most, entries[i]);
    }
    if (least >= OASIS_EMPTY && most < limit) return true;
    for (int64_t i = 0; i < count; ++i)
        if (entries[i] < OASIS_EMPTY || entries[i] >= limit) {
            out_of_range(table, entries, i, limit);
            break;
        }
    return false;
}

bool entries_exist(const char *table, const int64_t *entries, int64_t count, int64_t limit) {
    if (!entries_within(table, entries, count, limit)) return false;
    const auto *found = std::find_if(entries, entries + count, [](int64_t entry) { return entry < 0; });
    if (found == entries + count) return true;
    fail(OASIS_OUT_OF_RANGE, "%s holds EMPTY at entry %lld", table, static_cast<long long>(found - entries));
    return false;
}

} // namespace oasis

extern "C" const char *oasis_last_error(void) { return oasis::message; }
