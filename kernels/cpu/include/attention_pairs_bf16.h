// attention_pairs.h for caches of BF16. Where a row sees one key of a pair, the other's value is masked: it may be NaN.
#pragma once
#include "attention_pairs.h"

#define MASKED 1

INLINE void store_key_words(key_word *kt, int j, w16 words) { _mm512_storeu_si512(kt + j * TILE, words); }
INLINE void scale_scores(int N, float *s, const struct tile *tile, int low, int high) {
  (void)N, (void)s, (void)tile, (void)low, (void)high;
}

// Weights s [N, TILE] of the keys low to high - 1 become pairs of them, in the first half of each row.
INLINE void round_weights(int N, float *s, const struct tile *tile, const int *first, const int *end, int low, int high) {
  (void)tile, (void)first, (void)end;
  for (int i = 0; i < N; i++)
    for (int c = low & ~31; c < high; c += 32) {
      float *row = s + i * TILE;
      _mm512_storeu_si512((uint32_t *)row + c / 2, rounded_pairs(v16_load(row + c), v16_load(row + c + 16)));
    }
}

// C columns of sixteen words: the values of keys `at` and at + 1 of a run.
INLINE void pair_values(const int C, w16 *to, const void *run, int at, int column) {
  const cached *v = (const cached *)run + (long)at * D + column;
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
      if (d + 16 < VALUE_D) pair_values(2, words, v, 0, d);
      else pair_values(1, words, v, 0, d);
      for (int c = 0; c < 2 && d + 16 * c < VALUE_D; c++) _mm512_storeu_si512(to + d + 16 * c, _mm512_and_si512(words[c], seen));
    }
  }
}
