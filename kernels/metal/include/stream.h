// Products of up to sixteen rows of x with weights that are read once: how the work is divided.
//
// Constants from outside, in addition to those of product.h:
//     TOKENS   rows of x, 1 to 16
//     ROWS     rows of weights that a SIMD group takes at a time: 1, 2, 4 or 8, at least 2 if PAIRED
//     SIMDS    SIMD groups of a threadgroup, at most 32
//     TEAMS    1, or 2 for many tokens: TEAMS SIMD groups share the tokens of the same rows of weights, each has PART of them. What both
//              read comes from memory once
//     STAGED   0: each SIMD group reads x itself. 1: the threadgroup's SIMD groups read it together, into threadgroup memory
//     SHARE    GATHER: numbers of the index that have one row of x, 1 if not defined: row t is row index[t] / SHARE
//     DEPTH    STAGED: rounds (product.h) that are staged at a time, a power of two; each is 1 KiB a row of x
// and, by the kernel's file, NORM (norm.h), GATHER (rows of x by index) and PAIRED (the first and the second half of a SIMD group's rows
// belong together, such as gate and up). The bits of a result depend on none of them.
//
// A SIMD group keeps PART * ROWS sums a lane, in registers. Rows of x from the count on are read as the last valid row, rows of weights
// from the end on as the last row; their results are not written.
#pragma once
#include "norm.h"

static_assert(TOKENS >= 1 && TOKENS <= 16 && SIMDS % TEAMS == 0 && SIMDS <= 32, "stream: tokens or SIMD groups");
#ifndef SHARE
#define SHARE 1
#endif
#define PART ((TOKENS + TEAMS - 1) / TEAMS)
#define GROUPS (SIMDS / TEAMS)  // SIMD groups with rows of weights of their own
#define SETS (1 + PAIRED)
#define SET_ROWS (ROWS / SETS)
constant constexpr int COUNT = power_above(PART * SET_ROWS);   // sums of a set
constant constexpr int RESULTS = COUNT > 32 ? COUNT / 32 : 1;  // sums of a set that a lane holds in the end
#define STAGED_ROWS ((TOKENS + SIMDS - 1) / SIMDS)             // rows of x that a SIMD group stages
#if STAGED
#define TILE (DEPTH * TOKENS * 64)
#define SQUARES TOKENS
#define WHOLE_STEPS (DEPTH >= SUBS)  // a tile holds all rounds of its steps
#define TILE_STEPS (WHOLE_STEPS ? DEPTH / SUBS : 1)
#define TILE_SUBS (WHOLE_STEPS ? SUBS : DEPTH)
static_assert(WHOLE_STEPS ? DEPTH % SUBS == 0 : SUBS % DEPTH == 0, "stream: DEPTH");
#else
#define TILE 1
#define SQUARES 1
#endif

struct Rows {  // rows of x; `index` if GATHER, `norm` if NORM
  device const float *x, *norm;
  device const int *index;
  int count;  // at least 1
};
struct Weights {
  device const uchar *row[ROWS];
};
struct Sums {  // number t * SET_ROWS + r of a set is that of the SIMD group's token t and the set's row r
  float of[SETS * COUNT];
};

INLINE device const float *row_of(Rows rows, int token) {
  const int t = token < rows.count ? token : rows.count - 1;
  return rows.x + (ulong)(GATHER ? rows.index[t] / SHARE : t) * (I);
}

INLINE float4 four_at(device const float *x, int step, int lane, int sub, int second) {
  return *(device const float4 *)(x + step * STEP + column_of(lane, sub, second));
}
INLINE float4 norm_at(Rows rows, int step, int lane, int sub, int second) {
  return NORM ? four_at(rows.norm, step, lane, sub, second) : float4(1.0f);
}
// Four numbers of x as they are multiplied by weights; `squares` grows by their squares.
INLINE float4 prepared(float4 x, float4 norm, thread float &squares) {
  if (!NORM) return x;
  squares = add_four(squares, x, x);
  return x * norm;
}

struct Fours {
  float4 of[ROWS];
};
INLINE Fours fours_of(thread Raw (&raw)[ROWS], int sub, int second) {
  Fours w;
#pragma unroll
  for (int r = 0; r < ROWS; r++) w.of[r] = four_weights(raw[r], sub, second);
  return w;
}
INLINE void add_token(thread Sums &sums, thread const Fours &w, int t, float4 x) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int i = r / SET_ROWS * COUNT + t * SET_ROWS + r % SET_ROWS;
    sums.of[i] = add_four(sums.of[i], w.of[r], x);
  }
}

INLINE void load_rows(thread Raw (&raw)[ROWS], thread const Weights &weights, int step, int lane) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) raw[r] = load_raw(weights.row[r], step, lane);
}

INLINE void clear(thread Sums &sums) {
#pragma unroll
  for (int i = 0; i < SETS * COUNT; i++) sums.of[i] = 0.0f;
}

