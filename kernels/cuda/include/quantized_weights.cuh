// Products with packed integers: x is rounded to int8 in groups of 32 with a float32 scale, dots are exact in int32. A step, sixteen rows by
// 32 columns, is one mma of k32, or with parts of 16 two of k16. The format's header defines what weights.cuh lists.
#pragma once
#include "cells.cuh"
#include "formats.cuh"

typedef StepWeights Step;
typedef uint2 XCell;  // what a lane contributes of a token to a step

constexpr bool HALF_SUMS = SCALED_QUANTS;                   // of x: both halves of a group, int16 in a word; otherwise the whole group
constexpr bool SUMS = ZERO_POINT || MINIMUMS;               // whether the product reads the sums of x
constexpr int DOTS = PART == 16 && !SCALED_QUANTS ? 2 : 1;  // dots of a step

static_assert(!SUMS || PART == 32 || HALF_SUMS, "weights: parts of 16 have no sums of x of their own");

// --- x

// The eight numbers of x that lane (g, t) contributes of token g: 4t..4t+3, 4t+16..4t+19 of a block of 32 columns. A warp reads whole
// sectors of 32 bytes.
DEVICE void read_cell(float (&v)[8], const float *block, int t) { read_fours(v, block + 4 * t, block + 4 * t + 16); }

DEVICE u32 quantized_word(const float *v, float inverse) {
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) word |= ((u32)__float2int_rn(v[i] * inverse) & 255u) << 8 * i;
  return word;
}
// Sums of the two halves of a group, each within int16, from first + 65536 * second.
DEVICE int packed_sums(int sums) { return (sums & 0xFFFF) | (sums - (short)sums); }

// The cell as the B operand, and the scale and sum (if HALF_SUMS: both) of the whole group in all four of its lanes. Every lane of the warp
// must take part. A group that contains an inf or a NaN gets a scale that makes the whole row NaN, as it would be with float weights.
DEVICE XCell quantize_cell(const float (&v)[8], float &scale, int &sum) {
  const float largest = __uint_as_float(largest_bits(v)),
              inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;  // below, 127 / largest is infinite
  const uint2 q = make_uint2(quantized_word(v, inverse), quantized_word(v + 4, inverse));
  sum = __dp4a((int)q.x, 0x01010101, __dp4a((int)q.y, 0x01010101, 0) * (HALF_SUMS ? 65536 : 1));
  sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  sum += __shfl_xor_sync(ALL_LANES, sum, 2);
  if (HALF_SUMS) sum = packed_sums(sum);
  scale = largest / 127.0f;
  return q;
}

// --- products

// An int32 near 0 as float32 without a conversion, of which a GPU does fewer per cycle than additions: the integer is added to the bits of
// 1.5 x 2^23, which is then subtracted.
constexpr int ZERO_BITS = 0x4B400000;
DEVICE float from_zero_bits(int bits) { return __int_as_float(bits) - 12582912.0f; }

struct Tokens {
  u32 b[2];      // B operand, of token g
  float2 scale;  // of tokens 2t and 2t + 1, whose results the lane gets
  int2 sum;      // of their 32 quants; if HALF_SUMS, of 16 and 16. Undefined if not SUMS
  int start[4];  // what their dots begin with: minus the zero points, plus ZERO_BITS
};
DEVICE Tokens tokens_from(XCell b, float2 scale, int2 sum) {
  const int first = ZERO_POINT ? ZERO_BITS - ZERO_POINT * sum.x : ZERO_BITS,
            second = ZERO_POINT ? ZERO_BITS - ZERO_POINT * sum.y : ZERO_BITS;
  return {{b.x, b.y}, scale, sum, {first, second, first, second}};
}

// c += dot * scale of the row * scale of the token; `dot` plus ZERO_BITS.
DEVICE void add_dots(float (&c)[4], const int (&dot)[4], float2 row, float2 token) {
  c[0] = fmaf(from_zero_bits(dot[0]), row.x * token.x, c[0]);
  c[1] = fmaf(from_zero_bits(dot[1]), row.x * token.y, c[1]);
  c[2] = fmaf(from_zero_bits(dot[2]), row.y * token.x, c[2]);
  c[3] = fmaf(from_zero_bits(dot[3]), row.y * token.y, c[3]);
}

// c -= minimum * sum of x * scale of the token. With SCALED_QUANTS, halves of x count as often as the row's bytes say.
DEVICE void subtract_minimums(float (&c)[4], const StepWeights &w, const Tokens &x) {
  int sums[4] = {x.sum.x, x.sum.y, x.sum.x, x.sum.y};
#if SCALED_QUANTS
#pragma unroll
  for (int i = 0; i < 4; i++) sums[i] = __dp2a_lo(sums[i], (int)w.minimums[i / 2], 0);
#endif
  c[0] = fmaf(w.minimum.x, -x.scale.x * (float)sums[0], c[0]);
  c[1] = fmaf(w.minimum.x, -x.scale.y * (float)sums[1], c[1]);
  c[2] = fmaf(w.minimum.y, -x.scale.x * (float)sums[2], c[2]);
  c[3] = fmaf(w.minimum.y, -x.scale.y * (float)sums[3], c[3]);
}

// A step: c += W x. c[0], c[1] are row g of tokens 2t, 2t + 1; c[2], c[3] row g + 8 of the same.
DEVICE void multiply(float (&c)[4], const StepWeights &w, const Tokens &x) {
  int dot[4];
#if PART == 16 && !SCALED_QUANTS
#pragma unroll
  for (int part = 0; part < 2; part++) {
    mma_s8_half_from(dot, x.start, w.a[2 * part], w.a[2 * part + 1], x.b[part]);
    add_dots(c, dot, w.scale[part], x.scale);
  }
#else
  mma_s8_from(dot, x.start, w.a, x.b[0], x.b[1]);
  add_dots(c, dot, w.scale[0], x.scale);
#endif
  if (MINIMUMS) subtract_minimums(c, w, x);
}

// --- single numbers: as unpack_step gives them to the lane of the row and the columns

DEVICE int lane_with(int column) { return column % 16 / 4; }

template <class Chunks, class Record> DEVICE float4 four_numbers(const Chunks &chunk, const Record &record, int row, int column) {
  StepWeights w;
  unpack_step(w, chunk, record, column % BLOCK / 32, lane_with(column));
  const int half = column % 32 / 16, upper = row % 16 / 8;
  const u32 word = w.a[2 * half + upper];
  const float2 scales = w.scale[half && DOTS == 2];
  const float scale = upper ? scales.y : scales.x;
  float minimum = 0.0f;
#if MINIMUMS
  minimum = upper ? w.minimum.y : w.minimum.x;
#endif
#if SCALED_QUANTS
  minimum *= (float)(w.minimums[upper] >> 8 * half & 255);
#endif
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[i] = scale * (float)((s8)(word >> 8 * i) - ZERO_POINT);
    if (MINIMUMS) v[i] -= minimum;
  }
  return make_float4(v[0], v[1], v[2], v[3]);
}
