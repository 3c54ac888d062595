#include "shadow.h"

#include "machine.h"

#if defined(OASIS_EMU_CHECKED)

#include <link.h>
#include <string>
#include <vector>

namespace emu {
namespace {

// Of one byte. Times are those of `clock`: an access happens at the time of its warp's last barrier.
struct Record {
    uint32_t written = 0, read = 0;
    uint16_t writer = 0, reader = 0;
    bool atomic = false;           // the last write was
    bool pending = false;          // a cp.async will write here
    bool many_read = false;        // since then, threads of the reader's warp other than the reader
    bool many_warps_read = false;  // since then, other warps
    bool other_block_read = false; // in this launch
};

struct Tensor {
    std::string name;
    const char *begin, *end;
    bool writable;
    std::vector<Record> records;
};

uint32_t clock = 1, launch_began = 1, block_began = 1, last_barrier = 1;
uint32_t warp_time[kMaxThreads / 32];
Record shared_records[kMaxShared];
std::vector<Tensor> tensors;
const Tensor *recent = nullptr;

// This library: its constants may be read by anyone.
const char *library_begin = nullptr, *library_end = nullptr;

int find_library(dl_phdr_info *info, size_t, void *) {
    const char *low = nullptr, *high = nullptr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto &header = info->dlpi_phdr[i];
        if (header.p_type != PT_LOAD) continue;
        const auto *begin = reinterpret_cast<const char *>(info->dlpi_addr + header.p_vaddr);
        if (low == nullptr || begin < low) low = begin;
        if (begin + header.p_memsz > high) high = begin + header.p_memsz;
    }
    const auto *here = reinterpret_cast<const char *>(&clock);
    if (here < low || here >= high) return 0;
    library_begin = low;
    library_end = high;
    return 1;
}

Tensor *tensor_of(const char *byte) {
    if (recent && byte >= recent->begin && byte < recent->end) return const_cast<Tensor *>(recent);
    for (Tensor &tensor : tensors)
        if (byte >= tensor.begin && byte < tensor.end) {
            recent = &tensor;
            return &tensor;
        }
    return nullptr;
}

int self() { return machine.current->number; }
uint32_t now() { return warp_time[self() / 32]; }

// Whether an access may happen at the same time as one of the current thread. What was before `since`, the beginning of the launch
// or, in shared memory, of the block, has nothing to do with this.
bool at_once(uint32_t since, uint32_t time, int thread) {
    if (time < since || thread == self()) return time >= since && time < block_began;
    if (time < block_began) return true; // another block
    if (time < last_barrier) return false;
    return thread / 32 != self() / 32 || time >= now();
}

bool reads_at_once(uint32_t since, const Record &r) {
    if (r.read < since) return false;
    if (r.other_block_read) return true;
    if (r.read < block_began) return true;
    if (r.read < last_barrier) return false;
    if (r.many_warps_read) return true;
    if (r.many_read) return r.reader / 32 != self() / 32 || r.read >= now();
    return at_once(since, r.read, r.reader);
}

void note_read_by_self(uint32_t since, Record &r) {
    if (r.read < since) {
        r.many_read = r.many_warps_read = r.other_block_read = false;
    } else if (r.read < block_began) {
        r.other_block_read = true;
        r.many_read = r.many_warps_read = false;
    } else if (r.read < last_barrier) {
        r.many_read = r.many_warps_read = false;
    } else if (r.reader / 32 != self() / 32) {
        r.many_warps_read = true;
    } else if (r.read < now()) {
        r.many_read = false;
    } else if (r.reader != self()) {
        r.many_read = true;
    }
    r.read = now();
    r.reader = static_cast<uint16_t>(self());
}

const char *check(Record &r, Access access, bool shared) {
    const char *wrong = nullptr;
    const bool writes = access != Access::kRead;
    const uint32_t since = shared ? block_began : launch_began;
    if (at_once(since, r.written, r.writer) && !(r.atomic && access == Access::kAtomic))
        wrong = writes ? "two threads write without a barrier between them"
                       : "a read of what another thread writes, without a barrier between them";
    if (r.pending && r.written >= since && access != Access::kAsyncEnd)
        wrong = "a cp.async has yet to write here: its wait is missing";
    if (!writes || access == Access::kAtomic) {
        if (shared && r.written < block_began) wrong = "a read of shared memory that nobody wrote";
        if (access == Access::kRead) note_read_by_self(since, r);
    }
    if (writes) {
        if (reads_at_once(since, r)) wrong = "a write to what another thread reads, without a barrier between them";
        r.written = now();
        r.writer = static_cast<uint16_t>(self());
        r.atomic = access == Access::kAtomic;
        r.pending = access == Access::kAsyncBegin;
    }
    return wrong;
}

void check_all(Record *records, size_t first, size_t bytes, Access access, bool shared, const char *name) {
    const char *wrong = nullptr;
    for (size_t i = first; i < first + bytes; ++i)
        if (const char *message = check(records[i], access, shared)) wrong = message;
    if (wrong) find("%s: byte %zu of %s", wrong, first, name);
}

} // namespace

