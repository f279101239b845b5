// Products with quantized weights: x is rounded to int8 in blocks of 32 with a float32 scale, dot products are exact in int32, a step is
// one mma of k32. The format's header defines what weights.cuh lists.
#pragma once
#include "formats.cuh"

constexpr int SCALE_BYTES = 8 * sizeof(Scales);  // of a step
// The eight numbers of x that lane (g, t) contributes of token g: 4t..4t+3, 4t+16..4t+19 of a block of 32 columns. A warp reads whole
// sectors of 32 bytes.
DEVICE void read_cell(float (&v)[8], const float *block, int t) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float4 four = *(const float4 *)(block + 4 * t + 16 * i);
    v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
  }
}

DEVICE u32 quantized_word(const float *v, float inverse) {
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) word |= ((u32)__float2int_rn(v[i] * inverse) & 255u) << 8 * i;
  return word;
}
// The cell as the B operand, and the scale and sum of the whole block in all four of its lanes. Every lane of the warp must take part. A
// block that contains an inf or a NaN gets a scale that makes the whole row NaN, as it would be with float weights.
DEVICE uint2 quantize_cell(const float (&v)[8], float &scale, int &sum) {
  u32 bits = 0;  // of the largest |x|: bits of numbers without a sign rise with them, and those of NaN are the highest
#pragma unroll
  for (int i = 0; i < 8; i++) bits = max(bits, __float_as_uint(v[i]) & 0x7FFFFFFFu);
  bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, 1));
  bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, 2));
  const float largest = __uint_as_float(bits), inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;  // below, 127 / largest is infinite
  const uint2 q = make_uint2(quantized_word(v, inverse), quantized_word(v + 4, inverse));
  sum = __dp4a((int)q.x, 0x01010101, __dp4a((int)q.y, 0x01010101, 0));
  sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  sum += __shfl_xor_sync(ALL_LANES, sum, 2);
  scale = largest / 127.0f;
  return q;
}

struct Tokens {
  u32 b[2];      // B operand, of token g
  float2 scale;  // of tokens 2t and 2t + 1, whose results the lane gets
  int2 sum;      // of their 32 quants; read only if SUMS
};

// A step: c += W x. c[0], c[1] are row g of tokens 2t, 2t + 1; c[2], c[3] row g + 8 of the same.
DEVICE void multiply(float (&c)[4], const LaneWords &w, Scales scales, const Tokens &x) {
  u32 a[4];
  quants_of(a, w);
  const int first = ZERO_POINT ? -ZERO_POINT * x.sum.x : 0, second = ZERO_POINT ? -ZERO_POINT * x.sum.y : 0;
  int dot[4] = {first, second, first, second};
  mma_s8(dot, a, x.b[0], x.b[1]);
  add_dots(c, {(float)dot[0], (float)dot[1], (float)dot[2], (float)dot[3]}, unpack_scales(scales), x.scale, x.sum);
}
