// Mean and spread of a row of float32: partial sums in sixteen lanes, then v16_sum. `width` is a multiple of 16.
#pragma once
#include "lanes.h"

// 1 / sqrt(mean(((x - middle)^2) + eps)
static inline float inverse_spread(const float *x, int width, float middle, float eps) {
  v16 sum = v16_set(0.0f);
  for (int i = 0; i < width; i += 16) {
    v16 a = v16_sub(v16_load(x + i), v16_set(middle));
    sum = v16_fma(a, a, sum);
  }
  return 1.0f / __builtin_sqrtf(v16_sum(sum) / (float)width + eps);
}

static inline float mean_of(const float *x, int width) {
  v16 sum = v16_set(0.0f);
  for (int i = 0; i < width; i += 16) sum = v16_add(sum, v16_load(x + i));
  return v16_sum(sum) / (float)width;
}
