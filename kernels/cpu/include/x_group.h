// A row of x as products with integer weights want it: groups of 32 numbers, rounded to int8 with one scale each.
#pragma once
#include "lanes.h"

struct x_group {
  int8_t q[32];
  float scale;      // absolute maximum / 127
  int16_t sums[2];  // of the two halves of q, at most 2032 each
};

// The sum of the `count` numbers, 16 or 32, from number `at` on.
INLINE int32_t x_sum(const struct x_group *x, int at, int count) { return count == 32 ? x->sums[0] + x->sums[1] : x->sums[at / 16]; }

// The same group of row t, rows being `pitch` bytes apart.
INLINE const struct x_group *of_row(const struct x_group *x, int t, long pitch) {
  return (const struct x_group *)((const uint8_t *)x + t * pitch);
}

// sum[t] += dots of the four weights of each of sixteen rows in `w`, unsigned bytes, with numbers 4 j to 4 j + 3 of the group of row t.
INLINE void dot_word(const int tokens, w16 w, const struct x_group *x, int j, const long pitch, i16 *sum) {
  UNROLL for (int t = 0; t < tokens; t++) sum[t] = i16_dot_u8s8(sum[t], w, ((const uint32_t *)of_row(x, t, pitch)->q)[j]);
}
