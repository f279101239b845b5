// Numbers of attention_floats.h as pairs of bfloat16, where the processor multiplies them (v16_dot_bf16): two features of a key, or one feature of
// two values. Queries and the weights of a tile are rounded to bfloat16, as with AMX (docs/decisions/0084); the sum of the weights is that before
// rounding. Sums are float32, pair by pair, ascending; pairs of keys begin at even places. Where a row sees one key of a pair, the other's value is 0.
#pragma once
#include "attention_floats.h"

#define SCORE_STEPS (D / 2)
typedef w16 key_column;
typedef uint32_t weight;

INLINE void store_key_words(key_word *kt, int j, w16 words) { _mm512_storeu_si512(kt + j * TILE, words); }
INLINE key_column load_column(const uint32_t *kt) { return w16_load(kt); }
INLINE v16 add_score(v16 sum, uint32_t q, key_column k) { return v16_dot_bf16(sum, k, q); }

static inline void prepare_query(uint32_t *to, struct query_scale *scale, const float *q) {
  (void)scale;
  for (int d = 0; d < D; d += 16) v16_store_bf16((uint16_t *)to + d, v16_load(q + d));
}

// Weights s [N, TILE] of the keys low to high - 1 become pairs of them, in the first half of each row.
INLINE void round_weights(int N, float *s, int low, int high) {
  for (int i = 0; i < N; i++)
    for (int c = low & ~31; c < high; c += 32) {
      float *row = s + i * TILE;
      _mm512_storeu_si512((uint32_t *)row + c / 2, rounded_pairs(v16_load(row + c), v16_load(row + c + 16)));
    }
}

// --- values

// C columns of sixteen words from `v` on: those of two keys, which are D numbers apart.
INLINE void pair_values(const int C, w16 *to, const cached *v) {
  UNROLL for (int c = 0; c < C; c += 2) {
    if (c + 1 < C) pair(to + c, w16_load(v + 16 * c), w16_load(v + D + 16 * c));
    else to[c] = pair_half(v + 16 * c, v + D + 16 * c);
  }
}

// Which halves of a pair's words are values of keys from first to end - 1.
INLINE uint32_t seen_halves(int key, int first, int end) {
  return (key >= first && key < end ? 0xFFFFu : 0) | (key + 1 >= first && key + 1 < end ? 0xFFFF0000u : 0);
}

// Values first to end - 1 of a tile as words [TILE / 2, VALUE_D].
INLINE void copy_values(float *values, const cached *cache, const int32_t *table, int head, int start, int first, int end) {
  for (int at = first & -2; at < end; at += 2) {
    const cached *v = side_of(cache, table[at / TABLE_TOKENS], 1, head, at % S);
    uint32_t *to = (uint32_t *)values + (at - start) / 2 * VALUE_D;
    const w16 seen = _mm512_set1_epi32((int)seen_halves(at, first, end));
    for (int d = 0; d < VALUE_D; d += 32) {
      w16 words[2];
      if (d + 16 < VALUE_D) pair_values(2, words, v + d);
      else pair_values(1, words, v + d);
      for (int c = 0; c < 2 && d + 16 * c < VALUE_D; c++) _mm512_storeu_si512(to + d + 16 * c, _mm512_and_si512(words[c], seen));
    }
  }
}

// sums[16 C] of N rows += weights p [N, TILE] of the keys first to end - 1 times columns from `column` of their values. Of several rows `first` and
// `end` are even.
INLINE void add_value_columns(int N, int C, struct prefetch *prefetch, int stored, int length, float *sums, long stride, const uint32_t *p,
                              const struct values *values, int column, int first, int end) {
  v16 sum[ROWS][5];
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = v16_load(sums + r * stride + column + 16 * c);
  for (int key = first & -2; key < end;) {
    const int run_end = min(end, (key & -length) + length);
    const void *run = values->run[key / length];
    for (; key < run_end; key += 2) {
      if (key / 2 % FETCH_EVERY == 0) fetch(prefetch, FETCH_LINES);
      const int at = key & (length - 1);
      w16 v[6];
      if (stored) pair_values(C, v, (const cached *)run + (long)at * D + column);
      else UNROLL for (int c = 0; c < C; c++) v[c] = w16_load((const uint32_t *)run + (long)at / 2 * VALUE_D + column + 16 * c);
      if (N == 1) UNROLL for (int c = 0; c < C; c++) v[c] = _mm512_and_si512(v[c], _mm512_set1_epi32((int)seen_halves(key, first, end)));
      UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] =
          v16_dot_bf16(sum[r][c], v[c], p[r * TILE + key / 2]);
    }
  }
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) v16_store(sums + r * stride + column + 16 * c, sum[r][c]);
}

static inline void finish(float *out, const float *sums, float weight) {
  unpair_all(VALUE_D, out, sums);
  for (int d = 0; d < VALUE_D; d += 16) v16_store(out + d, v16_div(v16_load(out + d), v16_set(weight)));
}
