// Products with numbers of a table (nibble_table.cuh) and x in float32, by mma of float16: of both, and of x in groups of 32 by a power of two,
// number = high + low, two float16, within 2^-22 of it. high * high + high * low + low * high leaves out 2^-22 of a product. The products of a half, 16
// columns, are summed from zero and multiplied with the scales then.
#pragma once
#include "cells.cuh"
#include "formats.cuh"

typedef TableStep Step;
constexpr bool SUMS = false;  // of x: no zero points

struct XCell {  // what a lane contributes of a token to a step: pairs of columns
  uint4 high, low;
};

// The eight numbers of x of lane (g, t), of token g: those that multiply the lane's word.
DEVICE void read_cell(float (&v)[8], const float *block, int t) { read_fours(v, block + 8 * t, block + 8 * t + 4); }

DEVICE void split_pair(u32 &high, u32 &low, float x, float y) {
  high = pack_f16(x, y);
  const float2 rounded = unpack_f16(high);
  low = pack_f16(x - rounded.x, y - rounded.y);
}

// The cell, its largest number brought to 2^14 or more, and the scale of the whole group, which takes that and TABLE_FACTOR back. Every lane of the
// warp must take part. A group that contains an inf or a NaN gets a scale that is a NaN.
DEVICE XCell quantize_cell(const float (&v)[8], float &scale, int &sum) {
  const u32 bits = largest_bits(v);
  const u32 exponent = max(bits >> 23, 23u);  // below, neither power would be a normal number
  const float factor = __uint_as_float(268u - min(exponent, 254u) << 23);
  u32 high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; i++) split_pair(high[i], low[i], v[2 * i] * factor, v[2 * i + 1] * factor);
  scale = __uint_as_float(exponent == 255 ? 0x7FC00000u : exponent - 14 - TABLE_EXPONENT << 23);
  sum = 0;
  return {make_uint4(high[0], high[1], high[2], high[3]), make_uint4(low[0], low[1], low[2], low[3])};
}

struct Tokens {
  u32 high[4], low[4];  // B operands of both halves, of token g
  float2 scale;         // of tokens 2t and 2t + 1, whose results the lane gets
};
DEVICE Tokens tokens_from(const XCell &x, float2 scale, int2) {
  return {{x.high.x, x.high.y, x.high.z, x.high.w}, {x.low.x, x.low.y, x.low.z, x.low.w}, scale};
}

DEVICE void add_half(float (&c)[4], const u32 (&high)[4], const u32 (&low)[4], float2 row, const Tokens &x, int half) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  mma_f16(sum, low, x.high[2 * half], x.high[2 * half + 1]);
  mma_f16(sum, high, x.low[2 * half], x.low[2 * half + 1]);
  mma_f16(sum, high, x.high[2 * half], x.high[2 * half + 1]);
  c[0] = fmaf(sum[0], row.x * x.scale.x, c[0]), c[1] = fmaf(sum[1], row.x * x.scale.y, c[1]);
  c[2] = fmaf(sum[2], row.y * x.scale.x, c[2]), c[3] = fmaf(sum[3], row.y * x.scale.y, c[3]);
}
// A step of N groups of tokens: c += W x. c[.][0], c[.][1] are row g of tokens 2t, 2t + 1; c[.][2], c[.][3] row g + 8 of the same.
template <int N> DEVICE void multiply_groups(float (&c)[N][4], const Step &w, const Tokens (&x)[N]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 high[4], low[4];
    look_up_half(high, low, w, half);
#pragma unroll
    for (int n = 0; n < N; n++) add_half(c[n], high, low, w.scale, x[n], half);
  }
}
DEVICE void multiply(float (&c)[4], const Step &w, const Tokens &x) {
  const Tokens group[1] = {x};
  multiply_groups(*(float (*)[1][4]) & c, w, group);
}

// --- single numbers

DEVICE int lane_with(int column) { return column % 32 / 8; }
