// A row of x as products with integer weights want it: groups of 32 numbers, rounded to int8 with one scale each; and the sums of a part.
//
// Integers are summed exactly within a part, in one of three ways:
//
//     dots of four bytes            where the variant has them (i16_dot_u8s8)
//     SHORT_DOTS, 6 bits at most    products of bytes are added in 16 bits as long as RUN words cannot overflow, then in 32
//     SHORT_DOTS, more bits         two products of bytes do not fit 16 bits: bytes are widened, those of x in advance, and added in 32
#pragma once
#include "lanes.h"

#define PART_WORDS (PART / 4)
#if defined(SHORT_DOTS) && MAX_QUANT > 63
#define WIDE_X 1
#else
#define WIDE_X 0
#endif

struct x_group {
#if WIDE_X
  int16_t q[8][4];  // of each four numbers, numbers 0 and 2, then 1 and 3
#else
  int8_t q[32];
#endif
  float scale;  // absolute maximum / 127
#if MINIMUMS
  float offsets[32 / PART];  // of each part, -scale times the sum of its numbers, which is at most 2032 for sixteen
#else
  int32_t offsets[32 / PART];  // of each part, -ZERO_POINT times the sum of its numbers
#endif
};

// The same group of row t, rows being `pitch` bytes apart.
INLINE const struct x_group *of_row(const struct x_group *x, int t, long pitch) {
  return (const struct x_group *)((const uint8_t *)x + t * pitch);
}

// The numbers of a group, rounded.
INLINE void fill_group(struct x_group *group, v16 a, v16 b) {
  const float max = v16_max_of(v16_max(v16_abs(a), v16_abs(b)));
  const v16 inverse = v16_set(max > 1e-36f ? 127.0f / max : 0.0f);  // below, 127 / max is infinite
  const v16 qa = v16_round(v16_mul(a, inverse)), qb = v16_round(v16_mul(b, inverse));
#if WIDE_X
  store_wide(group->q[0], qa);
  store_wide(group->q[4], qb);
#else
  v16_store_i8(group->q, qa);
  v16_store_i8(group->q + 16, qb);
#endif
  group->scale = max / 127.0f;
  const int16_t sums[2] = {(int16_t)v16_sum(qa), (int16_t)v16_sum(qb)};
  for (int half = 0; half < 32 / PART; half++) {
    const int sum = PART == 32 ? sums[0] + sums[1] : sums[half];
#if MINIMUMS
    group->offsets[half] = -group->scale * (float)sum;
#else
    group->offsets[half] = -ZERO_POINT * sum;
#endif
  }
}

// --- sums of a part: begin_part, dot_word for each of its words, end_part. `half`: which offset is the part's.

// A word of sixteen rows as it is multiplied, and as it is kept for many rows of x (unpacked.h).
struct operand {
#if WIDE_X
  w16 even, odd;
#else
  w16 bytes;
#endif
};

struct part_sum {
  i16 total;
#ifdef SHORT_DOTS
  w16 run;    // of 16 bits
  int words;  // how many have been added; a constant wherever a part is inlined
#endif
};

#ifdef SHORT_DOTS
#define RUN_FITS(words) (2 * 127 * MAX_QUANT * (words) < 32768 && (words) <= PART_WORDS)
#define RUN (RUN_FITS(8) ? 8 : RUN_FITS(4) ? 4 : RUN_FITS(2) ? 2 : 1)

INLINE struct part_sum begin_part(const struct x_group *x, int half) {
  (void)x, (void)half;
  return (struct part_sum){.words = 0};
}

INLINE i16 end_part(struct part_sum sum, const struct x_group *x, int half) {
  return MINIMUMS ? sum.total : add_ints(sum.total, i16_set((int32_t)x->offsets[half]));
}
#else
INLINE struct part_sum begin_part(const struct x_group *x, int half) {
  return (struct part_sum){i16_set(MINIMUMS ? 0 : (int32_t)x->offsets[half])};
}

INLINE i16 end_part(struct part_sum sum, const struct x_group *x, int half) {
  (void)x, (void)half;
  return sum.total;
}
#endif

INLINE uint32_t four_numbers(const struct x_group *x, int t, long pitch, int word) {
  return ((const uint32_t *)of_row(x, t, pitch)->q)[word];
}

INLINE struct operand operand_of(w16 w) {
#if WIDE_X
  return (struct operand){even_bytes(w), odd_bytes(w)};
#else
  return (struct operand){w};
#endif
}

// sum[t] += dots of the four weights of each of sixteen rows with numbers 4 j to 4 j + 3 of the group of row t.
INLINE void dot_operand(const int tokens, const struct operand *w, const struct x_group *x, int j, const long pitch, struct part_sum *sum) {
#if WIDE_X
  const w16 even = w->even;
  UNROLL for (int t = 0; t < tokens; t++) {
    const i16 evens = dot_shorts(even, four_numbers(x, t, pitch, 2 * j));
    sum[t].total = sum[t].words++ == 0 ? evens : add_ints(sum[t].total, evens);
    KEEP_ORDER(sum[t].total);
  }
  const w16 odd = w->odd;  // not before: registers are few
  UNROLL for (int t = 0; t < tokens; t++) {
    sum[t].total = add_ints(sum[t].total, dot_shorts(odd, four_numbers(x, t, pitch, 2 * j + 1)));
    KEEP_ORDER(sum[t].total);
  }
#elif defined(SHORT_DOTS)
  const w16 bytes = w->bytes;
  UNROLL for (int t = 0; t < tokens; t++) {
    const w16 pairs = dot_pairs(bytes, four_numbers(x, t, pitch, j));
    sum[t].run = sum[t].words % RUN == 0 ? pairs : add_shorts(sum[t].run, pairs);
    KEEP_ORDER(sum[t].run);
    if (++sum[t].words % RUN == 0) {
      const i16 ints = dot_shorts(sum[t].run, 0x00010001);
      sum[t].total = sum[t].words == RUN ? ints : add_ints(sum[t].total, ints);
    }
  }
#else
  UNROLL for (int t = 0; t < tokens; t++) sum[t].total = i16_dot_u8s8(sum[t].total, w->bytes, four_numbers(x, t, pitch, j));
#endif
}

// What formats call with each word of a part. With `tokens` of 0 the operand is written to what `sum` points to, the array of a part's
// operands, and x is not read.
INLINE void dot_word(const int tokens, w16 w, const struct x_group *x, int j, const long pitch, struct part_sum *sum) {
  const struct operand one = operand_of(w);
  if (tokens == 0) ((struct operand *)sum)[j % PART_WORDS] = one;
  else dot_operand(tokens, &one, x, j, pitch, sum);
}
