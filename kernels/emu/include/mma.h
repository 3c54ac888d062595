// mma.sync.m16n8k16 and ldmatrix, with the fragment layouts of the PTX manual ("Matrix fragments for mma.m16n8k16").
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulator.h"

namespace oasis {

inline float from_bits(__nv_bfloat16, uint32_t bits) { return __bfloat162float({static_cast<uint16_t>(bits)}); }
inline float from_bits(__half, uint32_t bits) { return __half2float({static_cast<uint16_t>(bits)}); }

// c += a b: a is 16 x 16, b is 16 x 8, c is 16 x 8 in float.
template <class T> void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    struct Operand {
        float *c;
        const uint32_t *a, *b;
    } mine{c, a, b};
    emu::meet(emu::kFullWarp, "mma", &mine, [](void *const operands[32]) [[gnu::no_sanitize("thread")]] {
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; ++lane) {
            const auto *from = static_cast<const Operand *>(operands[lane]);
            const int group = lane / 4, pair = 2 * (lane % 4);
            for (int i = 0; i < 4; ++i)
                for (int half = 0; half < 2; ++half)
                    left[group + (i & 1) * 8][pair + (i >> 1) * 8 + half] = from_bits(T{}, from->a[i] >> (16 * half));
            for (int i = 0; i < 2; ++i)
                for (int half = 0; half < 2; ++half) right[pair + i * 8 + half][group] = from_bits(T{}, from->b[i] >> (16 * half));
        }
        for (int lane = 0; lane < 32; ++lane) {
            auto *to = static_cast<Operand *>(operands[lane]);
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 4 + (i >> 1) * 8, column = 2 * (lane % 4) + (i & 1);
                float sum = to->c[i];
                for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
                to->c[i] = sum;
            }
        }
    });
}

template <bool kTransposed> void load_matrices(uint32_t (&result)[4], const void *row) {
    struct Operand {
        uint32_t *result;
        const uint16_t *row;
    } mine{result, static_cast<const uint16_t *>(row)};
    emu::note_read(row, 16);
    emu::meet(emu::kFullWarp, kTransposed ? "ldmatrix.trans" : "ldmatrix", &mine,
              [](void *const operands[32]) [[gnu::no_sanitize("thread")]] {
                  for (int lane = 0; lane < 32; ++lane)
                      for (int matrix = 0; matrix < 4; ++matrix) {
                          uint32_t halves[2];
                          for (int half = 0; half < 2; ++half) {
                              const int major = lane / 4, minor = 2 * (lane % 4) + half;
                              const int from = kTransposed ? minor : major, column = kTransposed ? major : minor;
                              halves[half] = static_cast<const Operand *>(operands[8 * matrix + from])->row[column];
                          }
                          static_cast<Operand *>(operands[lane])->result[matrix] = halves[0] | halves[1] << 16;
                      }
              });
}

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8. Lane i gets of each matrix the
// elements 2 (i % 4) and the one after it, of row i / 4.
inline void load_matrices_x4(uint32_t (&result)[4], const void *row) { load_matrices<false>(result, row); }
// The same of the transposed matrices.
inline void load_matrices_x4_transposed(uint32_t (&result)[4], const void *row) { load_matrices<true>(result, row); }

} // namespace oasis
