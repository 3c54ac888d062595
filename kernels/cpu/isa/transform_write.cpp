// Transform codes of sealed blocks: project the keys, compare with thresholds, pack into nibbles.
#include "blocks.h"
#include "declarations.h"
#include "threads.h"
#include "workspace.h"

#include <limits>

namespace oasis::OASIS_ISA {
namespace {

constexpr int kTokens = 4;      // projected at once
constexpr int kThresholds = 15; // of a component

class Writer {
  public:
    explicit Writer(const oasis_transform_write_args &a) : a_(a), wide_((a.components + kLanes - 1) / kLanes * kLanes) {
        Parts parts;
        const auto centred = parts.add<float>(kTokens * a.head_dim + kLanes);
        const auto thresholds = parts.add<float>(kThresholds * wide_);
        const auto codes = parts.add<int32_t>(kTokens * wide_);
        const auto packed = parts.add<uint8_t>(a.num_nibbles * a.block_size);
        parts.allocate();
        centred_ = parts.at<float>(centred);
        thresholds_ = parts.at<float>(thresholds);
        codes_ = parts.at<int32_t>(codes);
        packed_ = parts.at<uint8_t>(packed);
    }

    template <class T> void write(int64_t i) {
        std::fill_n(packed_, a_.num_nibbles * a_.block_size, uint8_t{0});
        for (int64_t h = 0; h < a_.kv_heads; ++h) {
            take_thresholds(h);
            for (int64_t t = 0; t < a_.block_size; t += kTokens) {
                const int64_t tokens = std::min<int64_t>(kTokens, a_.block_size - t);
                take_centred<T>(i, h, t, tokens);
                for (int64_t c = 0; c < a_.components; c += kLanes) take_codes(h, c);
                for (int64_t k = 0; k < tokens; ++k) pack(h, t + k, codes_ + k * wide_);
            }
        }
        const int64_t half = a_.block_size / 2;
        uint8_t *to = a_.codes + a_.pages[i] * a_.num_nibbles * half;
        for (int64_t m = 0; m < a_.num_nibbles; ++m)
            for (int64_t t = 0; t < half; ++t)
                to[m * half + t] = static_cast<uint8_t>(packed_[m * a_.block_size + t] | packed_[m * a_.block_size + half + t] << 4);
    }

  private:
    // One threshold of all components after the other, +inf where there is no component.
    void take_thresholds(int64_t h) {
        std::fill_n(thresholds_, kThresholds * wide_, std::numeric_limits<float>::infinity());
        for (int64_t c = 0; c < a_.components; ++c)
            for (int i = 0; i < kThresholds; ++i)
                thresholds_[i * wide_ + c] = a_.thresholds[(h * a_.components + c) * kThresholds + i];
    }

    template <class T> void take_centred(int64_t i, int64_t h, int64_t token, int64_t tokens) {
        const float *mean = a_.mean + h * a_.head_dim;
        for (int k = 0; k < kTokens; ++k) {
            const T *key = keys_of<T>(a_, i, h) + (token + std::min<int64_t>(k, tokens - 1)) * a_.keys_token_stride;
            for (int64_t d = 0; d < a_.head_dim; d += kLanes) {
                const int64_t left = std::min<int64_t>(kLanes, a_.head_dim - d);
                store_first(centred_ + k * a_.head_dim + d, load_first(key + d, left) - load_first(mean + d, left), left);
            }
        }
    }

    // Codes of kTokens tokens in kLanes components: the number of thresholds below.
    void take_codes(int64_t h, int64_t c) {
        F32 sums[kTokens] = {};
        const float *row = a_.encode + h * a_.head_dim * a_.components + c;
        const int64_t left = std::min<int64_t>(kLanes, a_.components - c);
        for (int64_t d = 0; d < a_.head_dim; ++d, row += a_.components) {
            const F32 weights = load_first(row, left);
            for (int k = 0; k < kTokens; ++k) sums[k] += weights * centred_[k * a_.head_dim + d];
        }
        for (int k = 0; k < kTokens; ++k) {
            const F32 component = sums[k] == sums[k] ? sums[k] : F32{};
            I32 code = {};
            for (int i = 0; i < kThresholds; ++i) code -= component > load(thresholds_ + i * wide_ + c);
            store(codes_ + k * wide_ + c, code);
        }
    }

    void pack(int64_t h, int64_t token, const int32_t *codes) {
        for (int64_t c = 0; c < a_.components; ++c) {
            const int64_t at = h * a_.components + c;
            packed_[a_.nibbles[at] * a_.block_size + token] |= static_cast<uint8_t>(codes[c] << a_.shifts[at]);
        }
    }

    const oasis_transform_write_args &a_;
    int64_t wide_;
    float *centred_, *thresholds_;
    int32_t *codes_;
    uint8_t *packed_;
};

} // namespace

void transform_write(const oasis_transform_write_args &a) {
    with_element(a.dtype, [&](auto element) {
        using T = decltype(element);
        parallel_for(a.count, a.num_threads, key_bytes<T>(a) * 4, [&](int64_t i) {
            if (a.pages[i] >= 0) Writer(a).template write<T>(i);
        });
    });
}

} // namespace oasis::OASIS_ISA
