// Norms of rows of x [E] before a product, E = I of product.h: float32, partial sums in sixteen lanes, then v16_sum.
//   RMS    x / sqrt(mean(x^2) + eps) * w                LAYER  (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b
#pragma once
#include "params.h"
#include "product.h"
#include "spread.h"

#ifndef NORM
#define NORM RMS
#endif

// The weights, which NO_NORM has not: x is multiplied as it is.
#if NORM == NO_NORM
#define NORM_ARGUMENT
#define norm 0
#else
#define NORM_ARGUMENT const float *norm,
#endif

// An argument that only LAYER has.
#if NORM == LAYER
#define NORM_BIAS_ARGUMENT const float *norm_bias,
#else
#define NORM_BIAS_ARGUMENT
#define norm_bias 0
#endif

// The normed row, in the form that the weights want. `bias` is read by LAYER only.
static inline void prepare_normed(uint8_t *row, const float *x, const float *weight, const float *bias) {
#if NORM == NO_NORM
  prepare_row(row, x);
#else
  const float middle = NORM == LAYER ? mean_of(x, I) : 0.0f, inverse = inverse_spread(x, I, middle, EPS);
  v16 odd = v16_set(0.0f);
  for (int i = 0; i < I; i += 32) {
    v16 y[2];
    UNROLL for (int h = 0; h < 2; h++) {
      v16 centred = NORM == LAYER ? v16_sub(v16_load(x + i + 16 * h), v16_set(middle)) : v16_load(x + i + 16 * h);
      y[h] = v16_mul(v16_mul(centred, v16_set(inverse)), v16_load(weight + i + 16 * h));
      if (NORM == LAYER) y[h] = v16_add(y[h], v16_load(bias + i + 16 * h));
    }
    prepare_32(row, i, y[0], y[1], &odd);
  }
  prepare_end(row, odd);
#endif
}
