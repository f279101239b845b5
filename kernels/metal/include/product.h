// Products of float32 x with weights as stored in files: the one order of arithmetic of the kernels for up to sixteen rows.
//
// Constants from outside: WEIGHT and I, as weights.h says. x on a border of 16 bytes.
//
// A SIMD group goes through a row of weights in STEPs of 32 lanes, in SUBS rounds each; in a round a lane has eight columns, twice four
// consecutive ones (column_of). A lane's share of a row does not depend on how many rows of x or of weights are computed together.
// A round is a plane of the lane's eight bytes of quants (weights.h).
//
// The order, for one output: a lane goes through its columns, rounds ascending, and adds each with sum = fma(w, x, sum) in float32; then
// lanes are added in pairs 16, 8, 4, 2 and 1 apart. w is the weight's exact value (with a minimum or an offset: scale * q exact, and the other
// added with one rounding, as in tinyvllm/quant/codecs.py), and x is not rounded.
#pragma once
#include "params.h"
#include "weights.h"

#define STEPS (((I) + STEP - 1) / STEP)

// Whether a lane has a share in a step: the last one may be short.
INLINE bool has_share(int step, int lane) { return (I) % STEP == 0 ? step < STEPS : step * STEP + column_of(lane, 0, 0) < (I); }

INLINE float add_four(float sum, float4 w, float4 x) { return fma(w.w, x.w, fma(w.z, x.z, fma(w.y, x.y, fma(w.x, x.x, sum)))); }

// --- sums over lanes

// The lowest power of two that is n or more, up to 128.
static constexpr int power_above(int n) {
  return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : n <= 8 ? 8 : n <= 16 ? 16 : n <= 32 ? 32 : n <= 64 ? 64 : 128;
}

// Sums COUNT (a power of two) values over all lanes and distributes the sums: afterwards values[i] of a lane is sum scatter_sums(...) + i,
// for i < COUNT / 32, or for i = 0. Each sum has the bits of sum_lanes: in each round a lane hands over the half that it does not keep.
template <int COUNT> INLINE int scatter_sums(thread float *values, int lane) {
  int first = 0, remaining = COUNT;
#pragma unroll
  for (int apart = 16; apart; apart /= 2) {
    if (remaining == 1) {
      values[0] += simd_shuffle_xor(values[0], (ushort)apart);
      continue;
    }
    remaining /= 2;
    const bool upper = (lane & apart) != 0;
#pragma unroll
    for (int i = 0; i < remaining; i++) {
      const float kept = upper ? values[i + remaining] : values[i], sent = upper ? values[i] : values[i + remaining];
      values[i] = kept + simd_shuffle_xor(sent, (ushort)apart);
    }
    first += upper ? remaining : 0;
  }
  return first;
}
// Whether this lane writes its sums: where several lanes hold the same sum, one of them does.
template <int COUNT> INLINE bool is_writer(int lane) { return COUNT >= 32 || (lane & (32 / COUNT - 1)) == 0; }

// --- activations

// The tanh form: x / 2 * (1 + tanh u) = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
INLINE float gelu(float x) { return x / (1.0f + precise::exp(fma(0.044715f, x * x * x, x) * -1.5957691216057308f)); }
INLINE float silu(float x) { return x / (1.0f + precise::exp(-x)); }

// Of gate and up: silu(gate) * up; gelu(gate) * up if GATE_GELU; with GATE_LIMIT and GATE_ALPHA gpt-oss's gate, min(gate, limit) *
// sigmoid(alpha min(gate, limit)) * (up within +-limit, + 1). A NaN stays one.
INLINE float gated(float gate, float up) {
#ifdef GATE_LIMIT
  const float low = gate > GATE_LIMIT ? GATE_LIMIT : gate, near = up > GATE_LIMIT ? GATE_LIMIT : up < -GATE_LIMIT ? -GATE_LIMIT : up;
  return low / (1.0f + precise::exp(-GATE_ALPHA * low)) * (near + 1.0f);
#elif defined(GATE_GELU)
  return gelu(gate) * up;
#else
  return silu(gate) * up;
#endif
}
