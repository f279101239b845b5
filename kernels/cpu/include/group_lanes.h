// Sixteen groups of weights side by side: a vector has one number of each, so that a lane computes what scalar code would, in its order.
//
// The compiler's own vectors, for every instruction set. A product and the sum after it are rounded apart, whatever the flags say, because
// numpy and llama.cpp's quantizers round them so.
#pragma once
#include "lanes.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#define LANES 16

typedef float floats __attribute__((vector_size(64), may_alias));
typedef int32_t ints __attribute__((vector_size(64), may_alias));

INLINE floats splat(float x) { return (floats){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// a where the mask is set (-1), else b.
INLINE floats pick(ints mask, floats a, floats b) { return (floats)((mask & (ints)a) | (~mask & (ints)b)); }
INLINE floats smaller(floats a, floats b) { return pick(a < b, a, b); }
INLINE floats larger(floats a, floats b) { return pick(a > b, a, b); }
INLINE floats magnitude(floats a) { return (floats)((ints)a & 0x7FFFFFFF); }

// a / b, and 0 where b is 0 or so small that the quotient is infinite.
INLINE floats divided(floats a, floats b) {
  const floats quotient = a / b;
  return pick((b != 0.0f) & (magnitude(quotient) <= 0x1.fffffep127f), quotient, splat(0));
}

INLINE floats square_root(floats a) {
  floats root;
  for (int i = 0; i < LANES; i++) root[i] = __builtin_sqrtf(a[i]);
  return root;
}

// To the nearest whole number, ties to even, from low to high; NaN becomes low. The sum's last bit is worth 1.
INLINE floats rounded(floats a, float low, float high) {
  const floats whole = a + 0x1.8p23f - 0x1.8p23f;
  return smaller(larger(whole, splat(low)), splat(high));
}

// The number of largest magnitude in each lane, the first of several.
INLINE floats largest(const floats *x, const int n) {
  floats found = x[0];
  for (int j = 1; j < n; j++) found = pick(magnitude(x[j]) > magnitude(found), x[j], found);
  return found;
}

INLINE floats halves_of(const floats a, uint16_t *bits) {  // the float16 of each lane, as numbers
  _Alignas(64) float numbers[LANES];
  *(floats *)numbers = a;
  v16_store_f16(bits, v16_load(numbers));
  v16_store(numbers, v16_load_f16(bits));
  return *(const floats *)numbers;
}
