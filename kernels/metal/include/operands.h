// Rows of weights, as they lie in files, as operands of simdgroup_matrix that no threadgroup memory is needed for.
//
// Constants as for product.h. A slice is 32 columns of eight rows (Q4_K: 64, two runs of 32): the four lanes that have a row of a matrix
// (gpu.h: matrix_row) share the row's columns, `quarter` = matrix_column(lane) / 2 of them each, next to each other in the file. A run is
// four operands of eight rows by eight columns, of which a lane holds two columns; which columns these are is arranged so that a lane's
// bits are masked where they lie (place_of): a product does not mind the order of its columns, if x has the same.
//
// Operands of the formats in blocks are half: a quant or-ed into the mantissa of 1024.0 (product.h), exact, with neither scale nor offset:
//
//     operand           RAISE + q (Q8_0: q + 128), in Q4_0's and Q4_K's high halves RAISE + 16 q
//     sum over a run    scale * (operands . x' + start), start = what RAISE and the format's own offset made too much, of all x'
//
// so that a weight costs a mask and an or for two, a shift for four, and scale and start are met once a run by the sums instead. Q4_0's
// high halves are of the same block as its low ones, so x' has their columns divided by 16 (X_FACTOR), exactly. Taking off what RAISE adds
// costs accuracy: up to 4 * 10^-5 of the sums of |x w| have been seen, as if x were rounded to 14 bits; and x from 2^117 on overflows.
// F16 is its own operand; BF16 and F32 are float operands.
#pragma once
#include "product.h"

#define SCALED (WEIGHT == Q8_0 || WEIGHT == Q4_0 || WEIGHT == Q4_K)
#define RUNS (WEIGHT == Q4_K ? 2 : 1)
#define SLICE (32 * RUNS)
#define RAISE 1024.0f

#if SCALED || WEIGHT == F16
typedef half operand_number;
typedef half2 operand_pair;
#else
typedef float operand_number;
typedef float2 operand_pair;
#endif
typedef simdgroup_matrix<operand_number, 8, 8> Operand;

#if WEIGHT == Q4_0
#define X_FACTOR(second_half) ((second_half) ? 0.0625f : 1.0f)
#define START(second_half) ((second_half) ? -72.0f : -1032.0f) // 1024 / 16 + 8, 1024 + 8: of x itself
#elif WEIGHT == Q8_0
#define X_FACTOR(second_half) 1.0f
#define START(second_half) -1152.0f
#else
#define X_FACTOR(second_half) 1.0f
#define START(second_half) -RAISE
#endif

// --- a lane's part of a slice as it comes from memory, and its two numbers of operand `i` of 4 of a run

#if WEIGHT == Q4_0 // four bytes of a block's sixteen
struct Slice {
  uint word;
  half scale;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  device const uchar *block = row + column / 32 * 18;
  const ushort2 quants = ushort2(*(device const packed_ushort2 *)(block + 2 + 4 * quarter));
  Slice slice;
  slice.word = word_of(quants.x, quants.y), slice.scale = *(device const half *)block;
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int, int i) {
  return raised(i & 1 ? slice.word >> 8 : slice.word, i < 2 ? LOW_NIBBLES : HIGH_NIBBLES);
}
INLINE float scale_of(thread const Slice &slice, int) { return (float)slice.scale; }
INLINE float least_of(thread const Slice &, int) { return 0.0f; }

#elif WEIGHT == Q4_K // eight of the 32 bytes that two runs share
struct Slice {
  uint words[2];
  Runs runs;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  device const uchar *block = row + column / 256 * 144;
  const int g = column % 256 / 64;
  const uint2 words = uint2(*(device const packed_uint2 *)(block + 16 + 32 * g + 8 * quarter));
  Slice slice;
  slice.words[0] = words.x, slice.words[1] = words.y;
  slice.runs = runs_of(uint4(*(device const packed_uint4 *)block), g);
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int run, int i) {
  return raised(i & 1 ? slice.words[i / 2] >> 8 : slice.words[i / 2], run ? HIGH_NIBBLES : LOW_NIBBLES);
}
INLINE float scale_of(thread const Slice &slice, int run) { return run ? slice.runs.scale[1] * 0.0625f : slice.runs.scale[0]; }
INLINE float least_of(thread const Slice &slice, int run) { return slice.runs.least[run]; }

#elif WEIGHT == Q8_0 // eight bytes of a block's 32; with its sign's bit turned, a byte is q + 128
struct Slice {
  uint words[2];
  half scale;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  const Raw raw = load_raw(row, 0, column / 8 + quarter);
  Slice slice;
  slice.words[0] = raw.words[0] ^ 0x80808080u, slice.words[1] = raw.words[1] ^ 0x80808080u, slice.scale = raw.scale;
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int, int i) {
  return raised(i & 1 ? slice.words[i / 2] >> 8 : slice.words[i / 2], BYTES);
}
INLINE float scale_of(thread const Slice &slice, int) { return (float)slice.scale; }
INLINE float least_of(thread const Slice &, int) { return 0.0f; }

#else // eight numbers; operand i has the lane's numbers 2 i and 2 i + 1
struct Slice {
  Raw raw;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  Slice slice;
  slice.raw = load_raw(row, 0, column / 8 + quarter);
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int, int i) {
#if WEIGHT == F32
  const float4 four = slice.raw.fours[i / 2];
  return i & 1 ? float2(four.z, four.w) : float2(four.x, four.y);
#elif WEIGHT == F16
  return as_type<half2>(slice.raw.words[i]);
#else
  return bf16_pair_to_float(slice.raw.words[i]);
#endif
}
#endif

// --- where column 16 * second_half + 4 * four + i of 32 stands among the columns of a run's operands

INLINE int place_of(int second_half, int four, int i) {
#if WEIGHT == Q4_0
  return 16 * second_half + 2 * four + i / 2 + i % 2 * 8;
#elif SCALED
  return four % 2 * 16 + 2 * (2 * second_half + four / 2) + i / 2 + i % 2 * 8;
#else
  return four % 2 * 16 + 2 * (2 * second_half + four / 2) + i / 2 * 8 + i % 2;
#endif
}
