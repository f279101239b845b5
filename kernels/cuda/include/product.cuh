// Products of rows of x with weights in tiles, by tensor cores: what a lane holds, how x is rounded, and the one order of arithmetic that
// all kernels keep, so that a row's bits are the same whichever of them computes it, and in whatever company.
//
// Weights are operand A of mma, sixteen rows of W at a time, and tokens are its columns. A STEP is 16 rows by 32 columns of W against eight
// tokens: two mma of k16, or one of k32. Lane l = 0 .. 31, g = l / 4, t = l % 4.
//
// Weights (O padded to 16 with rows of zeros, I % 32 == 0); a step's bytes stand together, those of a tile of 16 rows by ascending columns:
//     BF16, F16  [O/16][I/16][32 lanes][8]     W[g][2t], W[g][2t+1], W[g+8][the same], W[g][2t+8], W[g][2t+9], W[g+8][the same]
//     Q8_0       [O/16][I/32][32 lanes][16]    W[g][4t..4t+3], W[g+8][the same], W[g][4t+16..4t+19], W[g+8][the same], int8
//     Q4_0       [O/16][I/32][32 lanes][8]     bytes 4t..4t+3 of row g's block in a file, then those of row g+8: low halves are
//                                              columns 4t..4t+3, high halves columns 4t+16..4t+19, each + 8
//     behind all quants  [O/16][I/32][8 g][2] half     the scales of rows g and g+8
//
// The order, for one output:
//     columns are cut into PIECES of 512 from 0, the last may be shorter; within a piece, one float32 accumulator from zero, steps
//                ascending
//     BF16, F16  x rounded to the weights' format; c = mma(c, ...) twice
//     Q8_0, Q4_0 x rounded to int8 in blocks of 32; dot exact in int32; c = fmaf(dot, scale of W * scale of x, c)
//     pieces are added ascending, ((p0 + p1) + p2) + ..., then what `finished` says: + bias, activation, + residual
#pragma once
#include "formats.cuh"

constexpr int STEP = 32;         // columns of a step
constexpr int PIECE = 512;       // columns that are summed before they meet others
constexpr int PIECE_STEPS = PIECE / STEP;

DEVICE constexpr bool quantised(int format) { return format == Q8_0 || format == Q4_0; }
DEVICE constexpr int pieces_of(int columns) { return (columns + PIECE - 1) / PIECE; }
DEVICE constexpr int tiles_of(int outputs) { return (outputs + 15) / 16; }
// Bytes of a step's numbers, and of its scales behind all numbers.
DEVICE constexpr int step_bytes(int format) { return format == Q4_0 ? 256 : format == Q8_0 ? 512 : 1024; }
constexpr int SCALE_BYTES = 32;

// --- operands as a lane holds them

template <int FORMAT> struct Weights { // BF16, F16: A of two mma
  u32 a[2][4];
};
template <> struct Weights<Q8_0> {
  u32 a[4];
  u32 scales; // two half: of rows g and g + 8
};
template <> struct Weights<Q4_0> {
  u32 a[2];
  u32 scales;
};

template <int FORMAT> struct Tokens { // BF16, F16: B of two mma, of token g
  u32 b[4];
};
struct QuantTokens {
  u32 b[2];       // of token g
  float scale[2]; // of tokens 2t and 2t + 1, to whom the results belong
  int sum[2];     // of their 32 quants; only Q4_0 reads it
};
template <> struct Tokens<Q8_0> : QuantTokens {};
template <> struct Tokens<Q4_0> : QuantTokens {};

// --- a step: c += W x. Results: c[0], c[1] row g of tokens 2t, 2t + 1; c[2], c[3] row g + 8 of the same.

