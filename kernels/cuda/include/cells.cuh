// What a lane contributes of x to a step of a product with packed weights: eight numbers of a token, its cell. The four lanes of one g share a
// token.
#pragma once
#include "gpu.cuh"

// Four numbers from `first` on, and four from `second` on.
DEVICE void read_fours(float (&v)[8], const float *first, const float *second) {
  const float4 low = *(const float4 *)first, high = *(const float4 *)second;
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
  v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

// The bits of the largest |x| of a token's 32 numbers. Those of numbers without a sign rise with them, and those of NaN are the highest. Every lane
// of the warp must take part.
DEVICE u32 largest_bits(const float (&v)[8]) {
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) bits = max(bits, __float_as_uint(v[i]) & 0x7FFFFFFFu);
  bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, 1));
  return max(bits, __shfl_xor_sync(ALL_LANES, bits, 2));
}
