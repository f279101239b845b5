// prepared = norm(x[row_index]), rounded and laid out as products of many rows read it; without norm and gather, x itself
//
//   prepared   T / 8 groups of 8 tokens, I / 32 blocks of columns, 32 lanes; g = lane / 4 is the token of the group, t = lane % 4
//              BF16, F16   [T/8][I/32][32 lanes][16 bytes]: numbers 2t, 2t+1, 2t+8, 2t+9, 2t+16, 2t+17, 2t+24, 2t+25 of the block
//              Q8_0, Q4_0  [T/8][I/32][32 lanes][8 bytes]: int8 4t..4t+3, 4t+16..4t+19 of the block; after all of these
//                          [T/8][I/32] of { float scale[8]; int sum[8] }, by token of the group
//   x          [T, I] float32; [any, I] if GATHER
//   norm       [I] float32, if NORM: RMS norm with EPS
//   row_index  [T] int32, if GATHER: token t is row row_index[t] / SHARE of x, or zeros if that is negative; SHARE is 1 if not defined
//   rows       [1] int32     number of tokens, 0 to T
//
// Whole groups are written: tokens from rows[0] on are zeros. Groups that start at or after rows[0] are not touched. WEIGHT is the format
// of the weights that the tokens will be multiplied with, and determines how they are rounded (weights.cuh). T % 8 == 0, I % 32 == 0. The
// text does not depend on T, which is the size of the grid.
//
// Launch: grid (T, 1, 1), 256 threads, no dynamic shared memory. Unit of work: a thread block has one token; thread j is virtual lane j of
// the norm (norm.cuh). A token's share of a block of columns is whole sectors of memory (64 or 32 bytes), so more tokens a block would gain
// nothing, and each of the few tokens of a short prompt gets its own multiprocessor. What the norm has read, the rounding finds in the
// first-level cache.
#include "input_rows.cuh"
#include "norm.cuh"
#include "product.cuh"

#ifndef SHARE
#define SHARE 1
#endif

constexpr int THREADS = 256, BLOCKS = I / STEP, CELLS = BLOCKS * 4;
constexpr int ROUNDS = (CELLS + THREADS - 1) / THREADS;
static_assert(I % STEP == 0, "quantize_input: I must be a multiple of 32");

struct Row {
  const float *x, *norm;
  float inverse;
};

DEVICE float row_inverse(const float *x, int thread);
DEVICE void write_row(u8 *prepared, const Row &row, int token, int thread, bool valid);

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_input(u8 *prepared, const float *x, NORM_ARGUMENT INDEX_ARGUMENT const int *rows) {
  await_previous();
  const int token = blockIdx.x, thread = threadIdx.x, count = rows[0];
  if (token / 8 * 8 >= count) return;
#if GATHER
  const int from = token < count ? row_index[token] : -1;
  const bool valid = from >= 0;
  Row row = {x + (valid ? (u64)(from / SHARE) * I : 0), nullptr, 1.0f};
#else
  const bool valid = token < count;
  Row row = {x + (u64)token * I, nullptr, 1.0f};
#endif
#if NORM
  row.norm = norm;
  if (valid) row.inverse = row_inverse(row.x, thread);
#endif
  write_row(prepared, row, token, thread, valid);
}

DEVICE float row_inverse(const float *x, int thread) {
  static __shared__ float sums[NORM_WARPS];
  const float sum = square_sum(x, I, thread / 32, thread % 32);
  if (thread % 32 == 0) sums[thread / 32] = sum;
  __syncthreads();
  return inverse_root(sums, I, EPS);
}

DEVICE void normed_cell(float (&v)[8], const Row &row, int cell) {
  read_cell(v, row.x + cell / 4 * STEP, cell % 4);
#if NORM
  float weight[8];
  read_cell(weight, row.norm + cell / 4 * STEP, cell % 4);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = normed(v[i], row.inverse, weight[i]);
#endif
}

// Stores a cell of a token. Called by whole warps; `valid` in the lanes that have a cell.
DEVICE void write_cell(u8 *prepared, const float (&v)[8], int token, int cell, bool valid) {
  const u64 block = (u64)(token / 8) * BLOCKS + cell / 4;
#if SCALED_X
  float scale;
  int sum;
  const XCell q = quantize_cell(v, scale, sum);
  if (!valid) return;
  ((XCell *)prepared)[block * 32 + token % 8 * 4 + cell % 4] = q;
  if (cell % 4) return;
  u8 *scales = prepared + (u64)(gridDim.x / 8) * BLOCKS * (32 * sizeof(XCell)) + block * 64 + token % 8 * 4;
  *(float *)scales = scale;
  *(int *)(scales + 32) = sum;
#else
  if (valid) ((XCell *)prepared)[block * 32 + token % 8 * 4 + cell % 4] = round_cell(v);
#endif
}

// Writes zeros if not `valid`. AT_ONCE cells are read before they are written: after a write the compiler must wait before it reads.
DEVICE void write_row(u8 *prepared, const Row &row, int token, int thread, bool valid) {
  constexpr int AT_ONCE = ROUNDS < 4 ? ROUNDS : 4;
  for (int first = 0; first < ROUNDS; first += AT_ONCE) {
    float v[AT_ONCE][8] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int cell = (first + i) * THREADS + thread;
      if (valid && cell < CELLS) normed_cell(v[i], row, cell);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i >= ROUNDS) break;
      const int cell = (first + i) * THREADS + thread;
      write_cell(prepared, v[i], token, cell, cell < CELLS);
    }
  }
}
