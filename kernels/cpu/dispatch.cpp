// Which code path runs: the widest that this processor has, unless OASISKV_ISA or oasis_set_isa() names another.
#include "kernels.h"
#include "status.h"
#include "threads.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace oasis {

namespace portable {
extern const Kernels table;
}
#if defined(OASIS_X86)
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace avx512bf16 {
extern const Kernels table;
}
#endif
#if defined(OASIS_EMULATE_16_LANES)
namespace emulated16 {
extern const Kernels table;
}
#endif

namespace {

struct Path {
    const Kernels *table;
    bool (*runs_here)();
};

#if defined(OASIS_X86)
bool has_avx2() {
    __builtin_cpu_init(); // this may run before other constructors
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
bool has_avx512bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vbmi");
}
#endif

// Best first.
const Path paths[] = {
#if defined(OASIS_X86)
    {&avx512bf16::table, has_avx512bf16},
    {&avx512::table, has_avx512},
    {&avx2::table, has_avx2},
#endif
    {&portable::table, [] { return true; }},
#if defined(OASIS_EMULATE_16_LANES)
    {&emulated16::table, [] { return true; }},
#endif
};

const Kernels *find(const char *name) {
    const bool any = name == nullptr || std::strcmp(name, "auto") == 0;
    for (const Path &path : paths)
        if (path.runs_here() && (any || std::strcmp(name, path.table->name) == 0)) return path.table;
    return nullptr;
}

// A name in the environment that does not run here leaves the choice to the processor; oasis_build_info() shows it.
const Kernels *first_choice() {
    const Kernels *named = find(std::getenv("OASISKV_ISA"));
    return named ? named : find(nullptr);
}

std::atomic<const Kernels *> chosen{first_choice()};

} // namespace

const Kernels &kernels() { return *chosen.load(std::memory_order_relaxed); }

} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_set_isa(const char *name) {
    const Kernels *found = find(name);
    if (found == nullptr) return fail(OASIS_UNSUPPORTED, "code path %s was not built or does not run here", name);
    chosen = found;
    return OASIS_OK;
}

extern "C" const char *oasis_build_info(void) {
    static thread_local char text[256];
    size_t length = static_cast<size_t>(std::snprintf(text, sizeof text, "cpu, compiler %s, paths", __VERSION__));
    for (const Path &path : paths)
        if (length < sizeof text)
            length += static_cast<size_t>(std::snprintf(text + length, sizeof text - length, " %s", path.table->name));
    if (length < sizeof text)
        std::snprintf(text + length, sizeof text - length, ", runs %s, threads %s", kernels().name,
                      has_threads() ? "OpenMP" : "none");
    return text;
}
