// Two bits per key channel. Compiled without fused multiply-adds, so that a level is the one that the reference chooses.
#include "blocks.h"
#include "declarations.h"
#include "threads.h"
#include "workspace.h"

namespace oasis::OASIS_ISA {

constexpr float kTiny = 0x1p-24f; // as in reference_summaries.py

void bit2_write(const oasis_bit2_write_args &a) {
    with_element(a.dtype, [&](auto element) {
        using T = decltype(element);
        parallel_for(a.count, a.num_threads, key_bytes<T>(a), [&](int64_t i) {
            if (a.pages[i] < 0) return;
            Parts parts;
            const auto level_part = parts.add<int32_t>(a.head_dim + kLanes);
            parts.allocate();
            int32_t *levels = parts.at<int32_t>(level_part);
            const int64_t quarter = a.head_dim / 4;
            for (int64_t h = 0; h < a.kv_heads; ++h) {
                const T *keys = keys_of<T>(a, i, h);
                const float *bounds = a.bounds + (i * a.kv_heads + h) * 2 * a.head_dim;
                uint8_t *codes = a.codes + (a.pages[i] * a.kv_heads + h) * a.block_size * quarter;
                for (int64_t t = 0; t < a.block_size; ++t, keys += a.keys_token_stride, codes += quarter) {
                    for (int64_t d = 0; d < a.head_dim; d += kLanes) {
                        const int64_t left = std::min<int64_t>(kLanes, a.head_dim - d);
                        const F32 low = load_first(bounds + d, left), step = step_between(low, load_first(bounds + a.head_dim + d, left));
                        store(levels + d, rounded((load_first(keys + d, left) - low) / (step < kTiny ? broadcast(kTiny) : step), 3.0f));
                    }
                    for (int64_t d = 0; d < quarter; ++d)
                        codes[d] = static_cast<uint8_t>(levels[d] | levels[d + quarter] << 2 | levels[d + 2 * quarter] << 4 |
                                                        levels[d + 3 * quarter] << 6);
                }
            }
        });
    });
}

} // namespace oasis::OASIS_ISA
