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
// |x w| have been measured, as if x were rounded to 14 bits; and x from 2^117 on overflows. F16 is its own operand; BF16 and F32 are float
// operands.
#pragma once
#include "product.h"

#define SLICE (32 * RUNS)
typedef simdgroup_matrix<operand_number, 8, 8> Operand;

// Of a format header: a lane's part of a slice as it comes from memory (Slice, load_slice), its two numbers of operand `i` of 4 of a run
// (operand_at), the run's scale and minimum, and the place of column 16 * second_half + 4 * four + i of 32 among the columns of a run's
// operands (column_place). The formats that are not quantized share this:
#if !QUANTIZED
#define X_FACTOR(second_half) 1.0f
#define START(second_half) -RAISE
struct Slice {  // eight numbers; operand i has the lane's numbers 2 i and 2 i + 1
  Raw raw;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  Slice slice;
  slice.raw = load_raw(row, 0, column / 8 + quarter);
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int, int i) { return plain_pair(slice.raw, i); }
INLINE int column_place(int second_half, int four, int i) { return four % 2 * 16 + 2 * (2 * second_half + four / 2) + i / 2 * 8 + i % 2; }
#endif
