// RMS norm of rows before a product, y = x * (1 / sqrt(mean(x^2) + eps)) * w, in one order of arithmetic for all kernels.
//
// 256 virtual lanes: lane j sums the squares of the float4s number j, j + 256, ... of the row, ascending, x y z w within one. Eight virtual
// warps of 32 such lanes add theirs by a butterfly (16, 8, 4, 2, 1); the eight sums are added ascending. Any number of real warps may
// compute the virtual ones. Width % 4 == 0.
#pragma once
#include "gpu.cuh"

constexpr int NORM_WARPS = 8;

// The sum of squares of row x over virtual warp `part`, in every lane of the warp that computes it.
DEVICE float square_sum(const float *x, int width, int part, int lane) {
  float sum = 0.0f;
  for (int i = part * 32 + lane; i < width / 4; i += NORM_WARPS * 32) {
    const float4 four = ((const float4 *)x)[i];
    sum = fmaf(four.x, four.x, sum);
    sum = fmaf(four.y, four.y, sum);
    sum = fmaf(four.z, four.z, sum);
    sum = fmaf(four.w, four.w, sum);
  }
#pragma unroll
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  return sum;
}

// 1 / sqrt(mean + eps) from the sums of the eight virtual warps.
DEVICE float inverse_root(const float *sums, int width, float eps) {
  float sum = sums[0];
#pragma unroll
  for (int part = 1; part < NORM_WARPS; part++) sum += sums[part];
  return 1.0f / sqrtf(sum / (float)width + eps);
}

DEVICE float normed(float x, float inverse, float weight) { return x * inverse * weight; }
