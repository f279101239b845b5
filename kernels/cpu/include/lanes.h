// The vocabulary of the CPU kernels: sixteen float32 side by side, and the few things done to them. A kernel is written once, in these
// words; each instruction set says what they are. `lanes_plain.h` is the definition, in loops; the others must agree with it but for
// the rounding that fused multiply-add saves.
//
//   v16   sixteen float32            w16   sixteen 32-bit words of packed weights            i16   sixteen int32
#pragma once
#include "numbers.h"

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

// Before a loop whose arrays are to be registers.
#ifdef LANES_PLAIN
#define UNROLL _Pragma("clang loop unroll(disable)")  // nothing is in registers anyway, and unrolled it takes seconds to compile
#else
#define UNROLL _Pragma("clang loop unroll(full)")
#endif

#ifdef LANES_AVXVNNI
#define LANES_AVX2  // with one more extension
#endif
#ifdef LANES_AMX
#define LANES_AVX512  // with tiles for products of many rows (tiles.h)
#endif
#if defined(LANES_AVX512)
#include "lanes_avx512.h"
#elif defined(LANES_AVX2)
#include "lanes_avx2.h"
#elif defined(LANES_NEON)
#include "lanes_neon.h"
#else
#include "lanes_plain.h"
#endif

// v16_sum and v16_max_of of each of four, to to[4].
#ifndef HAS_FOUR
static inline void v16_sum_four(float *to, const v16 *a) {
  for (int i = 0; i < 4; i++) to[i] = v16_sum(a[i]);
}
static inline void v16_max_four(float *to, const v16 *a) {
  for (int i = 0; i < 4; i++) to[i] = v16_max_of(a[i]);
}
#endif

// Numbers rounded to bfloat16.
static inline v16 v16_round_bf16(v16 x) {
  uint16_t rounded[16];
  v16_store_bf16(rounded, x);
  return v16_load_bf16(rounded);
}

// 2^x for x of at most 0: 2e-7 off at most relative to the result, 1 for 0, and 0 for -infinity and below -100: neither a result nor its product with
// a scale is subnormal, which takes processors a hundred times as long. The polynomial is 2^r - 1 over r for r from 0 to 1, fitted for the least relative error of 2^r.
static inline v16 v16_exp2(v16 x) {
  const v16 r = v16_fraction(x);
  v16 y = v16_set(1.865033719e-3f);
  y = v16_fma(y, r, v16_set(9.022697415e-3f));
  y = v16_fma(y, r, v16_set(5.579448357e-2f));
  y = v16_fma(y, r, v16_set(2.401666025e-1f));
  y = v16_fma(y, r, v16_set(6.931510350e-1f));
  y = v16_fma(y, r, v16_set(1.0f));
  return v16_zero_below(v16_scale2(y, v16_sub(x, r)), x, v16_set(-100.0f));
}

// e^x, 2e-7 off at most relative to the result; 0 below -87. Reduction by ln 2 in two parts and polynomial of Moshier's Cephes, `expf`.
static inline v16 v16_exp(v16 x) {
  v16 low = v16_set(-87.0f), high = v16_set(88.0f);
  v16 within = v16_min(high, v16_max(low, x));  // of a NaN and a number, min and max give their second: a NaN stays one
  v16 n = v16_round(v16_mul(within, v16_set(1.44269504f)));
  v16 r = v16_fma(n, v16_set(-0.693359375f), within);
  r = v16_fma(n, v16_set(2.12194440e-4f), r);
  v16 y = v16_set(1.9875691500e-4f);
  y = v16_fma(y, r, v16_set(1.3981999507e-3f));
  y = v16_fma(y, r, v16_set(8.3334519073e-3f));
  y = v16_fma(y, r, v16_set(4.1665795894e-2f));
  y = v16_fma(y, r, v16_set(1.6666665459e-1f));
  y = v16_fma(y, r, v16_set(5.0000001201e-1f));
  y = v16_add(v16_fma(v16_mul(r, r), y, r), v16_set(1.0f));
  return v16_zero_below(v16_scale2(y, n), x, low);  // y * 2^n; 0 where x < low
}
