// Rows of weights as they are stored in model files: selects the header of the format WEIGHT, which holds all that is known of it.
//
// Constants from outside: WEIGHT (kernels/include/formats.h) and I, the columns of a row. A matrix is O rows of ROW_BYTES bytes, one after
// another, exactly as in the file (tinyvllm/quant/formats.py): nothing is repacked, so files are mapped without a copy. The base address is
// a multiple of 4, or of the largest power of two in the format's block if that is less: 2 for a block of 18 or 210 bytes, 1 for 17. No load
// may assume more.
//
// A new format is one more header and one line below. A format header has no includes. It defines:
//
//   BLOCK, BLOCK_BYTES   weights of a block, and its bytes in a file; for floats 1 and the bytes of a number
//   PLANES, RUN          which columns a lane has. RUN bytes of quants in a row hold PLANES planes of RUN columns: byte b has column b of
//                        each plane. A lane has eight of these bytes, one after another, its share: eight columns of each plane. Lanes of
//                        a SIMD group have bytes that follow one another, so that their loads are one stretch of memory. (Floats: one
//                        plane, whose eight columns are more bytes. float_table.h: a byte has neighbouring columns.)
//   struct Raw, load_raw(row, step, lane)     a lane's share of a step, as it comes from memory, its scales taken out of the block
//   four_weights(raw, plane, four)            float32 values of the first or second four columns of a plane of the share
//
// One of e4m3 numbers defines BLOCK, HEAD_BYTES and head_scale instead (e4m3_blocks.h).
//
// That is enough for every kernel. Formats may define what is faster than the general code:
//
//   OWN_SIXTEEN 1, sixteen_at(row, column)    columns `column` to column + 15 of a row, column % 16 == 0 (tile_weights.h)
//   OPERAND, OPERAND_PAIR                     type of the operands of simdgroup_matrix, if not float (operands.h)
//   QUANTIZED 1, RUNS, HAS_MINIMUM, operand_number, operand_pair, X_FACTOR, START, struct Slice, load_slice, operand_at, scale_of,
//   minimum_of, column_place                  operands of quants (operands.h)
//
// Quants are masked where they are, and neither shifted down nor converted: or-ed into the mantissa of half 1024.0, a nibble is 1024 + q
// or 1024 + 16 q, exactly, and an fma with the block's scale (or a sixteenth of it) removes the rest, exactly as well: everything fits in
// 24 bits. Where a minimum or an offset is added, 1024 is subtracted first, so that the sum is rounded once. Factors that undo the position
// of a nibble are those of llama.cpp's and MLX's Metal kernels, which apply them to x; the trick with the mantissa is FasterTransformer's
// (Kim et al. 2022). There is no branch and no load of a single quant, and values of IQ4_NL are computed (four_values_iq4): only those of
// float_table.h are in memory.
#pragma once
#include "e4m3.h"
#include "gpu.h"

struct Sixteen {  // sixteen consecutive columns of a row
  float4 of[4];
};

// --- words of a row, by what their address is a multiple of

INLINE uint word_of(ushort low, ushort high) { return as_type<uint>(ushort2(low, high)); }
INLINE uint word_at_2(device const uchar *at) {
  const ushort2 both = ushort2(*(device const packed_ushort2 *)at);
  return word_of(both.x, both.y);
}
INLINE uint2 words_at_1(device const uchar *at) {
  device const packed_uchar4 *fours = (device const packed_uchar4 *)at;
  return uint2(as_type<uint>(uchar4(fours[0])), as_type<uint>(uchar4(fours[1])));
}
INLINE uint2 words_at_2(device const uchar *at) {
  const ushort4 all = ushort4(*(device const packed_ushort4 *)at);
  return uint2(word_of(all.x, all.y), word_of(all.z, all.w));
}
INLINE uint2 words_at_4(device const uchar *at) { return uint2(*(device const packed_uint2 *)at); }
INLINE float half_at(device const uchar *at) { return (float)*(device const half *)at; }

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

// 2^-bits
INLINE float power_below(int bits) { return as_type<float>((uint)(127 - bits) << 23); }

// Of the four bytes of a word: scale * (q - zero), and scale * q + offset, where q is the byte, or the `bits` bits from bit `shift` on.
INLINE float4 scaled_bytes(uint word, float scale, float zero) {
  return fma(float4(four_raised(word, BYTES)), float4(scale), float4(scale * -(RAISE + zero)));
}
INLINE float4 shifted_bytes(uint word, float scale, float offset) {
  return fma(float4(four_raised(word, BYTES) - half4(1024.0h)), float4(scale), float4(offset));
}
INLINE float4 scaled_bits(uint word, int bits, int shift, float scale, float zero) {
  const float below = power_below(shift);
  const half4 q = four_raised(word, ((1u << bits) - 1u) * 0x00010001u << shift);
  return fma(float4(q), float4(scale * below), float4(scale * -(RAISE * below + zero)));
}
INLINE float4 shifted_bits(uint word, int bits, int shift, float scale, float offset) {
  const half4 q = four_raised(word, ((1u << bits) - 1u) * 0x00010001u << shift) - half4(1024.0h);
  return fma(float4(q), float4(scale * power_below(shift)), float4(offset));
}

