// out = activation(norm(x) . weight^T + bias) + residual, or silu(gate) * up, for many rows
//
// GATED: the product is up, and gate is in out: silu(out) * (norm(x) . weight^T + bias), for gate and up in two formats.
//
//   out        [T, O] float32      does not alias x or residual
//   x          [T, I] float32; [any, I] if GATHER
//   norm       [I] float32, if NORM: weights of the RMS norm; EPS inside the root
//   row_index  [T] int32, if GATHER: token t is row row_index[t] of x
//   weight     [O, I] as stored in a file, in a format of weights.h; with SILU two such, gate's and up's;
//              with MATRICES = 3 three, of outputs 0 .. O1 - 1, O1 .. O2 - 1 and O2 .. O - 1, such as those of q, k and v
//   bias       [O] float32, if BIAS; with SILU two such. Not with three matrices. With BIAS_PITCH they are one array with that many numbers
//              of each row, of gate before those of up (lora_bias.metal)
//   residual   [T, O] float32, if RESIDUAL; not with SILU
//   rows       [1] int32           number of valid rows, 0 to T; the rows of out from there on are not written
//
// I is a multiple of 32 and of the format's blocks, any O, any T. ACTIVATION: NO_ACTIVATION or GELU.
//
// x and weights are float32, exact, and so are the 8 x 8 matrices that the SIMD groups multiply (simdgroup_matrix): one sum an output,
// columns ascending by eights; then, if NORM, times the inverse root (norm.h), + bias, activation, + residual. A row's bits do not depend
// on the other rows, but are not those of matvec.metal: the order within eight columns is the GPU's own.
//
// A threadgroup of four SIMD groups computes TILE_T (32 or 64) tokens by 64 rows of weights; with SILU these are 32 of gate and 32 of up.
// Both go through threadgroup memory, 32 columns at a time, unpacked on the way; the next ones are loaded into registers meanwhile. Rows
// are PITCH floats apart, so that eight of them are in different banks. Rows of x from the count on are read as the last valid row.
//     grid (ceil(T / TILE_T), ceil(O / (SILU ? 32 : 64)), 1), 128 threads; tokens run fastest, so that weights are read once
// Threadgroup memory: (TILE_T + 64) * 144 + 4 * TILE_T bytes. The pipeline is that of MLX's and llama.cpp's Metal products.
#include "matrices.h"
#include "tile_weights.h"

#define TILE_O 64
#define COLUMNS 32
#define PITCH 36                              // floats from row to row of a tile
#define OUT_PITCH 68                          // floats from row to row of results
#define FRAGMENTS_T (TILE_T / 16)             // matrices of a SIMD group: tokens
#define FRAGMENTS_O (TILE_O / 16)             // and outputs
#define X_FOURS (TILE_T * COLUMNS / 4 / 128)  // float4s of x that a thread loads for a tile
#define OUTPUTS (SILU ? TILE_O / 2 : TILE_O)
static_assert(TILE_T == 32 || TILE_T == 64, "matmul: TILE_T must be 32 or 64");

struct Source {  // what a thread loads for each tile: its part of a row of x and of a row of weights
  device const float *x, *norm;
  device const uchar *weight;
  int x_column, weight_column;  // within 32
};

INLINE float sum_columns(threadgroup float *tile, Source from, int thread_index, int simd);
INLINE void write_inverse(threadgroup float *inverses, float squares, int thread_index);

