// The arithmetic of a draw, token by token: bit for bit what kernels/cpu/sample.c and tinyvllm/ops/sample.py compute.
//
// Numbers are compared by their order bits, not as floats: a GPU that takes subnormal numbers for zeros then still ranks them. Only where
// arithmetic itself meets a subnormal number (a penalty or a bias of less than 1e-37 apart) may it round otherwise than the CPU.
//
// Threefry-2x32: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Logarithm: Moshier's Cephes, logf.
#pragma once
#include "gpu.h"

enum : uint {
  NO_NUMBER = 0xFFFFFFFFu,  // stands for a NaN where order bits are compared: above all numbers
  LOWEST = 0x00800000u,     // the order bits of -inf
  HIGHEST = 0xFF800000u,    // of +inf: what is beyond these two is a NaN
};

struct line {  // what a row asks for
  int seen_row, bias_row;
  uint seed_low, seed_high, position;
  float inverse_temperature;  // 0: no noise, no filters
  int top_k, top_p;           // V: off; in units of 2^-30, 2^30: off
  float min_p;                // how far below the largest logit; -inf: off
  float repetition, presence, frequency;
};

// --- numbers as integers

INLINE uint order_of(float x) {  // compares as x does, both zeros alike; NO_NUMBER for a NaN
  const uint bits = as_type<uint>(x), order = bits >> 31 ? 0x80000000u - (bits & 0x7FFFFFFFu) : bits + 0x80000000u;
  return order - LOWEST <= HIGHEST - LOWEST ? order : NO_NUMBER;
}
INLINE float of_order(uint order) { return as_type<float>(order >> 31 ? order - 0x80000000u : 0x80000000u | (0x80000000u - order)); }

// The best token so far, by the order bits of its score: none while that is LOWEST, none ever if it is NO_NUMBER.
struct choice {
  uint order, token;
};
INLINE choice choice_of(uint order, uint token) {
  choice made;
  made.order = order, made.token = token;
  return made;
}
INLINE choice nothing() { return choice_of(LOWEST, NO_NUMBER); }

INLINE choice better(choice a, choice b) {  // of equals the lower token
  return b.order > a.order || (b.order == a.order && b.token < a.token) ? b : a;
}
INLINE int token_of(choice best) { return best.order == LOWEST || best.order == NO_NUMBER ? -1 : int(best.token); }

// --- noise

INLINE uint turned(uint word, uint left) { return word << left | word >> (32 - left); }

template <uint R0, uint R1, uint R2, uint R3> INLINE void stir(thread uint &a, thread uint &b) {
  a += b, b = turned(b, R0) ^ a;
  a += b, b = turned(b, R1) ^ a;
  a += b, b = turned(b, R2) ^ a;
  a += b, b = turned(b, R3) ^ a;
}

INLINE uint threefry(uint key0, uint key1, uint a, uint b) {  // the first of the two words
  const uint key2 = key0 ^ key1 ^ 0x1BD11BDAu;
  a += key0, b += key1;
  stir<13, 15, 26, 6>(a, b), a += key1, b += key2 + 1;
  stir<17, 29, 16, 24>(a, b), a += key2, b += key0 + 2;
  stir<13, 15, 26, 6>(a, b), a += key0, b += key1 + 3;
  stir<17, 29, 16, 24>(a, b), a += key1, b += key2 + 4;
  stir<13, 15, 26, 6>(a, b), a += key2;
  return a;
}

// ln x in two parts: the factor 2^exponent, and of the rest m + 1 the bend: m - ln(m + 1).
struct logarithm {
  float exponent, rest, square, bend;
};

INLINE logarithm take_apart(float x) {
  const int bits = as_type<int>(x) - 0x3F3504F3;
  const float rest = as_type<float>((bits & 0x7FFFFF) + 0x3F3504F3), m = rest + -1.0f;
  float y = fma(m, 7.0376836292e-2f, -1.1514610310e-1f);
  y = fma(y, m, 1.1676998740e-1f);
  y = fma(y, m, -1.2420140846e-1f);
  y = fma(y, m, 1.4249322787e-1f);
  y = fma(y, m, -1.6668057665e-1f);
  y = fma(y, m, 2.0000714765e-1f);
  y = fma(y, m, -2.4999993993e-1f);
  y = fma(y, m, 3.3333331174e-1f);
  logarithm parts;
  parts.exponent = float(bits >> 23), parts.rest = rest, parts.square = m * m, parts.bend = fma(y, m, -0.5f);
  return parts;
}

// Minus the noise of a token: ln(-ln(1 - u)), u of 31 random bits.
INLINE float negative_gumbel(uint word) {
  const float scale = 1.0f / 2147483648.0f, t = float(int(word >> 1)) + 0.5f, ln2 = 0.6931471805599453f;
  const logarithm one_less = take_apart(fma(t, -scale, 1.0f));
  const float large = fma(one_less.exponent, -ln2, fma(-one_less.square, one_less.bend, -one_less.rest)) + 1.0f;
  const float cubic = t * fma(t, scale * 0.25f, 0.3333333333333333f), square = t * fma(cubic, scale, 0.5f);
  const float small = t * fma(square, scale, 1.0f) * scale;
  const logarithm exponential = take_apart(t * scale < 0.01f ? small : large);
  return fma(exponential.exponent, ln2, fma(exponential.square, exponential.bend, exponential.rest)) + -1.0f;
}

INLINE float perturbed(float x, uint token, line asks) {
  return fma(x, asks.inverse_temperature, -negative_gumbel(threefry(asks.seed_low, asks.seed_high, token, asks.position)));
}

// --- penalties

INLINE float penalized(float x, int seen, int prompted, line asks) {
  const float repeated = x > 0.0f ? x / asks.repetition : x * asks.repetition;
  const float least = seen > 0 || prompted > 0 ? repeated : x;
  return fma(-asks.frequency, float(seen), least - (seen > 0 ? asks.presence : 0.0f));
}

// --- weights for top_p

// e^((x - peak) * inverse) in units of 2^-40, x no NaN. The last step is done in integers: no float of 41 bits becomes a long on the way.
INLINE ulong probability(float x, float peak, float inverse) {
  float t = (x - peak) * inverse * 1.4426950408889634f;
  t = x < peak ? (t > -100.0f ? t : -100.0f) : 0.0f;  // an infinite peak minus itself is NaN
  const int n = int(t - 0.5f);
  const float r = t - float(n);
  float y = fma(r, 0.0001535920892f, 0.001339262701f);
  y = fma(y, r, 0.009618384764f);
  y = fma(y, r, 0.05550347269f);
  y = fma(y, r, 0.2402264476f);
  y = fma(y, r, 0.6931471825f);
  y = fma(y, r, 1.0f);
  const uint bits = as_type<uint>(y);
  const int left = int(bits >> 23) - 150 + 40 + n;
  const ulong digits = (bits & 0x7FFFFFu) | 0x800000u;
  return left >= 0 ? digits << left : left > -24 ? digits >> -left : 0;
}

INLINE ulong share_of(ulong total, int top_p) {  // total * top_p / 2^30 in 63 bits
  const ulong one = 1u << 30, share = (total >> 30) * ulong(top_p) + (((total & (one - 1)) * ulong(top_p)) >> 30);
  return share > 1 ? share : 1;
}
