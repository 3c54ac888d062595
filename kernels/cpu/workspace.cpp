#include "workspace.h"

#include <cstdlib>
#include <memory>
#include <new>

namespace oasis {
namespace {

struct Free {
    void operator()(char *memory) const { std::free(memory); }
};
thread_local std::unique_ptr<char, Free> memory;
thread_local size_t capacity = 0;

} // namespace

char *workspace(size_t bytes) {
    if (bytes > capacity) {
        const size_t wanted = (bytes + 4095) / 4096 * 4096;
        memory.reset(); // first, so that both are never there at once
        capacity = 0;
        memory.reset(static_cast<char *>(std::aligned_alloc(4096, wanted)));
        if (!memory) throw std::bad_alloc();
        capacity = wanted;
    }
    return memory.get();
}

} // namespace oasis