DEVICE void multiply(float (&c)[4], const Weights<BF16> &w, const Tokens<BF16> &x) {
  mma_bf16(c, w.a[0], x.b[0], x.b[1]);
  mma_bf16(c, w.a[1], x.b[2], x.b[3]);
}
DEVICE void multiply(float (&c)[4], const Weights<F16> &w, const Tokens<F16> &x) {
  mma_f16(c, w.a[0], x.b[0], x.b[1]);
  mma_f16(c, w.a[1], x.b[2], x.b[3]);
}
DEVICE void add_dots(float (&c)[4], const int (&dot)[4], u32 scales, const QuantTokens &x) {
  const float2 w = unpack_f16(scales);
  c[0] = fmaf((float)dot[0], w.x * x.scale[0], c[0]);
  c[1] = fmaf((float)dot[1], w.x * x.scale[1], c[1]);
  c[2] = fmaf((float)dot[2], w.y * x.scale[0], c[2]);
  c[3] = fmaf((float)dot[3], w.y * x.scale[1], c[3]);
}
DEVICE void multiply(float (&c)[4], const Weights<Q8_0> &w, const Tokens<Q8_0> &x) {
  int dot[4] = {0, 0, 0, 0};
  mma_s8(dot, w.a, x.b[0], x.b[1]);
  add_dots(c, dot, w.scales, x);
}
DEVICE void multiply(float (&c)[4], const Weights<Q4_0> &w, const Tokens<Q4_0> &x) {
  const u32 low = 0x0F0F0F0Fu; // 0 .. 15 are the same numbers with and without a sign
  const u32 a[4] = {w.a[0] & low, w.a[1] & low, w.a[0] >> 4 & low, w.a[1] >> 4 & low};
  const int first = -8 * x.sum[0], second = -8 * x.sum[1];
  int dot[4] = {first, second, first, second};
  mma_s8(dot, a, x.b[0], x.b[1]);
  add_dots(c, dot, w.scales, x);
}

// --- x on its way to a step: a CELL is what lane (g, t) contributes of token g, eight of the block's 32 numbers

// The cell's numbers out of a row, `block` the first of its 32 columns. BF16, F16: 2t, 2t+1, 2t+8, 2t+9, 2t+16, ...; else 4t..4t+3,
// 4t+16..4t+19. A warp reads whole sectors of 32 bytes.
template <int FORMAT> DEVICE void read_cell(float (&v)[8], const float *block, int t) {
  if constexpr (quantised(FORMAT)) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 four = *(const float4 *)(block + 4 * t + 16 * i);
      v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 two = *(const float2 *)(block + 2 * t + 8 * i);
      v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
  }
}

// BF16, F16: the words b of Tokens.
template <int FORMAT> DEVICE uint4 round_cell(const float (&v)[8]) {
  const u32 b0 = pack_pair<FORMAT>(v[0], v[1]), b1 = pack_pair<FORMAT>(v[2], v[3]);
  return make_uint4(b0, b1, pack_pair<FORMAT>(v[4], v[5]), pack_pair<FORMAT>(v[6], v[7]));
}

DEVICE u32 quantised_word(const float *v, float inverse) {
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) word |= ((u32)__float2int_rn(v[i] * inverse) & 255u) << 8 * i;
  return word;
}

// Q8_0, Q4_0: the words b, and scale and sum of the whole block in all four of its lanes. Every lane of the warp must come along. A block
// with an inf or a NaN in it gets a scale that makes the whole row NaN, as it would be with float weights.
DEVICE uint2 quantise_cell(const float (&v)[8], float &scale, int &sum) {
  u32 bits = 0; // of the largest |x|: those of numbers without a sign rise with them, and NaN's are the highest
#pragma unroll
  for (int i = 0; i < 8; i++) bits = max(bits, __float_as_uint(v[i]) & 0x7FFFFFFFu);
  bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, 1));
  bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, 2));
  const float most = __uint_as_float(bits), inverse = most > 1e-36f ? 127.0f / most : 0.0f; // below, 127 / most is infinite
  const uint2 q = make_uint2(quantised_word(v, inverse), quantised_word(v + 4, inverse));
  sum = __dp4a((int)q.x, 0x01010101, __dp4a((int)q.y, 0x01010101, 0));
  sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  sum += __shfl_xor_sync(ALL_LANES, sum, 2);
  scale = most / 127.0f;
  return q;
}

// --- behind the pieces: each of them one float32 operation, in this order

#define NO_ACTIVATION 0
#define GELU 1

// The tanh form: x / 2 * (1 + tanh u) = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
DEVICE float gelu(float x) {
  const float cube = x * x * x;
  return x / (1.0f + expf(fmaf(0.044715f, cube, x) * -1.5957691216057308f));
}
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

// A product's sum to its output; `bias` and `residual` are read only where the switch of the same name is on.
template <bool BIASED, int ACTIVATED, bool ADDED> DEVICE float finished(float y, const float *bias, const float *residual) {
  if constexpr (BIASED) y = y + *bias;
  if constexpr (ACTIVATED == GELU) y = gelu(y);
  if constexpr (ADDED) y = y + *residual;
  return y;
}
