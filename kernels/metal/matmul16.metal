// out = activation(norm(x) . weight^T + bias) + residual, or silu(gate) * up, for up to sixteen rows, by simdgroup_matrix; on request only
//
// Arguments and what must divide what are those of matmul.metal, with T = 16 at most.
//
// I is a multiple of 32 and of the format's blocks, any O. x is float32, sums are float32; weights are exact but for what operands.h says. For an output: runs of 32
// columns ascending, in SHARES shares that are added in the end, within a run the order of the GPU's own matrices; then the inverse root
// (norm.h), + bias, activation, + residual. A row's bits do not depend on the other rows, on their number or on FRAGMENTS, but they are
// neither those of matvec.metal and its siblings, which take fewer rows, nor those of matmul.metal. So a request's tokens may depend on
// how many others run: this kernel does not keep the promise of the same tokens.
//
// Why it exists: sixteen tokens are multiplied by a matrix of eight rows of weights by eight columns in two products, so that a weight is
// unpacked once, and a quarter to an eighth of matvec.metal's reads of x are needed for it. What it does not save is the multiplying: a
// product's 16 multiply-adds a lane go through the float32 pipelines, in 17 to 18 cycles (M1: philipturner/metal-benchmarks on GitHub). By
// arithmetic (benchmarks/plan.py) it gains a tenth for Q4_K and next to nothing for Q4_0, and loses for twelve rows and fewer.
//
// A SIMD group has 8 * FRAGMENTS rows of weights, and one of SHARES shares of their columns, slice by slice (operands.h), straight from
// memory to registers, the next slice in flight. With SILU half of its rows are gate's. x is stored to threadgroup memory for all SIMD
// groups, 32 columns by each at a time: columns in the operands' order, PITCH floats apart so that eight of them spread over all banks.
//     grid (ceil(O / (FRAGMENTS * 8 / (1 + SILU) * SIMDS / SHARES)), 1, 1), 32 * SIMDS threads
// Threadgroup memory: SIMDS * 2560 bytes, or the sums of SHARES - 1 shares if that is more, plus up to SIMDS * 128.
#include "matrices.h"
#include "operands.h"

#define TOKENS 16
#define PITCH 20  // floats from column to column of a tile
#define GROUPS (SIMDS / SHARES)
#define COLUMNS (32 * SIMDS)              // of a tile
#define OUTPUTS (FRAGMENTS / (1 + SILU))  // fragments that become outputs
#define FLOATS (FRAGMENTS * 2 * 64)       // of a SIMD group's sums
#define SHARED_FLOATS ((SHARES - 1) * GROUPS * FLOATS)
constant constexpr int MEMORY = COLUMNS * PITCH < SHARED_FLOATS ? SHARED_FLOATS : COLUMNS * PITCH;
static_assert(SIMDS % SHARES == 0 && COLUMNS % (SLICE * SHARES) == 0, "matmul16: shares");
static_assert(FRAGMENTS % (1 + SILU) == 0, "matmul16: FRAGMENTS must be even with SILU");

struct Source {  // what a lane loads of x: sixteen columns of 32, of one token
  device const float *x, *norm;
  int token, second_half;
};
struct Sums {  // the lane's numbers of each fragment's two matrices: rows of weights by tokens 0 .. 7 and 8 .. 15
  float2 of[FRAGMENTS][2];
};
struct Lane {
  device const uchar *rows[FRAGMENTS];  // of weights
  int row, token, quarter, share;       // row and first token within a matrix
};

INLINE float sum_columns(thread Sums &sums, threadgroup float *tile, threadgroup float *starts, Source from, thread const Lane &lane,
                         int simd);
INLINE void write_share(threadgroup float *memory, thread const Sums &sums, int simd, int number);
INLINE void add_shares(threadgroup const float *memory, thread Sums &sums, int simd, int number);
INLINE void write_squares(threadgroup float *squares_of, Source from, float squares, int simd);
INLINE void write_inverse(threadgroup float *squares_of, int token);
INLINE void write_outputs(device float *out, thread const Sums &sums, threadgroup const float *inverses, Epilogue epilogue,
                          thread const Lane &lane, int first_output, int count);

