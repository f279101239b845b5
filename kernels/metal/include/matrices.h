// Products by simdgroup_matrix (matmul.metal, matmul16.metal): their arguments as constants select them, which row of weights an output is
// computed from, and the operations after the sum.
//
// Constants from outside: I, O, WEIGHT, NORM, EPS, GATHER, MATRICES, O1, O2, BIAS, RESIDUAL, ACTIVATION, SILU and GATED, as matmul.metal says.
#pragma once
#include "norm.h"

static_assert(!(SILU && RESIDUAL) && !(BIAS && MATRICES == 3) && SILU == (MATRICES == 2), "matrices: switches that exclude each other");
static_assert(!(GATED && (SILU || RESIDUAL || ACTIVATION)), "matrices: a gate is multiplied with a product and its bias alone");

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
#define SET_WEIGHTS(matrices) matrices.of[0] = weight
#elif MATRICES == 2
#define WEIGHT_ARGUMENTS device const uchar *weight, device const uchar *weight_1,
#define SET_WEIGHTS(matrices) matrices.of[0] = weight, matrices.of[1] = weight_1
#else
#define WEIGHT_ARGUMENTS device const uchar *weight, device const uchar *weight_1, device const uchar *weight_2,
#define SET_WEIGHTS(matrices) matrices.of[0] = weight, matrices.of[1] = weight_1, matrices.of[2] = weight_2
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
#define UP_FIRST (BIAS_PITCH ? O : 0)  // of up's biases
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
// The row of weights of output o; with SILU there are two of them, and `second` selects up's.
INLINE device const uchar *weight_row(Matrices matrices, int o, bool second) {
#if MATRICES == 1
  return matrices.of[0] + (ulong)o * ROW_BYTES;
#elif MATRICES == 2
  return (second ? matrices.of[1] : matrices.of[0]) + (ulong)o * ROW_BYTES;
#else
  const int row = o < O1 ? o : o < O2 ? o - O1 : o - O2;
  return (o < O1 ? matrices.of[0] : o < O2 ? matrices.of[1] : matrices.of[2]) + (ulong)row * ROW_BYTES;
#endif
}

struct Epilogue {  // what may be added to results
  device const float *bias, *bias_1, *residual, *gate;
};
#define SET_EPILOGUE(epilogue)                                    \
  epilogue.bias = BIAS_POINTER, epilogue.bias_1 = BIAS_1_POINTER; \
  epilogue.residual = RESIDUAL_POINTER, epilogue.gate = out

// Output o of a row from its sum, with SILU from gate's and up's; `at` is its index in out, where GATED finds the gate.
INLINE float output_of(float sum, float sum_1, float inverse, Epilogue epilogue, int row, int o, ulong at) {
  const ulong own = (ulong)row * BIAS_PITCH + o;
  float y = NORM ? sum * inverse : sum;
  if (BIAS) y += epilogue.bias[own + (GATED ? UP_FIRST : 0)];
  if (ACTIVATION == GELU) y = gelu(y);
  if (SILU) {
    float up = NORM ? sum_1 * inverse : sum_1;
    if (BIAS) up += epilogue.bias_1[own + UP_FIRST];
    y = silu(y) * up;
  }
  if (GATED) y = silu(epilogue.gate[at]) * y;
  return RESIDUAL ? y + epilogue.residual[at] : y;
}

// --- fragments as the two numbers of a lane

INLINE simdgroup_float8x8 matrix_of(float2 pair) {
  simdgroup_float8x8 matrix;
  matrix.thread_elements()[0] = pair.x;
  matrix.thread_elements()[1] = pair.y;
  return matrix;
}
INLINE float2 pair_of(simdgroup_float8x8 matrix) { return float2(matrix.thread_elements()[0], matrix.thread_elements()[1]); }