// Nibbles of a word's plane, 0 or 1, as bytes.
INLINE uint nibbles(uint word, int plane) { return word >> 4 * plane & 0x0F0F0F0Fu; }
// Bits 0 .. 3 of `bits` as bit 4 of bytes 0 .. 3.
INLINE uint fifth_bits(uint bits) { return (bits & 15u) * 0x02040810u & 0x10101010u; }

// The values that the four nibbles of a plane have in IQ4_NL and IQ4_XS (IQ4_VALUES - 128 of formats.h): -127 .. 113. They are what a
// polynomial of q - 8 rounds to; it is at most 0.433 from each of them. Four fma and a rounding cost less than a look-up: sixteen numbers
// are too many for selects, and a table in threadgroup memory serves one SIMD group of a core at a time.
INLINE float4 four_values_iq4(uint word, int plane) {
  const half4 q = four_raised(word, plane ? HIGH_NIBBLES : LOW_NIBBLES) - half4(plane ? 1152.0h : 1032.0h);  // q - 8, or 16 (q - 8)
  const float f = plane ? 0.0625f : 1.0f;
  const float4 x = float4(q);
  float4 y = fma(float4(1.58604282e-3f * f * f * f * f), x, float4(8.18398097e-2f * f * f * f));
  y = fma(y, x, float4(-1.68120539e-2f * f * f));
  y = fma(y, x, float4(11.4398097f * f));
  return rint(fma(y, x, float4(1.43298969f)));
}

// --- small floats: bits put where a half has them, and the difference of the exponents' biases as a factor

INLINE half2 two_fp4(uint bits) { return as_type<half2>((bits & 0x00070007u) << 9 | (bits & 0x00080008u) << 12) * half2(32768.0h); }
// Twice the floats of a sign, two bits of exponent and one of mantissa in the four nibbles of a plane. Subnormal ones are subnormal halves.
INLINE float4 four_fp4(uint word, int plane) {
  const half2 even = two_fp4(word >> 4 * plane), odd = two_fp4(word >> 4 * plane >> 8);
  return float4(half4(even.x, odd.x, even.y, odd.y));
}

// --- places of blocks

#define BLOCK_LANES (BLOCK / (8 * PLANES))  // lanes that share a block
#define BLOCK_OF(row, step, lane) ((row) + ((step) * (LANES / BLOCK_LANES) + (lane) / BLOCK_LANES) * BLOCK_BYTES)

#include "six_bits.h"

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
#elif WEIGHT == Q5_0
#include "formats/q5_0.h"
#elif WEIGHT == Q4_1
#include "formats/q4_1.h"
#elif WEIGHT == Q5_1
#include "formats/q5_1.h"
#elif WEIGHT == Q2_K
#include "formats/q2_k.h"
#elif WEIGHT == Q3_K
#include "formats/q3_k.h"
#elif WEIGHT == Q4_K
#include "formats/q4_k.h"
#elif WEIGHT == Q5_K
#include "formats/q5_k.h"
#elif WEIGHT == Q6_K
#include "formats/q6_k.h"
#elif WEIGHT == IQ4_NL
#include "formats/iq4_nl.h"
#elif WEIGHT == IQ4_XS
#include "formats/iq4_xs.h"
#elif WEIGHT == MXFP4
#include "formats/mxfp4.h"
#elif WEIGHT == FP8_G128
#include "formats/fp8_g128.h"
#elif WEIGHT == MXFP8
#include "formats/mxfp8.h"
#elif WEIGHT == NVFP4_G128
#include "formats/nvfp4_g128.h"
#elif WEIGHT == NF4 || WEIGHT == BNB_FP4
#include "formats/float_table.h"
#elif WEIGHT >= INT2_G32 && WEIGHT <= INT8_G128
#include "formats/grouped.h"
#else
#error "weights.h: no kernels for this WEIGHT in rows"
#endif
#include "e4m3_blocks.h"

#ifndef OWN_SIXTEEN
#define OWN_SIXTEEN 0
#endif
#define ROW_BYTES ((I) / BLOCK * BLOCK_BYTES)
static_assert((I) % 32 == 0 && (I) % BLOCK == 0, "weights: the columns must be a multiple of 32 and of the format's block");
static_assert(RUN % 8 == 0, "weights: a run must be a whole number of shares");

// --- columns and lanes

// A SIMD group goes through a row in steps of STEP columns, a lane in SUBS rounds of eight columns, twice four consecutive ones.
#define STEP (8 * LANES * PLANES)
#define SUBS PLANES

// The first column of the first or second four of a round, counted from the step's first.
INLINE int column_of(int lane, int sub, int second) {
  return lane / (RUN / 8) * (PLANES * RUN) + sub * RUN + lane % (RUN / 8) * 8 + second * 4;
}

// Where a column is: the plane of the share of `lane`, counted from the row's first.
struct Place {
  int lane, plane;
};
INLINE Place place_of(int column) {
  Place place;
  place.lane = column / (PLANES * RUN) * (RUN / 8) + column % RUN / 8;
  place.plane = column % (PLANES * RUN) / RUN;
  return place;
}
// Columns `column` to column + 3 of a row, column % 4 == 0.
INLINE float4 four_values(device const uchar *row, int column) {
  const Place place = place_of(column);
  const Raw raw = load_raw(row, 0, place.lane);
  return four_weights(raw, place.plane, column % 8 / 4);
}
