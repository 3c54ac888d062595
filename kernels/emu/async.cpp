// cp.async: the data comes as late as the contract allows, at the wait, and until then there are NaNs in its place.
#include "machine.h"
#include "shadow.h"

namespace emu {

void copy_async(void *target, const void *source, int bytes, int source_bytes) {
    if (reinterpret_cast<uintptr_t>(target) % 16 || reinterpret_cast<uintptr_t>(source) % 16)
        find("cp.async of 16 bytes that are not aligned");
    if (source_bytes) shadow_access(source, static_cast<size_t>(source_bytes), Access::kRead);
    shadow_access(target, static_cast<size_t>(bytes), Access::kAsyncBegin);
    std::memset(target, 0xFF, static_cast<size_t>(bytes));
    machine.current->uncommitted.push_back({static_cast<char *>(target), static_cast<const char *>(source), bytes, source_bytes});
}

void commit_async() {
    Thread &self = *machine.current;
    self.committed.push_back(std::move(self.uncommitted));
    self.uncommitted.clear();
}

void wait_async(int groups_that_may_be_missing) {
    Thread &self = *machine.current;
    while (self.committed.size() > static_cast<size_t>(groups_that_may_be_missing)) {
        for (const AsyncCopy &copy : self.committed.front()) {
            shadow_access(copy.target, static_cast<size_t>(copy.bytes), Access::kAsyncEnd);
            std::memcpy(copy.target, copy.source, static_cast<size_t>(copy.source_bytes));
            std::memset(copy.target + copy.source_bytes, 0, static_cast<size_t>(copy.bytes - copy.source_bytes));
        }
        self.committed.pop_front();
    }
    // Groups without copies need no wait.
    while (!self.committed.empty() && self.committed.back().empty()) self.committed.pop_back();
}

void note_atomic(const void *where, size_t bytes) { shadow_access(where, bytes, Access::kAtomic); }
void note_read(const void *where, size_t bytes) { shadow_access(where, bytes, Access::kRead); }

} // namespace emu
