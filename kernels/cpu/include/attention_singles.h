// Numbers of attention_floats.h as float32: keys are converted as they are transposed, values as they are read, or once for many rows.
#pragma once
#include "attention_floats.h"

#define SCORE_STEPS D
typedef v16 key_column;
typedef float weight;

INLINE key_column load_column(const float *kt) { return v16_load(kt); }
INLINE v16 add_score(v16 sum, float q, key_column k) { return v16_fma(v16_set(q), k, sum); }

#if !PACKED_CACHE
// To columns of kt [D, TILE].
INLINE void store_key_words(key_word *kt, int j, w16 words) {
#if CACHE_TYPE == F32
  v16_store(kt + j * TILE, v16_from_w16(words));
#elif CACHE_TYPE == F16
  v16_store(kt + 2 * j * TILE, v16_from_low_f16(words));
  v16_store(kt + (2 * j + 1) * TILE, v16_from_high_f16(words));
#else
  v16_store(kt + 2 * j * TILE, v16_from_low_bf16(words));
  v16_store(kt + (2 * j + 1) * TILE, v16_from_high_bf16(words));
#endif
}

#else
// Their words are columns already, to those from `at` on. `scales`: of the sixteen keys.
INLINE void unpack_keys(struct prefetch *prefetch, struct tile *tile, int at, const cached *low, const cached *high, const v16 *scales) {
  float *kt = tile->keys + at;
  for (int j = 0; j < ROW_BYTES / 4; j++) {
    const w16 words = w16_load_halves(low + (long)j * S * 4, high + (long)j * S * 4);
    fetch(prefetch, FETCH_LINES);
    UNROLL for (int i = 0; i < 4; i++) v16_store(kt + (4 * j + i) * TILE, v16_mul(v16_from_e4m3(words, i), scales[0]));
  }
}
#endif

#if PACKED_CACHE
// Values first to end - 1 of a tile as float32 [TILE, D]; those that share four slots with them, too.
INLINE void copy_values(float *values, const cached *cache, const int32_t *table, int head, int start, int first, int end) {
  for (int at = first & ~3; at < end; at += 4) {
    const cached *from = side_of(cache, table[at / TABLE_TOKENS], 1, head, at % S);
    const uint16_t *scales = scales_of(cache, table[at / TABLE_TOKENS], 1, head) + at % S;
    v16 scale[4];
    UNROLL for (int i = 0; i < 4; i++) scale[i] = v16_set(kv_scale_value(scales[i]));
    for (int d = 0; d < D; d += 16) {
      const w16 words = w16_load(from + 4 * d);
      UNROLL for (int i = 0; i < 4; i++) v16_store(values + (at - start + i) * D + d, v16_mul(v16_from_e4m3(words, i), scale[i]));
    }
  }
}
#else
INLINE void copy_values(float *values, const cached *cache, const int32_t *table, int head, int start, int first, int end) {
  for (int at = first; at < end; at++) {
    const cached *v = side_of(cache, table[at / TABLE_TOKENS], 1, head, at % S);
    for (int d = 0; d < VALUE_D; d += 16) v16_store(values + (at - start) * VALUE_D + d, load_cached(v + d));
  }
}
#endif

INLINE v16 load_value(int stored, const void *row, long at) {
#if !PACKED_CACHE
  if (stored) return load_cached((const cached *)row + at);
#endif
  return v16_load((const float *)row + at);
}

// sums[16 C] of N rows += weights p [N, TILE] of the keys first to end - 1 times columns from `column` of their values.
INLINE void add_value_columns(int N, int C, struct prefetch *prefetch, int stored, int length, float *sums, long stride, const float *p,
                              const struct values *values, int column, int first, int end) {
  v16 sum[ROWS][5];
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = v16_load(sums + r * stride + column + 16 * c);
  for (int key = first; key < end;) {
    const int run_end = min(end, (key & -length) + length);
    const void *run = values->run[key / length];
    for (; key < run_end; key++) {
      if (key % FETCH_EVERY == 0) fetch(prefetch, FETCH_LINES);
      v16 v[5];
      UNROLL for (int c = 0; c < C; c++) v[c] =
          load_value(stored, run, (long)(key & (length - 1)) * (stored ? D : VALUE_D) + column + 16 * c);
      UNROLL for (int r = 0; r < N; r++) {
        const v16 x = v16_set(p[r * TILE + key]);
        UNROLL for (int c = 0; c < C; c++) sum[r][c] = v16_fma(x, v[c], sum[r][c]);
      }
    }
  }
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) v16_store(sums + r * stride + column + 16 * c, sum[r][c]);
}

INLINE void scale_scores(int N, float *s, const struct tile *tile, int low, int high) {
  (void)N, (void)s, (void)tile, (void)low, (void)high;
}
INLINE void round_weights(int N, float *s, const struct tile *tile, const int *first, const int *end, int low, int high) {
  (void)N, (void)s, (void)tile, (void)first, (void)end, (void)low, (void)high;
}

static inline void prepare_query(float *to, struct query_scale *scale, const float *q) {
  (void)scale;
  for (int d = 0; d < D; d += 16) v16_store(to + d, v16_load(q + d));
}
