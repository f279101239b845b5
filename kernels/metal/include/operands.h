// Rows of weights, as stored in files, as operands of simdgroup_matrix that need no threadgroup memory.
//
// Constants as for product.h. A slice is 32 columns of eight rows (Q4_K: 64, two runs of 32): the four lanes that hold a row of a matrix
// (gpu.h: matrix_row) share the row's columns; each has a quarter of them, `quarter` = matrix_column(lane) / 2, consecutive in the file. A
// run is four operands of eight rows by eight columns, of which a lane holds two columns. The columns are arranged so that a lane's bits
// are masked where they are (column_place): a product does not depend on the order of its columns, if x has the same order.
//
// Operands of quantized formats are half: a quant or-ed into the mantissa of 1024.0 (weights.h), exact, with neither scale nor offset:
//
//     operand           RAISE + q (Q8_0: q + 128), in Q4_0's and Q4_K's high nibbles RAISE + 16 q
//     sum over a run    scale * (operands . x' + start), start = what RAISE and the format's own offset added in excess, over all x'
//
// so a weight costs a mask and an or for two, a shift for four; scale and start are applied once a run, to the sums. x' is x times
// X_FACTOR, a power of two; start is START times the sum of x. Subtracting what RAISE adds costs accuracy: up to 4 * 10^-5 of the sums of
// |x w| have been measured, as if x were rounded to 14 bits; and x from 2^117 on overflows. F16 is its own operand; weights of all other
// formats become float32 operands, exactly.
#pragma once
#include "product.h"

// Of a format header: a lane's part of a slice as it comes from memory (Slice, load_slice), its two numbers of operand `i` of 4 of a run
// (operand_at), the run's scale and minimum, and the place of column 16 * second_half + 4 * four + i of 32 among the columns of a run's
// operands (column_place). The formats that are not quantized operands share this:
#ifndef QUANTIZED
#define QUANTIZED 0
#define RUNS 1
#define HAS_MINIMUM 0
#define X_FACTOR(second_half) 1.0f
#define START(second_half) -RAISE
#ifndef OPERAND
#define OPERAND float
#define OPERAND_PAIR float2
#endif
typedef OPERAND operand_number;
typedef OPERAND_PAIR operand_pair;

struct Slice {  // eight columns: operand i has columns 2 i and 2 i + 1 of them
  Raw raw;
  int plane;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  const Place place = place_of(column + 8 * quarter);
  Slice slice;
  slice.raw = load_raw(row, 0, place.lane), slice.plane = place.plane;
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int, int i) {
  const float4 four = four_weights(slice.raw, slice.plane, i / 2);
  operand_pair pair;
  pair.x = (operand_number)(i & 1 ? four.z : four.x), pair.y = (operand_number)(i & 1 ? four.w : four.y);
  return pair;
}
INLINE int column_place(int second_half, int four, int i) { return four % 2 * 16 + 2 * (2 * second_half + four / 2) + i / 2 * 8 + i % 2; }
#endif

#define SLICE (32 * RUNS)
typedef simdgroup_matrix<operand_number, 8, 8> Operand;