void shadow_access(const void *where, size_t bytes, Access access) {
    if (machine.current == nullptr || bytes == 0 || on_a_stack(where)) return;
    const char *byte = static_cast<const char *>(where);
    const char *shared = machine.shared;
    if (byte >= shared - kGuard && byte < shared + machine.shared_bytes + kGuard) {
        const auto offset = byte - shared;
        if (offset < 0 || static_cast<size_t>(offset) + bytes > machine.shared_bytes)
            return find("%zu bytes at byte %td of shared memory, which has %zu", bytes, offset, machine.shared_bytes);
        return check_all(shared_records, static_cast<size_t>(offset), bytes, access, true, "shared memory");
    }
    if (Tensor *tensor = tensor_of(byte)) {
        const auto offset = static_cast<size_t>(byte - tensor->begin);
        if (byte + bytes > tensor->end)
            return find("%zu bytes at byte %zu of %s, beyond its end", bytes, offset, tensor->name.c_str());
        if (access != Access::kRead && !tensor->writable)
            return find("a write to byte %zu of %s, which is only read", offset, tensor->name.c_str());
        if (tensor->writable) check_all(tensor->records.data(), offset, bytes, access, false, tensor->name.c_str());
        return;
    }
    if (tensors.empty()) return; // nobody said what may be used
    if (library_begin == nullptr) dl_iterate_phdr(find_library, nullptr);
    if (byte >= library_begin && byte < library_end) return;
    find("%zu bytes of no tensor are %s", bytes, access == Access::kRead ? "read" : "written");
}

void shadow_begin_launch() { launch_began = ++clock; }

void shadow_begin_block() {
    block_began = ++clock;
    shadow_barrier();
}

void shadow_barrier() {
    last_barrier = ++clock;
    for (uint32_t &time : warp_time) time = clock;
}

void shadow_warp_barrier(int warp) { warp_time[warp] = ++clock; }

void shadow_tensor(const char *name, const void *data, size_t bytes, bool writable) {
    const char *begin = static_cast<const char *>(data);
    recent = nullptr;
    tensors.push_back({name, begin, begin + bytes, writable, std::vector<Record>(writable ? bytes : 0)});
}

void shadow_forget_tensors() {
    recent = nullptr;
    tensors.clear();
}

} // namespace emu

#else // other builds have other tools

namespace emu {
void shadow_access(const void *, size_t, Access) {}
void shadow_begin_launch() {}
void shadow_begin_block() {}
void shadow_barrier() {}
void shadow_warp_barrier(int) {}
void shadow_tensor(const char *, const void *, size_t, bool) {}
void shadow_forget_tensors() {}
} // namespace emu

#endif
