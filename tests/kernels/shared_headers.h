// One result of every function in kernels/include, for test_shared_headers.py: the same text for C, CUDA C++ and Metal. IN and OUT: the
// pointers' types.
//
//   out  [24] uint32  the bits of every result
//   in   [8] uint32   bits of x, peak and inverse temperature; a token; seed low, seed high, position; how often the token was seen
#include "sampling.h"
#include "formats.h"

DEVICE_FN void call_every_function(OUT out, IN in) {
  const float x = float_from_bits(in[0]), peak = float_from_bits(in[1]), inverse = float_from_bits(in[2]);
  SampleParams params;
  params.seen_row = params.bias_row = 0;
  params.seed_low = in[4], params.seed_high = in[5], params.position = in[6];
  params.inverse_temperature = inverse, params.top_k = 5, params.top_p = TOP_P_ONE / 3, params.min_p = -1.5f;
  params.repetition = 1.3f, params.presence = 0.4f, params.frequency = 0.2f;
  const u32 word = threefry(in[4], in[5], in[3], in[6]);
  const LogParts parts = log_parts((float)(word >> 8) + 0.5f);
  const ScaledExp power = scaled_exp(x, peak, inverse);
  const Candidate best = better(make_candidate(order_or_nan(x), in[3]), better(no_candidate(), make_candidate(order_or_nan(peak), in[3] + 1)));
  const u64 key = key_of(x, in[3]), share = share_of((u64)in[4] << 20 | in[5], params.top_p);
  u32 i = 0;
  out[i++] = order_of(x);
  out[i++] = order_or_nan(x);
  out[i++] = bits_of_float(float_from_order(order_of(x)));
  out[i++] = (u32)key;
  out[i++] = (u32)(key >> 32);
  out[i++] = (u32)token_of_key(key);
  out[i++] = best.order;
  out[i++] = best.token;
  out[i++] = (u32)token_of(best);
  out[i++] = word;
  out[i++] = bits_of_float(parts.exponent);
  out[i++] = bits_of_float(parts.rest);
  out[i++] = bits_of_float(parts.square);
  out[i++] = bits_of_float(parts.bend);
  out[i++] = bits_of_float(negative_gumbel(word));
  out[i++] = bits_of_float(perturbed(x, in[3], params));
  out[i++] = bits_of_float(penalized(x, (int)in[7], (int)(in[7] & 1), params));
  out[i++] = bits_of_float(power.mantissa);
  out[i++] = (u32)power.exponent;
  out[i++] = bits_of_float(weightless_below(peak, inverse));
  out[i++] = (u32)share;
  out[i++] = (u32)(share >> 32);
  out[i++] = (u32)sizeof(SampleParams);
  out[i++] = RMS + 2 * LAYER + 4 * NO_ACTIVATION + 8 * GELU + Q8_0_BLOCK_BYTES + Q4_0_BLOCK_BYTES + Q4_K_BLOCK_BYTES + F32;
}