[[max_total_threads_per_threadgroup(32 * SIMDS)]] kernel void matmul16(
    device float *out, device const float *x,
    NORM_ARGUMENT INDEX_ARGUMENT WEIGHT_ARGUMENTS BIAS_ARGUMENTS RESIDUAL_ARGUMENT device const int *rows,
    uint3 group [[threadgroup_position_in_grid]], uint simd_index [[simdgroup_index_in_threadgroup]],
    uint thread_in_simd [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[MEMORY / 4];
  threadgroup float starts[QUANTIZED ? SIMDS * TOKENS : 1];
  threadgroup float squares_of[NORM ? SIMDS * TOKENS : 1];  // [SIMDS][TOKENS]; then the inverse roots of the tokens
  threadgroup float *tile = (threadgroup float *)memory;
  const int count = min(rows[0], TOKENS), number = thread_in_simd, simd = simd_index;
  if (count <= 0) return;

  Lane lane;
  lane.row = matrix_row(number), lane.token = matrix_column(number), lane.quarter = lane.token / 2, lane.share = simd % SHARES;
  const int first_output = (int)(group.x * GROUPS + simd / SHARES) * 8 * OUTPUTS;
  Matrices matrices;
  SET_WEIGHTS(matrices);
#pragma unroll
  for (int r = 0; r < FRAGMENTS; r++)
    lane.rows[r] = weight_row(matrices, min(first_output + 8 * (r % OUTPUTS) + lane.row, O - 1), r >= OUTPUTS);
  Source from;
  from.token = number % TOKENS, from.second_half = number / TOKENS, from.norm = NORM_POINTER;
  from.x = x + (ulong)ROW_OF(min(from.token, count - 1)) * I;  // results of rows after the last valid one are not written

  Sums sums;
  const float squares = sum_columns(sums, tile, starts, from, lane, simd);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  write_share(tile, sums, simd, number);
  if (NORM) write_squares(squares_of, from, squares, simd);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#if NORM
  if (simd == 0 && number < TOKENS) write_inverse(squares_of, number);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  if (lane.share != 0) return;
  add_shares(tile, sums, simd, number);
  Epilogue epilogue;
  SET_EPILOGUE(epilogue);
  write_outputs(out, sums, squares_of, epilogue, lane, first_output, count);
}

// --- the sums over a share's columns

struct Loaded {
  float4 fours[4];
};
struct Slices {
  Slice of[FRAGMENTS];
};

INLINE Loaded load(Source from, int column, thread float &squares) {
  Loaded loaded;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = column + 16 * from.second_half + 4 * i;
    const float4 x = *(device const float4 *)(from.x + at);
    loaded.fours[i] = x;
#if NORM
    squares = add_four(squares, x, x);
    loaded.fours[i] = x * *(device const float4 *)(from.norm + at);
#endif
  }
  return loaded;
}

// The SIMD group's 32 columns to their place in the tile, and what the sums of their runs start with to `starts` [16].
INLINE void store(threadgroup float *tile, threadgroup float *starts, thread const Loaded &loaded, Source from) {
  float sum = 0.0f;
#pragma unroll
  for (int four = 0; four < 4; four++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float x = loaded.fours[four][i];
      if (QUANTIZED) sum += x;
      tile[column_place(from.second_half, four, i) * PITCH + from.token] = x * X_FACTOR(from.second_half);
    }
  }
  if (!QUANTIZED) return;
  sum *= START(from.second_half);
  sum += simd_shuffle_xor(sum, (ushort)16);
  if (!from.second_half) starts[from.token] = sum;
}

INLINE void load_slices(thread Slices &slices, thread const Lane &lane, int column) {
#pragma unroll
  for (int r = 0; r < FRAGMENTS; r++) slices.of[r] = load_slice(lane.rows[r], column < I ? column : I - SLICE, lane.quarter);
}

// Adds a run's products to `sums`; of a quantized format these begin with `starts`.
INLINE void multiply_run(thread simdgroup_float8x8 (&sums)[FRAGMENTS][2], thread const Slices &slices, int run,
                         threadgroup const float *tile) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    simdgroup_float8x8 x[2];
    simdgroup_load(x[0], tile + 8 * i * PITCH, PITCH);
    simdgroup_load(x[1], tile + 8 * i * PITCH + 8, PITCH);
#pragma unroll
    for (int r = 0; r < FRAGMENTS; r++) {
      const operand_pair pair = operand_at(slices.of[r], run, i);
      Operand weight;
      weight.thread_elements()[0] = pair.x;
      weight.thread_elements()[1] = pair.y;
      simdgroup_multiply_accumulate(sums[r][0], weight, x[0], sums[r][0]);
      simdgroup_multiply_accumulate(sums[r][1], weight, x[1], sums[r][1]);
    }
  }
}

