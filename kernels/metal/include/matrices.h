// Products by simdgroup_matrix (matmul.metal, matmul16.metal): their arguments as constants choose them, which row of weights belongs
// to which output, and what is done to a sum.
//
// Constants from outside: I, O, WEIGHT, NORM, EPS, GATHER, MATRICES, O1, O2, BIAS, RESIDUAL, ACTIVATION and SILU, as matmul.metal says.
#pragma once
#include "norm.h"

static_assert(!(SILU && RESIDUAL) && !(BIAS && MATRICES == 3) && SILU == (MATRICES == 2), "matrices: what does not go together");

#if NORM
#define NORM_ARGUMENT device const float *norm,
#define NORM_POINTER norm
#else
#define NORM_ARGUMENT
#define NORM_POINTER nullptr
#endif
#if GATHER
#define INDEX_ARGUMENT device const int *row_index,
#define ROW_OF(token) row_index[token]
#else
#define INDEX_ARGUMENT
#define ROW_OF(token) (token)
#endif
#if MATRICES == 1
#define WEIGHT_ARGUMENTS device const uchar *weight,
#define GIVE_WEIGHTS(all) all.of[0] = weight
#elif MATRICES == 2
#define WEIGHT_ARGUMENTS device const uchar *weight, device const uchar *weight_1,
#define GIVE_WEIGHTS(all) all.of[0] = weight, all.of[1] = weight_1
#else
#define WEIGHT_ARGUMENTS device const uchar *weight, device const uchar *weight_1, device const uchar *weight_2,
#define GIVE_WEIGHTS(all) all.of[0] = weight, all.of[1] = weight_1, all.of[2] = weight_2
#endif
#if BIAS && SILU
#define BIAS_ARGUMENTS device const float *bias, device const float *bias_1,
#define BIAS_1_POINTER bias_1
#elif BIAS
#define BIAS_ARGUMENTS device const float *bias,
#define BIAS_1_POINTER nullptr
#else
#define BIAS_ARGUMENTS
#define BIAS_1_POINTER nullptr
#endif
#if BIAS
#define BIAS_POINTER bias
#else
#define BIAS_POINTER nullptr
#endif
#if RESIDUAL
#define RESIDUAL_ARGUMENT device const float *residual,
#define RESIDUAL_POINTER residual
#else
#define RESIDUAL_ARGUMENT
#define RESIDUAL_POINTER nullptr
#endif

struct Matrices {
  device const uchar *of[MATRICES];
};
// The row of weights that output o is made of; with SILU there are two of them, and `second` asks for up's.
INLINE device const uchar *weight_row(Matrices all, int o, bool second) {
#if MATRICES == 1
  return all.of[0] + (ulong)o * ROW_BYTES;
#elif MATRICES == 2
  return (second ? all.of[1] : all.of[0]) + (ulong)o * ROW_BYTES;
#else
  return (o < O1 ? all.of[0] : o < O2 ? all.of[1] : all.of[2]) + (ulong)(o < O1 ? o : o < O2 ? o - O1 : o - O2) * ROW_BYTES;
#endif
}

struct Added { // what may be added to results
  device const float *bias, *bias_1, *residual;
};
#define GIVE_ADDED(added) added.bias = BIAS_POINTER, added.bias_1 = BIAS_1_POINTER, added.residual = RESIDUAL_POINTER

// Output o out of its sum, with SILU out of gate's and up's; `at` is its place in out.
INLINE float finished(float sum, float sum_1, float inverse, Added added, int o, ulong at) {
  float y = NORM ? sum * inverse : sum;
  if (BIAS) y += added.bias[o];
  if (ACTIVATION == GELU) y = gelu(y);
  if (SILU) {
    float up = NORM ? sum_1 * inverse : sum_1;
    if (BIAS) up += added.bias_1[o];
    y = silu(y) * up;
  }
  return RESIDUAL ? y + added.residual[at] : y;
}
