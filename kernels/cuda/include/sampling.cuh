// The arithmetic of a draw, token by token: bit for bit what kernels/cpu/sample.c and tinyvllm/ops/sample.py compute.
//
// Threefry-2x32: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Logarithm: Moshier's Cephes, logf.
#pragma once
#include "gpu.cuh"

#define INFINITE __int_as_float(0x7F800000)

enum : u32 {
  NO_NUMBER = 0xFFFFFFFFu,  // stands for a NaN where order bits are compared: above all numbers
  LOWEST = 0x00800000u,     // the order bits of -inf
};

struct line {  // what a row asks for
  int seen_row, bias_row;
  u32 seed_low, seed_high, position;
  float inverse_temperature;  // 0: no noise, no filters
  int top_k, top_p;           // V: off; in units of 2^-30, 2^30: off
  float min_p;                // how far below the largest logit; -inf: off
  float repetition, presence, frequency;
};

// --- numbers as integers

DEVICE u32 order_of(float x) {  // compares as x does, both zeros alike
  const u32 bits = __float_as_uint(x);
  return bits >> 31 ? 0x80000000u - (bits & 0x7FFFFFFFu) : bits + 0x80000000u;
}
DEVICE float of_order(u32 order) { return __uint_as_float(order >> 31 ? order - 0x80000000u : 0x80000000u | (0x80000000u - order)); }

// A score and its token as one number: the largest is the best, of equal scores the lowest token. 0: no token.
DEVICE u64 key_of(float score, int token) { return score > -INFINITE ? (u64)order_of(score) << 32 | (NO_NUMBER - (u32)token) : 0; }
constexpr u64 NAN_KEY = ~0ull;
DEVICE int token_of(u64 key) { return key == 0 || key == NAN_KEY ? -1 : (int)(NO_NUMBER - (u32)key); }

// --- noise

DEVICE u32 rotate(u32 word, int left) { return word << left | word >> (32 - left); }

template <int R0, int R1, int R2, int R3> DEVICE void mix(u32 &a, u32 &b) {
  a += b, b = rotate(b, R0) ^ a;
  a += b, b = rotate(b, R1) ^ a;
  a += b, b = rotate(b, R2) ^ a;
  a += b, b = rotate(b, R3) ^ a;
}

DEVICE u32 threefry(u32 key0, u32 key1, u32 a, u32 b) {  // the first of the two words
  const u32 key2 = key0 ^ key1 ^ 0x1BD11BDAu;
  a += key0, b += key1;
  mix<13, 15, 26, 6>(a, b), a += key1, b += key2 + 1;
  mix<17, 29, 16, 24>(a, b), a += key2, b += key0 + 2;
  mix<13, 15, 26, 6>(a, b), a += key0, b += key1 + 3;
  mix<17, 29, 16, 24>(a, b), a += key1, b += key2 + 4;
  mix<13, 15, 26, 6>(a, b), a += key2;
  return a;
}

// ln x in two parts: the factor 2^exponent, and of the rest m + 1 the bend: m - ln(m + 1).
struct logarithm {
  float exponent, rest, square, bend;
};

DEVICE logarithm take_apart(float x) {
  const int bits = __float_as_int(x) - 0x3F3504F3;
  const float rest = __int_as_float((bits & 0x7FFFFF) + 0x3F3504F3), m = rest + -1.0f;
  float y = fmaf(m, 7.0376836292e-2f, -1.1514610310e-1f);
  y = fmaf(y, m, 1.1676998740e-1f);
  y = fmaf(y, m, -1.2420140846e-1f);
  y = fmaf(y, m, 1.4249322787e-1f);
  y = fmaf(y, m, -1.6668057665e-1f);
  y = fmaf(y, m, 2.0000714765e-1f);
  y = fmaf(y, m, -2.4999993993e-1f);
  y = fmaf(y, m, 3.3333331174e-1f);
  return {(float)(bits >> 23), rest, m * m, fmaf(y, m, -0.5f)};
}

// Minus the noise of a token: ln(-ln(1 - u)), u of 31 random bits.
DEVICE float negative_gumbel(u32 word) {
  const float scale = 0x1p-31f, ln2 = 0.6931471805599453f, t = (float)(int)(word >> 1) + 0.5f;
  const logarithm one_less = take_apart(fmaf(t, -scale, 1.0f));
  const float large = fmaf(one_less.exponent, -ln2, fmaf(-one_less.square, one_less.bend, -one_less.rest)) + 1.0f;
  const float cubic = t * fmaf(t, 0x1p-33f, 0.3333333333333333f), square = t * fmaf(cubic, scale, 0.5f);
  const float small = t * fmaf(square, scale, 1.0f) * scale;
  const logarithm exponential = take_apart(t * scale < 0.01f ? small : large);
  return fmaf(exponential.exponent, ln2, fmaf(exponential.square, exponential.bend, exponential.rest)) + -1.0f;
}

DEVICE float perturbed(float x, int token, const line &line) {
  return fmaf(x, line.inverse_temperature, -negative_gumbel(threefry(line.seed_low, line.seed_high, (u32)token, line.position)));
}

// --- penalties

DEVICE float penalized(float x, int seen, int prompted, const line &line) {
  const float repeated = x > 0.0f ? x / line.repetition : x * line.repetition;
  const float least = seen > 0 || prompted > 0 ? repeated : x;
  return fmaf(-line.frequency, (float)seen, least - (seen > 0 ? line.presence : 0.0f));
}

// --- weights for top_p

// e^((x - peak) * inverse) in units of 2^-40, x no NaN.
DEVICE u64 probability(float x, float peak, float inverse) {
  float t = (x - peak) * inverse * 1.4426950408889634f;
  t = x < peak ? (t > -100.0f ? t : -100.0f) : 0.0f;  // an infinite peak minus itself is NaN
  const int n = (int)(t - 0.5f);
  const float r = t - (float)n;
  float y = fmaf(r, 0.0001535920892f, 0.001339262701f);
  y = fmaf(y, r, 0.009618384764f);
  y = fmaf(y, r, 0.05550347269f);
  y = fmaf(y, r, 0.2402264476f);
  y = fmaf(y, r, 0.6931471825f);
  y = fmaf(y, r, 1.0f);
  return (u64)(s64)(y * __uint_as_float((u32)(n + 40 + 127) << 23));
}

DEVICE u64 share_of(u64 total, u32 top_p) {  // total * top_p / 2^30 in 63 bits
  const u64 share = (total >> 30) * top_p + (((total & ((1u << 30) - 1)) * top_p) >> 30);
  return share > 1 ? share : 1;
}
