// prepared = norm(x[row_index]), rounded and laid out as products of many rows read it; with neither norm nor gather, x itself
//
//   prepared   T / 8 groups of 8 tokens, I / 32 blocks of columns, 32 lanes; g = lane / 4 is the token of the group, t = lane % 4
//              BF16, F16   [T/8][I/32][32 lanes][16 bytes]: numbers 2t, 2t+1, 2t+8, 2t+9, 2t+16, 2t+17, 2t+24, 2t+25 of the block
//              Q8_0, Q4_0  [T/8][I/32][32 lanes][8 bytes]: int8 4t..4t+3, 4t+16..4t+19 of the block; behind all of these
//                          [T/8][I/32] of { float scale[8]; int sum[8] }, by token of the group
//              with CORES (BF16, F16 only)
//                          [T/8][I/32][4][8 tokens][16 bytes]: numbers 8i..8i+7 of the block are the token's in core matrix i (hopper.cuh)
//   x          [T, I] float32; [any, I] if GATHER
//   norm       [I] float32, if NORM: RMS norm with EPS
//   row_index  [T] int32, if GATHER: token t is row row_index[t] of x
//   rows       [1] int32     how many tokens there are, 0 to T
//
// Whole groups are written: tokens from rows[0] on are zeros. Groups wholly behind rows[0] stay as they are. WEIGHT is the format of the
// weights that the tokens will meet, and says how they are rounded (product.cuh). T % 8 == 0, I % 32 == 0.
//
// A block of 256 threads makes one token: thread j is virtual lane j of the norm (norm.cuh). Grid (T, 1, 1), no dynamic shared memory.
// A token's share of a block of columns is whole sectors of memory (64 or 32 bytes), so nothing is gained by more tokens a block, and of
// the few tokens of a short prompt each gets its multiprocessor. What the norm has read, the rounding finds in the first-level cache.
#include "norm.cuh"
#include "product.cuh"

#ifndef CORES
#define CORES 0
#endif

constexpr int THREADS = 256, BLOCKS = I / STEP, CELLS = BLOCKS * 4;
constexpr int ROUNDS = (CELLS + THREADS - 1) / THREADS;
static_assert(T % 8 == 0 && I % STEP == 0, "sizes");
static_assert(!CORES || !quantised(WEIGHT), "core matrices are of 16-bit numbers");

struct Row {
  const float *x, *norm;
  float inverse;
};

// The eight numbers of a cell: eight in a row for core matrices, otherwise those of a lane.
DEVICE void read_eight(float (&v)[8], const float *row, int cell) {
#if CORES
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = *(const float4 *)(row + cell * 8 + i);
    v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
  }
#else
  read_cell<WEIGHT>(v, row + cell / 4 * STEP, cell % 4);
#endif
}

DEVICE void normed_cell(float (&v)[8], const Row &row, int cell) {
  read_eight(v, row.x, cell);
#if NORM
  float weight[8];
  read_eight(weight, row.norm, cell);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = normed(v[i], row.inverse, weight[i]);
#endif
}

// Cell `cell` of `token` to its place in the prepared rows.
template <int FORMAT> DEVICE void write_16_bits(u8 *prepared, const float (&v)[8], int token, int cell) {
  const int place = CORES ? cell % 4 * 8 + token % 8 : token % 8 * 4 + cell % 4;
  ((uint4 *)prepared)[((u64)(token / 8) * BLOCKS + cell / 4) * 32 + place] = round_cell<FORMAT>(v);
}
// Every lane of the warp must come along; `mine` says whether the cell is one of the row's.
DEVICE void write_quants(u8 *prepared, const float (&v)[8], int token, int cell, bool mine) {
  float scale;
  int sum;
  const uint2 q = quantise_cell(v, scale, sum);
  if (!mine) return;
  const u64 block = (u64)(token / 8) * BLOCKS + cell / 4;
  ((uint2 *)prepared)[block * 32 + token % 8 * 4 + cell % 4] = q;
  if (cell % 4) return;
  u8 *scales = prepared + (u64)(T / 8) * BLOCKS * 256 + block * 64 + token % 8 * 4;
  *(float *)scales = scale;
  *(int *)(scales + 32) = sum;
}

DEVICE float inverse_of(const float *x, int thread) {
  static __shared__ float sums[NORM_WARPS];
  const float sum = square_sum(x, I, thread / 32, thread % 32);
  if (thread % 32 == 0) sums[thread / 32] = sum;
  __syncthreads();
  return inverse_root(sums, I, EPS);
}

// Zeros where `there` is false.
template <int FORMAT> DEVICE void write_row(u8 *prepared, const Row &row, int token, int thread, bool there) {
#pragma unroll 4
  for (int round = 0; round < ROUNDS; round++) {
    const int cell = round * THREADS + thread;
    const bool mine = CELLS % THREADS == 0 || cell < CELLS;
    float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (mine && there) normed_cell(v, row, cell);
    if constexpr (quantised(FORMAT)) write_quants(prepared, v, token, cell, mine);
    else if (mine) write_16_bits<FORMAT>(prepared, v, token, cell);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_input(
    u8 *prepared, const float *x,
#if NORM
    const float *norm,
#endif
#if GATHER
    const int *row_index,
#endif
    const int *rows) {
  const int token = blockIdx.x, thread = threadIdx.x, count = rows[0];
  if (token / 8 * 8 >= count) return;
  const bool there = token < count;
  Row row = {x + (u64)token * I, nullptr, 1.0f};
#if GATHER
  if (there) row.x = x + (u64)row_index[token] * I;
#endif
#if NORM
  row.norm = norm;
  if (there) row.inverse = inverse_of(row.x, thread);
#endif
  write_row<WEIGHT>(prepared, row, token, thread, there);
}
