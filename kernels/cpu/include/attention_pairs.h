// Numbers of attention_floats.h as pairs of bfloat16, where the processor multiplies them (v16_dot_bf16): two features of a key, or one feature of
// two values. Queries and the weights of a tile are rounded to bfloat16, as with AMX (docs/decisions/0084); the sum of the weights is that before
// rounding. Sums are float32, pair by pair, in the order of the cache's words. A key that a row does not see adds nothing.
#pragma once
#include "attention_floats.h"

#define SCORE_STEPS (D / 2)
typedef w16 key_column;
typedef uint32_t weight;

INLINE key_column load_column(const uint32_t *kt) { return w16_load(kt); }
INLINE v16 add_score(v16 sum, uint32_t q, key_column k) { return v16_dot_bf16(sum, k, q); }

static inline void prepare_query(uint32_t *to, struct query_scale *scale, const float *q) {
  (void)scale;
  round_query(to, q);
}

#if PACKED_CACHE
#include "attention_pairs_fp8.h"
#else
#include "attention_pairs_bf16.h"
#endif

// sums[16 C] of N rows += weights p [N, TILE] of the keys first to end - 1 times columns from `column` of their values. Of several rows `first` and
// `end` are multiples of KEYS_AT_ONCE.
INLINE void add_value_columns(int N, int C, struct prefetch *prefetch, int stored, int length, float *sums, long stride, const uint32_t *p,
                              const struct values *values, int column, int first, int end) {
  v16 sum[ROWS][5];
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = v16_load(sums + r * stride + column + 16 * c);
  for (int key = first & -KEYS_AT_ONCE; key < end;) {
    const int run_end = min((end + KEYS_AT_ONCE - 1) & -KEYS_AT_ONCE, (key & -length) + length);
    const void *run = values->run[key / length];
    for (; key < run_end; key += 2) {
      if (key / 2 % FETCH_EVERY == 0) fetch(prefetch, FETCH_LINES);
      const int at = key & (length - 1);
      w16 v[6];
      if (stored) pair_values(C, v, run, at, column);
      else UNROLL for (int c = 0; c < C; c++) v[c] = w16_load((const uint32_t *)run + (long)at / 2 * VALUE_D + column + 16 * c);
      if (N == 1 && MASKED)
        UNROLL for (int c = 0; c < C; c++) v[c] = _mm512_and_si512(v[c], _mm512_set1_epi32((int)seen_halves(key, first, end)));
      UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] =
          v16_dot_bf16(sum[r][c], v[c], p[r * TILE + key / 2]);
    }
  }
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) v16_store(sums + r * stride + column + 16 * c, sum[r][c]);
}
