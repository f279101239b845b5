// The sums of matmul.cu: a warp's products with a block of columns, and how sums of pieces are merged between teams and thread blocks.
#pragma once
#include "last_block.cuh"
#include "matmul_tile.cuh"

constexpr int SUM_TILES = WARP_O * WARP_T;  // mma tiles of a warp
typedef float Sums[WARP_O][WARP_T][4];

DEVICE void load_4(u32 (&to)[4], const u8 *from) {
  const uint4 v = *(const uint4 *)from;
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// --- products with a block of 32 columns

#if SCALED_X
// A lane's tokens of a block, number `at` of the warp's groups.
DEVICE Tokens stage_tokens(const u8 *x, const u8 *x_scales, int at, int lane) {
  const u8 *scales = x_scales + at * X_SCALES + lane % 4 * 8;
  const int2 sum = SUMS ? *(const int2 *)(scales + 32) : make_int2(0, 0);
  return tokens_from(*(const XCell *)(x + at * X_TILE + lane * (int)sizeof(XCell)), *(const float2 *)scales, sum);
}
#else
DEVICE Tokens stage_tokens(const u8 *x, const u8 *, int at, int lane) { return tokens_at(x + at * X_TILE + lane * (int)sizeof(XCell)); }
#endif

#if QUANTIZED

// Block `k` of the stage. `w`, `x`, records and scales: those of the warp's first row tile and first group; the next are K_BLOCKS blocks
// further.
DEVICE void multiply_block(Sums &sums, const u8 *w, const u8 *x, const u8 *records, const u8 *x_scales, int k, int lane) {
  const int g = lane / 4, t = lane % 4, block = k / STEPS_OF_BLOCK;
  Tokens tokens[WARP_T];
#pragma unroll
  for (int n = 0; n < WARP_T; n++) tokens[n] = stage_tokens(x, x_scales, n * K_BLOCKS + k, lane);
#pragma unroll
  for (int m = 0; m < WARP_O; m++) {
    const ChunksAt chunks = {w + m * K_BLOCKS * W_TILE + block * BLOCK_BYTES + lane * (int)sizeof(Chunk)};
    const RecordAt record = {(const RecordWord *)(records + m * K_BLOCKS * W_SCALES + block * RECORD_BYTES) + g};
    Step weights;
    unpack_step(weights, chunks, record, k % STEPS_OF_BLOCK, t);
#ifdef FLOAT_TABLE
    multiply_groups(sums[m], weights, tokens);
#else
#pragma unroll
    for (int n = 0; n < WARP_T; n++) multiply(sums[m][n], weights, tokens[n]);
#endif
  }
}

#else

DEVICE void multiply_block(Sums &sums, const u8 *w, const u8 *x, int k, int lane) {
  u32 b[WARP_T][4];
#pragma unroll
  for (int n = 0; n < WARP_T; n++) load_4(b[n], x + (n * K_BLOCKS + k) * X_TILE + lane * 16);
#pragma unroll
  for (int m = 0; m < WARP_O; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 a[4];
      load_4(a, w + (m * K_BLOCKS + k) * W_TILE + half * CHUNK_BYTES + lane * 16);
#pragma unroll
      for (int n = 0; n < WARP_T; n++) MMA(sums[m][n], a, b[n][2 * half], b[n][2 * half + 1]);
    }
  }
}

#endif

// Block `k` of a stage.
DEVICE void multiply_stage(Sums &sums, const u8 *stage, int k, int warp_o, int warp_t, int lane) {
  const int m = warp_o * WARP_O * K_BLOCKS, n = warp_t * WARP_T * K_BLOCKS;
  const u8 *w = stage + m * W_TILE, *x = stage + X_AT + n * X_TILE;
#if QUANTIZED
  multiply_block(sums, w, x, stage + W_SCALES_AT + m * W_SCALES, stage + X_SCALES_AT + n * X_SCALES, k, lane);
#else
  multiply_block(sums, w, x, k, lane);
#endif
}

// --- merging

DEVICE void fill(Sums &sums, float value) {
#pragma unroll
  for (int i = 0; i < SUM_TILES * 4; i++) sums[i / 4 / WARP_T][i / 4 % WARP_T][i % 4] = value;
}
DEVICE void add(Sums &total, const Sums &sums) {
#pragma unroll
  for (int i = 0; i < SUM_TILES * 4; i++) total[i / 4 / WARP_T][i / 4 % WARP_T][i % 4] += sums[i / 4 / WARP_T][i / 4 % WARP_T][i % 4];
}
// A warp's sums in memory: [SUM_TILES][32 lanes] float4.
DEVICE void store(float4 *place, const Sums &sums, int lane) {
#pragma unroll
  for (int i = 0; i < SUM_TILES; i++) {
    const float (&s)[4] = sums[i / WARP_T][i % WARP_T];
    place[i * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
  }
}
DEVICE void add_from(Sums &total, const float4 *place, int lane) {
#pragma unroll
  for (int i = 0; i < SUM_TILES; i++) {
    const float4 v = place[i * 32 + lane];
    float (&s)[4] = total[i / WARP_T][i % WARP_T];
    s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
  }
}

// The sums of a warp of a team in slot `slot` of `partial`.
DEVICE float4 *partial_of(float4 *partial, const Tile &tile, int slot, int warp) {
  return partial + (((u64)slot * gridDim.x + tile.token_block * ROW_BLOCKS + tile.row_block) * TEAM + warp) * (SUM_TILES * 32);
}

// The end of a round of pieces, one a team: team 0 of the first split adds them to `total`; the other splits store each piece in its slot.
DEVICE void end_round(Sums &total, Sums &sums, float4 *partial, float4 *merge, const Tile &tile, int piece, int team, int warp, int lane) {
  if (SPLIT > 1 && tile.first > 0) {
    if (piece + team < tile.last) store(partial_of(partial, tile, piece + team - PER_SPLIT + 1, warp), sums, lane);
  } else if constexpr (WARPS_K == 1) {
    add(total, sums);
  } else {
    if (team > 0 && piece + team < tile.last) store(merge + ((team - 1) * TEAM + warp) * (SUM_TILES * 32), sums, lane);
    __syncthreads();
    if (team == 0) {
      add(total, sums);
      for (int other = 1; other < WARPS_K && piece + other < tile.last; other++)
        add_from(total, merge + ((other - 1) * TEAM + warp) * (SUM_TILES * 32), lane);
    }
  }
  fill(sums, 0.0f);
}

// Whether this thread block is the last of its tile to arrive; then `total` becomes the sum of all pieces.
DEVICE bool is_last_split(Sums &total, float4 *partial, u32 *counters, const Tile &tile, const Place &place) {
  if (tile.first == 0 && place.team == 0) store(partial_of(partial, tile, 0, place.warp), total, place.lane);
  if (!is_last_block(counters + tile.token_block * ROW_BLOCKS + tile.row_block, 1, SPLIT)) return false;
  if (place.team > 0) return true;
  fill(total, -0.0f);  // the neutral element of addition: it preserves every bit of what is added
  for (int slot = 0; slot < PIECES - PER_SPLIT + 1; slot++) add_from(total, partial_of(partial, tile, slot, place.warp), place.lane);
  return true;
}
