// The arithmetic of sampling, token by token: noise, penalties, weights for top_p. Every score is one float32 expression of one token, and
// what is summed over tokens is integer, so that no bit depends on the backend or on how a row is divided. tinyvllm/ops/sample.py computes
// the same bits; fused multiply-add is where the compiler of that reference puts it.
//
// A plain C subset as order.h. The row's parameters are passed by value: keep them in registers, not in device memory.
//
// Threefry-2x32: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Logarithm: Moshier's Cephes, logf.
#pragma once
#include "order.h"
#include "params.h"

// --- noise

// The first of the two words that Threefry-2x32, 20 rounds, makes of the key and the counter (a, b).
DEVICE_FN u32 threefry(u32 key0, u32 key1, u32 a, u32 b) {
  const u32 key2 = key0 ^ key1 ^ 0x1BD11BDAu;
#define ROUND(r) a += b, b = (b << r | b >> (32 - r)) ^ a
#define EVEN_ROUNDS ROUND(13), ROUND(15), ROUND(26), ROUND(6)
#define ODD_ROUNDS ROUND(17), ROUND(29), ROUND(16), ROUND(24)
  a += key0, b += key1;
  EVEN_ROUNDS, a += key1, b += key2 + 1;
  ODD_ROUNDS, a += key2, b += key0 + 2;
  EVEN_ROUNDS, a += key0, b += key1 + 3;
  ODD_ROUNDS, a += key1, b += key2 + 4;
  EVEN_ROUNDS, a += key2;
#undef ROUND
#undef EVEN_ROUNDS
#undef ODD_ROUNDS
  return a;
}

// ln x = exponent * ln 2 + ln(rest + 1), where ln(rest + 1) = rest + square * bend.
typedef struct {
  float exponent, rest, square, bend;
} LogParts;

DEVICE_FN LogParts log_parts(float x) {
  const int bits = (int)bits_of_float(x) - 0x3F3504F3;
  const float rest = float_from_bits((u32)((bits & 0x7FFFFF) + 0x3F3504F3)), m = rest + -1.0f;
  float y = fmadd(m, 7.0376836292e-2f, -1.1514610310e-1f);
  y = fmadd(y, m, 1.1676998740e-1f);
  y = fmadd(y, m, -1.2420140846e-1f);
  y = fmadd(y, m, 1.4249322787e-1f);
  y = fmadd(y, m, -1.6668057665e-1f);
  y = fmadd(y, m, 2.0000714765e-1f);
  y = fmadd(y, m, -2.4999993993e-1f);
  y = fmadd(y, m, 3.3333331174e-1f);
  LogParts parts;
  parts.exponent = (float)(bits >> 23), parts.rest = rest, parts.square = m * m, parts.bend = fmadd(y, m, -0.5f);
  return parts;
}

// Minus the noise of a token: ln(-ln(1 - u)), u of 31 random bits.
DEVICE_FN float negative_gumbel(u32 word) {
  const float scale = 1.0f / 2147483648.0f, ln2 = 0.6931471805599453f, t = (float)(int)(word >> 1) + 0.5f;
  const LogParts one_less = log_parts(fmadd(t, -scale, 1.0f));
  const float large = fmadd(one_less.exponent, -ln2, fmadd(-one_less.square, one_less.bend, -one_less.rest)) + 1.0f;
  const float cubic = t * fmadd(t, scale * 0.25f, 0.3333333333333333f), square = t * fmadd(cubic, scale, 0.5f);
  const float small = t * fmadd(square, scale, 1.0f) * scale;
  const LogParts exponential = log_parts(t * scale < 0.01f ? small : large);
  return fmadd(exponential.exponent, ln2, fmadd(exponential.square, exponential.bend, exponential.rest)) + -1.0f;
}

// The score of a token that is drawn by temperature: the Gumbel-max trick.
DEVICE_FN float perturbed(float x, u32 token, SampleParams params) {
  const u32 word = threefry(params.seed_low, params.seed_high, token, params.position);
  return fmadd(x, params.inverse_temperature, -negative_gumbel(word));
}

// --- penalties

// A logit after repetition, presence and frequency penalties. `seen`: how often the token is in the output; `prompted`: whether the prompt
// has it.
DEVICE_FN float penalized(float x, int seen, int prompted, SampleParams params) {
  const float repeated = x > 0.0f ? x / params.repetition : x * params.repetition;
  const float least = seen > 0 || prompted > 0 ? repeated : x;
  return fmadd(-params.frequency, (float)seen, least - (seen > 0 ? params.presence : 0.0f));
}

// --- weights for top_p

// e^((x - peak) * inverse) = mantissa * 2^exponent, x no NaN, mantissa from about 0.7 to 1.42. In units of 2^-40, rounded towards 0, it is
// the integer weight of a token; each backend makes that integer in its own way.
typedef struct {
  float mantissa;
  int exponent;
} ScaledExp;

DEVICE_FN ScaledExp scaled_exp(float x, float peak, float inverse) {
  float t = (x - peak) * inverse * 1.4426950408889634f;
  t = x < peak ? (t > -100.0f ? t : -100.0f) : 0.0f;  // an infinite peak minus itself is NaN
  const int n = (int)(t - 0.5f);
  const float r = t - (float)n;
  float y = fmadd(r, 0.0001535920892f, 0.001339262701f);
  y = fmadd(y, r, 0.009618384764f);
  y = fmadd(y, r, 0.05550347269f);
  y = fmadd(y, r, 0.2402264476f);
  y = fmadd(y, r, 0.6931471825f);
  y = fmadd(y, r, 1.0f);
  ScaledExp power;
  power.mantissa = y, power.exponent = n;
  return power;
}

// Logits below this weigh nothing: e^-28 is less than 2^-40.
DEVICE_FN float weightless_below(float peak, float inverse_temperature) { return peak - 28.0f / inverse_temperature; }

// total * top_p / 2^30 in 63 bits, at least 1: what the tokens that top_p keeps weigh together.
DEVICE_FN u64 share_of(u64 total, int top_p) {
  const u64 one = (u64)1 << 30, share = (total >> 30) * (u64)top_p + (((total & (one - 1)) * (u64)top_p) >> 30);
  return share > 1 ? share : 1;
}
