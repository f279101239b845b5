// The sums of matmul.cu: a warp's products with a block of columns, and how sums of pieces are merged between teams and thread blocks.
#pragma once
#include "matmul_tile.cuh"

constexpr int SUM_TILES = WARP_O * WARP_T;  // mma tiles of a warp
typedef float Sums[WARP_O][WARP_T][4];

DEVICE void load_4(u32 (&to)[4], const u8 *from) {
  const uint4 v = *(const uint4 *)from;
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// --- products with a block of 32 columns

#if QUANTIZED

// An int32 near 0 as float32 without a conversion, of which a GPU does fewer per cycle than additions: the integer is added to the bits of
// 1.5 x 2^23, which is then subtracted.
constexpr int ZERO_BITS = 0x4B400000;
DEVICE float from_zero_bits(int bits) { return __int_as_float(bits) - 12582912.0f; }

// `w`, `x` and their scales: those of the warp's first row tile and first group in the stage; the next are K_BLOCKS blocks further.
DEVICE void multiply_block(Sums &sums, const u8 *w, const u8 *x, const u8 *w_scales, const u8 *x_scales, int lane) {
  const int g = lane / 4, t = lane % 4;
  uint2 b[WARP_T];
  float2 x_scale[WARP_T];
  int2 x_sum[WARP_T];
  int start[WARP_T][4];
#pragma unroll
  for (int n = 0; n < WARP_T; n++) {
    b[n] = *(const uint2 *)(x + n * K_BLOCKS * X_TILE + lane * 8);
    const u8 *scales = x_scales + n * K_BLOCKS * X_SCALES + t * 8;
    x_scale[n] = *(const float2 *)scales;
    x_sum[n] = SUMS ? *(const int2 *)(scales + 32) : make_int2(0, 0);
    start[n][0] = start[n][2] = ZERO_BITS - ZERO_POINT * x_sum[n].x;
    start[n][1] = start[n][3] = ZERO_BITS - ZERO_POINT * x_sum[n].y;
  }
#pragma unroll
  for (int m = 0; m < WARP_O; m++) {
    const auto w_scale = unpack_scales(*(const Scales *)(w_scales + m * K_BLOCKS * W_SCALES + g * (int)sizeof(Scales)));
    u32 a[4];
    quants_of(a, shared_words(w + m * K_BLOCKS * W_TILE + lane * LANE_BYTES));
#pragma unroll
    for (int n = 0; n < WARP_T; n++) {
      int dot[4];
      mma_s8_from(dot, start[n], a, b[n].x, b[n].y);
      add_dots(sums[m][n], {from_zero_bits(dot[0]), from_zero_bits(dot[1]), from_zero_bits(dot[2]), from_zero_bits(dot[3])}, w_scale,
               x_scale[n], x_sum[n]);
    }
  }
}

#else

DEVICE void multiply_block(Sums &sums, const u8 *w, const u8 *x, int lane) {
  u32 b[WARP_T][4];
#pragma unroll
  for (int n = 0; n < WARP_T; n++) load_4(b[n], x + n * K_BLOCKS * X_TILE + lane * 16);
#pragma unroll
  for (int m = 0; m < WARP_O; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 a[4];
      load_4(a, w + m * K_BLOCKS * W_TILE + half * (STEP_BYTES / 2) + lane * LANE_BYTES);
#pragma unroll
      for (int n = 0; n < WARP_T; n++) MMA(sums[m][n], a, b[n][2 * half], b[n][2 * half + 1]);
    }
  }
}

#endif

// Block `k` of a stage.
DEVICE void multiply_stage(Sums &sums, const u8 *stage, int k, int warp_o, int warp_t, int lane) {
  const int m = warp_o * WARP_O * K_BLOCKS + k, n = warp_t * WARP_T * K_BLOCKS + k;
  const u8 *w = stage + m * W_TILE, *x = stage + X_AT + n * X_TILE;
#if QUANTIZED
  multiply_block(sums, w, x, stage + W_SCALES_AT + m * W_SCALES, stage + X_SCALES_AT + n * X_SCALES, lane);
#else
  multiply_block(sums, w, x, lane);
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
  static __shared__ u32 before;
  if (tile.first == 0 && place.team == 0) store(partial_of(partial, tile, 0, place.warp), total, place.lane);
  __syncthreads();
  u32 *counter = counters + tile.token_block * ROW_BLOCKS + tile.row_block;
  if (threadIdx.x == 0) {
    before = arrive(counter);
    if (before == SPLIT - 1) *counter = 0;
  }
  __syncthreads();
  if (before != SPLIT - 1) return false;
  if (place.team > 0) return true;
  fill(total, -0.0f);  // the neutral element of addition: it preserves every bit of what is added
  for (int slot = 0; slot < PIECES - PER_SPLIT + 1; slot++) add_from(total, partial_of(partial, tile, slot, place.warp), place.lane);
  return true;
}