INLINE void multiply_slice(thread Sums &sums, thread const Slices &slices, threadgroup const float *tile, threadgroup const float *starts,
                           int first_token) {
#pragma unroll
  for (int run = 0; run < RUNS; run++) {
    simdgroup_float8x8 matrices[FRAGMENTS][2];
    float2 start[2];
#pragma unroll
    for (int half_of = 0; half_of < 2; half_of++) {
      if (QUANTIZED) start[half_of] = *(threadgroup const float2 *)(starts + run * TOKENS + 8 * half_of + first_token);
#pragma unroll
      for (int r = 0; r < FRAGMENTS; r++) matrices[r][half_of] = matrix_of(QUANTIZED ? start[half_of] : sums.of[r][half_of]);
    }
    multiply_run(matrices, slices, run, tile + run * 32 * PITCH);
#pragma unroll
    for (int r = 0; r < FRAGMENTS; r++) {
#pragma unroll
      for (int half_of = 0; half_of < 2; half_of++) {
        const float2 pair = pair_of(matrices[r][half_of]);
#if QUANTIZED
        sums.of[r][half_of] = fma(pair, float2(scale_of(slices.of[r], run)), sums.of[r][half_of]);
#else
        sums.of[r][half_of] = pair;
#endif
#if HAS_MINIMUM  // start is -RAISE times the sum of x
        sums.of[r][half_of] = fma(start[half_of], float2(minimum_of(slices.of[r], run) / RAISE), sums.of[r][half_of]);
#endif
      }
    }
  }
}

// Sums over the share's columns. Returns the lane's part of its token's squares.
INLINE float sum_columns(thread Sums &sums, threadgroup float *tile, threadgroup float *starts, Source from, thread const Lane &lane,
                         int simd) {
#pragma unroll
  for (int r = 0; r < FRAGMENTS; r++) sums.of[r][0] = sums.of[r][1] = float2(0.0f);
  float squares = 0.0f;
  const int own = 32 * simd;  // the first of the 32 columns of a tile that this SIMD group stores
  Loaded next;
  if (own < I) next = load(from, own, squares);
  Slices now, later;
  load_slices(now, lane, lane.share * SLICE);
  for (int first = 0; first < I; first += COLUMNS) {
    // the last tile has been read by all
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first + own < I) store(tile + own * PITCH, starts + simd * TOKENS, next, from);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first + COLUMNS + own < I) next = load(from, first + COLUMNS + own, squares);
    for (int at = lane.share * SLICE; at < COLUMNS && first + at < I; at += SHARES * SLICE) {
      load_slices(later, lane, first + at + SHARES * SLICE);
      multiply_slice(sums, now, tile + at * PITCH, starts + at / 32 * TOKENS, lane.token);
      now = later;
    }
  }
  return squares;
}

// --- shares of the same rows of weights, added in the SIMD group of the first share

INLINE void write_share(threadgroup float *memory, thread const Sums &sums, int simd, int number) {
  if (SHARES == 1 || simd % SHARES == 0) return;
  threadgroup float2 *own = (threadgroup float2 *)(memory + ((simd / SHARES) * (SHARES - 1) + simd % SHARES - 1) * FLOATS);
#pragma unroll
  for (int i = 0; i < FRAGMENTS * 2; i++) own[i * LANES + number] = sums.of[i / 2][i % 2];
}
INLINE void add_shares(threadgroup const float *memory, thread Sums &sums, int simd, int number) {
#pragma unroll
  for (int share = 0; share < SHARES - 1; share++) {
    threadgroup const float2 *other = (threadgroup const float2 *)(memory + ((simd / SHARES) * (SHARES - 1) + share) * FLOATS);
#pragma unroll
    for (int i = 0; i < FRAGMENTS * 2; i++) sums.of[i / 2][i % 2] += other[i * LANES + number];
  }
}

// --- the norm: squares of each SIMD group's columns, then the inverse root of each token

INLINE void write_squares(threadgroup float *squares_of, Source from, float squares, int simd) {
  squares += simd_shuffle_xor(squares, (ushort)16);
  if (!from.second_half) squares_of[simd * TOKENS + from.token] = squares;
}
INLINE void write_inverse(threadgroup float *squares_of, int token) {
  float squares = 0.0f;
  for (int simd = 0; simd < SIMDS; simd++) squares += squares_of[simd * TOKENS + token];
  squares_of[token] = inverse_root(squares, I, EPS);
}

INLINE void write_outputs(device float *out, thread const Sums &sums, threadgroup const float *inverses, Epilogue epilogue,
                          thread const Lane &lane, int first_output, int count) {
#pragma unroll
  for (int i = 0; i < OUTPUTS * 4; i++) {
    const int r = i / 4, half_of = i / 2 % 2, token = 8 * half_of + lane.token + i % 2, o = first_output + 8 * r + lane.row;
    if (token >= count || o >= O) continue;
    const ulong at = (ulong)token * O + o;
    const float up = SILU ? sums.of[r + FRAGMENTS - OUTPUTS][half_of][i % 2] : 0.0f;
    out[at] = output_of(sums.of[r][half_of][i % 2], up, NORM ? inverses[token] : 1.0f, epilogue, token, o, at);
  }
}