#if STAGED
// The numbers of the tile's rounds, from (step, sub) on, of the tokens that SIMD group `simd` stages.
INLINE void stage(threadgroup float4 *tile, thread float (&squares)[STAGED_ROWS], Rows rows, int first_step, int first_sub, int simd,
                  int lane) {
#pragma unroll
  for (int m = 0; m < STAGED_ROWS; m++) {
    const int token = simd + m * SIMDS;
    if (token >= TOKENS) continue;
    device const float *x = row_of(rows, token);
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int step = first_step + d / TILE_SUBS, sub = first_sub + d % TILE_SUBS;
      if (!has_share(step, lane)) continue;
#pragma unroll
      for (int second = 0; second < 2; second++)
        tile[(d * TOKENS + token) * 64 + second * 32 + lane] =
            prepared(four_at(x, step, lane, sub, second), norm_at(rows, step, lane, sub, second), squares[m]);
    }
  }
}

// What a tile adds to the sums of tokens `first_token` on; `raw` are the rows' shares in the tile's first step.
INLINE void multiply_tile(thread Sums &sums, thread Raw (&raw)[ROWS], threadgroup const float4 *tile, thread const Weights &weights,
                          int first_step, int first_sub, int first_token, int lane) {
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    const int step = first_step + d / TILE_SUBS, sub = first_sub + d % TILE_SUBS;
    if (!has_share(step, lane)) continue;
    if (d > 0 && d % TILE_SUBS == 0) load_rows(raw, weights, step, lane);
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const Fours w = fours_of(raw, sub, second);
#pragma unroll
      for (int t = 0; t < PART; t++) {
        const int token = TOKENS % TEAMS && first_token + t >= TOKENS ? TOKENS - 1 : first_token + t;
        add_token(sums, w, t, tile[(d * TOKENS + token) * 64 + second * 32 + lane]);
      }
    }
  }
}

// The lanes' sums of tokens `first_token` on times the SIMD group's rows of weights, if NORM times the rows' inverse roots. All threads of
// the threadgroup must call it.
INLINE void multiply(thread Sums &sums, threadgroup float4 *tile, threadgroup float *inverses, Rows rows, thread const Weights &weights,
                     int first_token, int simd, int lane, float eps) {
  float squares[STAGED_ROWS];
#pragma unroll
  for (int m = 0; m < STAGED_ROWS; m++) squares[m] = 0.0f;
  clear(sums);
  Raw raw[ROWS];
  for (int step = 0; step < STEPS; step += TILE_STEPS) {
    if (has_share(step, lane)) load_rows(raw, weights, step, lane);  // in flight while x is staged
    for (int sub = 0; sub < SUBS; sub += TILE_SUBS) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile has been read by all
      stage(tile, squares, rows, step, sub, simd, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply_tile(sums, raw, tile, weights, step, sub, first_token, lane);
    }
  }
  if (!NORM) return;
#pragma unroll
  for (int m = 0; m < STAGED_ROWS; m++) {
    const float inverse = inverse_root(sum_lanes(squares[m]), I, eps);
    if (lane == 0 && simd + m * SIMDS < TOKENS) inverses[simd + m * SIMDS] = inverse;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < SETS * PART * SET_ROWS; i++) {
    const int t = i % (PART * SET_ROWS) / SET_ROWS, token = first_token + t < TOKENS ? first_token + t : TOKENS - 1;
    sums.of[i / (PART * SET_ROWS) * COUNT + i % (PART * SET_ROWS)] *= inverses[token];
  }
}
#else
INLINE void multiply_step(thread Sums &sums, thread float (&squares)[PART], Rows rows, thread const Weights &weights, int step,
                          int first_token, int lane) {
  Raw raw[ROWS];
  load_rows(raw, weights, step, lane);
#pragma unroll
  for (int part = 0; part < 2 * SUBS; part++) {
    const int sub = part / 2, second = part % 2;
    const Fours w = fours_of(raw, sub, second);
    const float4 norm = norm_at(rows, step, lane, sub, second);
#pragma unroll
    for (int t = 0; t < PART; t++)
      add_token(sums, w, t, prepared(four_at(row_of(rows, first_token + t), step, lane, sub, second), norm, squares[t]));
  }
}

INLINE void multiply(thread Sums &sums, threadgroup float4 *, threadgroup float *, Rows rows, thread const Weights &weights,
                     int first_token, int, int lane, float eps) {
  float squares[PART];
#pragma unroll
  for (int t = 0; t < PART; t++) squares[t] = 0.0f;
  clear(sums);
#pragma unroll 2
  for (int step = 0; step < (I) / STEP; step++) multiply_step(sums, squares, rows, weights, step, first_token, lane);
  if ((I) % STEP && has_share((I) / STEP, lane)) multiply_step(sums, squares, rows, weights, (I) / STEP, first_token, lane);
  if (!NORM) return;
#pragma unroll
  for (int t = 0; t < PART; t++) {
    const float inverse = inverse_root(sum_lanes(squares[t]), I, eps);
#pragma unroll
    for (int i = 0; i < SETS * SET_ROWS; i++) sums.of[i / SET_ROWS * COUNT + t * SET_ROWS + i % SET_ROWS] *= inverse;
  }
}
#endif
