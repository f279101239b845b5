// Activations and caps of sixteen numbers, in float32.
#pragma once
#include "lanes.h"

// The tanh form of GELU: x / 2 * (1 + tanh u) = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline v16 gelu(v16 x) {
  v16 cube = v16_mul(v16_mul(x, x), x);
  v16 u = v16_mul(v16_fma(v16_set(0.044715f), cube, x), v16_set(-1.5957691216057308f));  // -2 sqrt(2 / pi)
  return v16_div(x, v16_add(v16_set(1.0f), v16_exp(u)));
}

static inline v16 silu(v16 x) { return v16_div(x, v16_add(v16_set(1.0f), v16_exp(v16_sub(v16_set(0.0f), x)))); }

static inline v16 sigmoid(v16 x) { return v16_div(v16_set(1.0f), v16_add(v16_set(1.0f), v16_exp(v16_sub(v16_set(0.0f), x)))); }

// gate / (1 + e^(-alpha gate)) * (up + 1), of gates up to limit and ups from -limit to limit. A NaN stays one.
static inline v16 clamped_gate(v16 gate, v16 up, float alpha, float limit) {
  const v16 most = v16_set(limit), g = v16_min(most, gate), u = v16_min(most, v16_max(v16_set(-limit), up));
  return v16_mul(v16_mul(g, sigmoid(v16_mul(g, v16_set(alpha)))), v16_add(u, v16_set(1.0f)));
}

// cap * tanh(x / cap) = cap - 2 cap / (e^(2 x / cap) + 1): 1e-7 cap off at most, since v16_exp ends where tanh is 1.
static inline v16 capped(v16 x, float cap) {
  const v16 e = v16_exp(v16_mul(x, v16_set(2.0f / cap)));
  return v16_sub(v16_set(cap), v16_div(v16_set(2.0f * cap), v16_add(e, v16_set(1.0f))));
}
