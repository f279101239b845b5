// Rows of weights as they are stored in model files: selects the header of the format WEIGHT, which holds all that is known of it.
//
// Constants from outside: WEIGHT (F32, F16, BF16, Q8_0, Q4_0 or Q4_K) and I, the columns of a row. A matrix is O rows of ROW_BYTES bytes,
// one after another, exactly as in the file (tinyvllm/quant/formats.py): nothing is repacked, so files are mapped without a copy.
// Alignment of the base address: F32, F16, BF16 and Q4_K 4 bytes, Q8_0 and Q4_0 2 bytes.
//
// A new format is one more header, one number in kernels/include/formats.h and one line below. A format header has no includes. It defines:
//
//   ROW_BYTES         bytes of a row
//   COLUMNS_DIVISOR   what I must be a multiple of
//   four_values(row, column)       the float32 values of four columns, column % 4 == 0 (embed.metal)
//
//   For products on SIMD lanes (product.h). A SIMD group goes through a row in steps of STEP columns, SUBS rounds a step:
//   STEP, SUBS
//   struct Raw, load_raw(row, step, lane)     a lane's share of a step, as it comes from memory
//   four_weights(raw, sub, second)            the first or second four weights of round `sub`
//   column_of(lane, sub, second)              the first column of these four, counted from the step's first
//
//   For products by tiles (tile_weights.h):
//   LANE_SHARES_IN_ORDER           1: column_of is lane * 8 + second * 4, and the general sixteen_at is used
//   sixteen_at(row, column)        otherwise: columns `column` to column + 15 of a row, column % 16 == 0
//
//   For products by simdgroup_matrix (operands.h says what these mean):
//   QUANTIZED, RUNS, HAS_MINIMUM, operand_number, operand_pair
//   if QUANTIZED: X_FACTOR, START, struct Slice, load_slice(row, column, quarter), operand_at(slice, run, i), scale_of(slice, run),
//                 minimum_of(slice, run), column_place(second_half, four, i)
//   otherwise:    plain_pair(raw, i), numbers 2 i and 2 i + 1 of a lane's eight
//
// Quants are masked where they are, and neither shifted down nor converted: or-ed into the mantissa of half 1024.0, a nibble is 1024 + q
// or 1024 + 16 q, exactly, and an fma with the block's scale (or a sixteenth of it) removes the rest, exactly as well: everything fits in
// 24 bits. Bytes of Q8_0 likewise. Factors that undo the position of a nibble are those of llama.cpp's and MLX's Metal kernels, which
// apply them to x; the trick with the mantissa is FasterTransformer's (Kim et al. 2022).
#pragma once
#include "gpu.h"

struct Sixteen {  // sixteen consecutive columns of a row
  float4 of[4];
};

// --- quants as halves

#define RAISE 1024.0f
#define LOW_NIBBLES 0x000F000Fu
#define HIGH_NIBBLES 0x00F000F0u
#define BYTES 0x00FF00FFu

// The bits under `mask`, for numbers 0 and 2 of a word, above 1024.0.
INLINE half2 raised(uint bits, uint mask) { return as_type<half2>((bits & mask) | 0x64006400u); }

// Bytes 0 .. 3 of a word, under a mask for bytes 0 and 2.
INLINE half4 four_raised(uint word, uint mask) {
  const half2 even = raised(word, mask), odd = raised(word >> 8, mask);
  return half4(even.x, odd.x, even.y, odd.y);
}

INLINE uint word_of(ushort low, ushort high) { return as_type<uint>(ushort2(low, high)); }

#if WEIGHT == F32
#include "formats/f32.h"
#elif WEIGHT == F16
#include "formats/f16.h"
#elif WEIGHT == BF16
#include "formats/bf16.h"
#elif WEIGHT == Q8_0
#include "formats/q8_0.h"
#elif WEIGHT == Q4_0
#include "formats/q4_0.h"
#elif WEIGHT == Q4_K
#include "formats/q4_k.h"
#else
#error "weights.h: WEIGHT must be F32, F16, BF16, Q8_0, Q4_0 or Q4_K"
#endif

static_assert((I) % COLUMNS_DIVISOR == 0, "weights: the columns must be a multiple of 32, of 256 for Q4_K");
