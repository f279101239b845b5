// How the outputs of a product join the residual stream: y * OUT_SCALE + residual, where y is normed first if OUT_NORM (RMS, with EPS): then a
// row is finished once all of it is there. Included before arguments.h, and RESIDUAL is defined.
#pragma once
#include "spread.h"

#ifndef OUT_SCALE
#define OUT_SCALE 1.0f
#endif
#ifdef OUT_NORM
#define OUT_NORM_ARGUMENT const float *out_norm,
#define ADDS_AT_ONCE 0
#else
#define OUT_NORM_ARGUMENT
#define ADDS_AT_ONCE 1
#endif

// Sixteen outputs as they join the residual.
static inline v16 joined(v16 y, const float *residuals) {
  if (OUT_SCALE != 1.0f) y = v16_mul(y, v16_set(OUT_SCALE));
  return RESIDUAL ? v16_add(y, v16_load(residuals)) : y;
}

#ifdef OUT_NORM
// A row of `width` outputs, a multiple of 16, normed with `weights` and joined.
static inline void norm_and_join(float *row, const float *weights, const float *residuals, int width) {
  const v16 inverse = v16_set(inverse_spread(row, width, 0.0f, EPS));
  for (int o = 0; o < width; o += 16) {
    const v16 y = v16_mul(v16_mul(v16_load(row + o), inverse), v16_load(weights + o));
    v16_store(row + o, joined(y, RESIDUAL ? residuals + o : 0));
  }
}
#endif
