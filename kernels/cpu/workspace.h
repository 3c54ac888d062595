// Memory that a thread keeps for its intermediate results.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oasis {

// At least `bytes`, aligned to 64, until the thread's next call. What it holds is unspecified.
char *workspace(size_t bytes);

// Hands out parts of the workspace. Sizes are added up first (measuring), then taken in the same order.
class Parts {
  public:
    template <class T> size_t add(size_t count) {
        const size_t at = bytes_;
        bytes_ += (count * sizeof(T) + 63) / 64 * 64;
        return at;
    }
    void allocate() { base_ = workspace(bytes_); }
    template <class T> T *at(size_t offset) const { return reinterpret_cast<T *>(base_ + offset); }

  private:
    size_t bytes_ = 0;
    char *base_ = nullptr;
};

} // namespace oasis
