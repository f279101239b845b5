// Products with e4m3: A operands are bfloat16, which holds all of its numbers, and x is rounded to bfloat16. A step's products are summed from zero and
// multiplied with the scale of the row then. The format's header defines what weights.cuh lists.
#pragma once
#include "cells.cuh"
#include "formats.cuh"

typedef FloatStep Step;

typedef uint4 XCell;  // what a lane contributes of a token to a step

// The eight numbers of x of lane (g, t), of token g: those that multiply the words of the lane's chunk.
DEVICE void read_cell(float (&v)[8], const float *block, int t) { read_fours(v, block + 4 * t, block + 4 * t + 16); }
DEVICE XCell round_cell(const float (&v)[8]) {  // pairs in the order of e4m3_pairs
  return make_uint4(pack_bf16(v[0], v[2]), pack_bf16(v[1], v[3]), pack_bf16(v[4], v[6]), pack_bf16(v[5], v[7]));
}

struct Tokens {  // B operands of both mma, of token g
  u32 b[4];
};
DEVICE Tokens tokens_at(const u8 *cell) {
  const uint4 b = *(const uint4 *)cell;
  return {{b.x, b.y, b.z, b.w}};
}

// A step: c += W x. c[0], c[1] are row g of tokens 2t, 2t + 1; c[2], c[3] row g + 8 of the same.
DEVICE void multiply(float (&c)[4], const Step &w, const Tokens &x) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  mma_bf16(sum, w.a[0], x.b[0], x.b[1]);
  mma_bf16(sum, w.a[1], x.b[2], x.b[3]);
  c[0] = fmaf(sum[0], w.scale.x, c[0]), c[1] = fmaf(sum[1], w.scale.x, c[1]);
  c[2] = fmaf(sum[2], w.scale.y, c[2]), c[3] = fmaf(sum[3], w.scale.y, c[3]);
}

// --- single numbers

DEVICE int lane_with(int column) { return column % 16 / 4; }