[[max_total_threads_per_threadgroup(128)]] kernel void matmul(
    device float *out, device const float *x,
    NORM_ARGUMENT INDEX_ARGUMENT WEIGHT_ARGUMENTS BIAS_ARGUMENTS RESIDUAL_ARGUMENT device const int *rows,
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  // x [TILE_T][PITCH], weights [TILE_O][PITCH]; then results [TILE_T][OUT_PITCH]
  threadgroup float4 memory[(TILE_T + TILE_O) * PITCH / 4];
  threadgroup float inverses[TILE_T];
  static_assert((TILE_T + TILE_O) * PITCH >= TILE_T * OUT_PITCH, "matmul: results do not fit");
  threadgroup float *tile = (threadgroup float *)memory;
  const int count = rows[0], first_token = group.x * TILE_T, first_output = group.y * OUTPUTS, thread_index = index;
  if (first_token >= count) return;

  Source from;
  const int token = min(first_token + thread_index * X_FOURS / 8, count - 1);
  const int output = min(first_output + thread_index / 2 % OUTPUTS, O - 1);
  from.x = x + (ulong)ROW_OF(token) * I, from.norm = NORM_POINTER;
  Matrices matrices;
  SET_WEIGHTS(matrices);
  from.weight = weight_row(matrices, output, thread_index / 2 >= OUTPUTS);  // threads of the tile's second half load rows of up
  from.x_column = thread_index * X_FOURS % 8 * 4, from.weight_column = thread_index % 2 * 16;
  write_inverse(inverses, sum_columns(tile, from, thread_index, simd), thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  Epilogue epilogue;
  SET_EPILOGUE(epilogue);
  for (int e = thread_index; e < TILE_T * OUTPUTS; e += 128) {
    const int t = e / OUTPUTS, o = first_output + e % OUTPUTS;
    if (first_token + t >= count || o >= O) continue;
    const ulong at = (ulong)(first_token + t) * O + o;
    threadgroup const float *result = tile + t * OUT_PITCH + e % OUTPUTS;
    out[at] = output_of(result[0], SILU ? result[OUTPUTS] : 0.0f, NORM ? inverses[t] : 1.0f, epilogue, first_token + t, o, at);
  }
}

// --- the sums over the columns

struct Loaded {  // a thread's part of the next tile, in registers
  float4 x[X_FOURS];
  Sixteen weight;
};
struct Accumulators {
  simdgroup_float8x8 of[FRAGMENTS_T][FRAGMENTS_O];
};

INLINE Loaded load(Source from, int column, thread float &squares) {
  Loaded loaded;
#pragma unroll
  for (int i = 0; i < X_FOURS; i++) {
    const float4 x = *(device const float4 *)(from.x + column + from.x_column + 4 * i);
    loaded.x[i] = x;
#if NORM
    squares = add_four(squares, x, x);
    loaded.x[i] = x * *(device const float4 *)(from.norm + column + from.x_column + 4 * i);
#endif
  }
  loaded.weight = sixteen_at(from.weight, column + from.weight_column);
  return loaded;
}

INLINE void store(threadgroup float *tile, thread const Loaded &loaded, Source from, int thread_index) {
  threadgroup float4 *x = (threadgroup float4 *)(tile + thread_index * X_FOURS / 8 * PITCH + from.x_column);
#pragma unroll
  for (int i = 0; i < X_FOURS; i++) x[i] = loaded.x[i];
  threadgroup float4 *weight = (threadgroup float4 *)(tile + (TILE_T + thread_index / 2) * PITCH + from.weight_column);
#pragma unroll
  for (int i = 0; i < 4; i++) weight[i] = loaded.weight.of[i];
}

// The SIMD group's part of the tile: tokens from t0 on, rows of weights from o0 on.
INLINE void multiply_tile(thread Accumulators &sums, threadgroup const float *tile, int t0, int o0) {
#pragma unroll
  for (int k = 0; k < COLUMNS; k += 8) {
    simdgroup_float8x8 x[FRAGMENTS_T], weight[FRAGMENTS_O];
#pragma unroll
    for (int i = 0; i < FRAGMENTS_T; i++) simdgroup_load(x[i], tile + (t0 + 8 * i) * PITCH + k, PITCH);
#pragma unroll
    for (int j = 0; j < FRAGMENTS_O; j++) simdgroup_load(weight[j], tile + (TILE_T + o0 + 8 * j) * PITCH + k, PITCH, ulong2(0), true);
#pragma unroll
    for (int i = 0; i < FRAGMENTS_T; i++) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_O; j++) simdgroup_multiply_accumulate(sums.of[i][j], x[i], weight[j], sums.of[i][j]);
    }
  }
}

// Sums over all columns to results [TILE_T][OUT_PITCH] in the tile's memory. Returns the thread's share of its token's squares.
INLINE float sum_columns(threadgroup float *tile, Source from, int thread_index, int simd) {
  const int t0 = simd / 2 * (TILE_T / 2), o0 = simd % 2 * (TILE_O / 2);
  Accumulators sums;
#pragma unroll
  for (int i = 0; i < FRAGMENTS_T; i++) {
#pragma unroll
    for (int j = 0; j < FRAGMENTS_O; j++) sums.of[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  float squares = 0.0f;
  Loaded next = load(from, 0, squares);
  for (int column = 0; column < I; column += COLUMNS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile has been read by all
    store(tile, next, from, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (column + COLUMNS < I) next = load(from, column + COLUMNS, squares);
    multiply_tile(sums, tile, t0, o0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < FRAGMENTS_T; i++) {
#pragma unroll
    for (int j = 0; j < FRAGMENTS_O; j++) simdgroup_store(sums.of[i][j], tile + (t0 + 8 * i) * OUT_PITCH + o0 + 8 * j, OUT_PITCH);
  }
  return squares;
}

// Neighbouring threads share a token; the first of them writes its inverse root.
INLINE void write_inverse(threadgroup float *inverses, float squares, int thread_index) {
#if NORM
#pragma unroll
  for (int apart = 1; apart < 8 / X_FOURS; apart *= 2) squares += simd_shuffle_xor(squares, (ushort)apart);
  if (thread_index * X_FOURS % 8 == 0) inverses[thread_index * X_FOURS / 8] = inverse_root(squares, I, EPS);
#endif
}
