// Products of rows of x with weights in tiles, by tensor cores: the layout of the tiles, and the one order of arithmetic that all kernels
// keep, so that a row has the same bits whichever kernel computes it and whatever else is in the batch.
//
// Weights are the A operand of mma, sixteen rows of W at a time; tokens are its columns. A STEP is sixteen rows by 32 columns of W times
// eight tokens: two mma of k16, or one of k32. A lane is l = 4 g + t, g = 0 .. 7, t = 0 .. 3.
//
// Weights (O padded to 16 with rows of zeros, I a multiple of 32 and of the format's blocks): the bytes of a block of sixteen rows, one to
// eight steps, are contiguous, those of a tile of sixteen rows follow by ascending columns, and records (scales and the like) follow the
// quants of the whole matrix. What a lane holds of a block is in weights.cuh and the format's header.
//
// The order, for one output:
//     columns are cut into PIECES of 512 from 0, the last may be shorter; within a piece, one float32 accumulator from zero, steps
//                ascending
//     BF16, F16  x rounded to the weights' format; c = mma(c, ...) twice
//     packed     x rounded to int8 in groups of 32; dot exact in int32, with parts of 16 weights one for each half; for each dot
//                c = fmaf(dot, scale of W * scale of x, c), and with minimums then c = fmaf(minimum, -scale of x * sum of x, c)
//     pieces are added ascending, ((p0 + p1) + p2) + ..., then `finished`: + bias, activation, + residual
#pragma once
#include "weights.cuh"
#include "params.h"

constexpr int STEP = 32;    // columns of a step
constexpr int PIECE = 512;  // columns that are summed in one accumulator
constexpr int PIECE_STEPS = PIECE / STEP;

DEVICE constexpr int pieces_of(int columns) { return (columns + PIECE - 1) / PIECE; }
DEVICE constexpr int tiles_of(int outputs) { return (outputs + 15) / 16; }

// --- after the pieces: each of these is one float32 operation, in this order

// The tanh form: x / 2 * (1 + tanh u) = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
DEVICE float gelu(float x) {
  const float cube = x * x * x;
  return x / (1.0f + expf(fmaf(0.044715f, cube, x) * -1.5957691216057308f));
}
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

// Of gate and up: silu(gate) * up; gelu(gate) * up if GATE_GELU; with GATE_LIMIT and GATE_ALPHA gpt-oss's gate, min(gate, limit) *
// sigmoid(alpha min(gate, limit)) * (up within +-limit, + 1). A NaN stays one.
DEVICE float gated(float gate, float up) {
#ifdef GATE_LIMIT
  const float low = gate > GATE_LIMIT ? GATE_LIMIT : gate, near = up > GATE_LIMIT ? GATE_LIMIT : up < -GATE_LIMIT ? -GATE_LIMIT : up;
  return low / (1.0f + expf(-GATE_ALPHA * low)) * (near + 1.0f);
#elif defined(GATE_GELU)
  return gelu(gate) * up;
#else
  return silu(gate) * up;
#endif
}

#define GATE 2  // a value of RESIDUAL

// From the sum of a product to its output; `bias` is read only if BIASED. `residual`, not read if RESIDUAL_KIND is 0, is added, or if it is
// GATE, its silu multiplies the product.
template <bool BIASED, int ACTIVATED, int RESIDUAL_KIND> DEVICE float finished(float y, const float *bias, const float *residual) {
  if constexpr (BIASED) y = y + *bias;
  if constexpr (ACTIVATED == GELU) y = gelu(y);
  if constexpr (RESIDUAL_KIND == 1) y = y + *residual;
  if constexpr (RESIDUAL_KIND == GATE) y = silu(*residual) * y;
  return y;
}
