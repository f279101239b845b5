// attention_pairs.h for caches of KV_FP8, as attention_tile_fp8.h has them: bfloat16 holds the quants exactly. Scores are multiplied with the scales of
// keys, weights with those of values before they are rounded. Quants are finite, so a weight of 0 is enough where a row does not see a key.
#pragma once
#include "attention_pairs.h"

#define MASKED 0

// Sixteen keys, whose words are columns already, to those from `at` on. `scales`: of these keys and of their values.
INLINE void unpack_keys(struct prefetch *prefetch, struct tile *tile, int at, const cached *low, const cached *high, const v16 *scales) {
  for (int j = 0; j < ROW_BYTES / 4; j++) {
    fetch(prefetch, FETCH_LINES);
    store_e4m3(tile->keys + 2 * j * TILE + at, TILE, w16_load_halves(low + (long)j * S * 4, high + (long)j * S * 4));
  }
  v16_store(tile->key_scale + at, scales[0]);
  v16_store(tile->value_scale + at, scales[1]);
}

INLINE void scale_scores(int N, float *s, const struct tile *tile, int low, int high) {
  for (int c = low; c < high; c += 16) {
    const v16 scale = v16_load(tile->key_scale + c);
    UNROLL for (int i = 0; i < N; i++) v16_store(s + i * TILE + c, v16_mul(v16_load(s + i * TILE + c), scale));
  }
}

// Weights s [N, TILE] of the keys low to high - 1 become pairs of them, in the first half of each row. Slots that are not used may have any scale.
INLINE void round_weights(int N, float *s, const struct tile *tile, const int *first, const int *end, int low, int high) {
  const v16 zero = v16_set(0.0f);
  for (int i = 0; i < N; i++)
    for (int c = low & ~31; c < high; c += 32) {
      float *row = s + i * TILE;
      v16 a = v16_mul(v16_load(row + c), v16_load(tile->value_scale + c)),
          b = v16_mul(v16_load(row + c + 16), v16_load(tile->value_scale + c + 16));
      if (first[i] > c || end[i] < c + 32) a = within(a, c, first[i], end[i], zero), b = within(b, c + 16, first[i], end[i], zero);
      _mm512_storeu_si512((uint32_t *)row + c / 2, order_of_e4m3(rounded_pairs(a, b)));
    }
}

// Values are copied: words [TILE / 2, VALUE_D], two rows of them for four keys.
INLINE void pair_values(const int C, w16 *to, const void *run, int at, int column) { (void)C, (void)to, (void)run, (void)at, (void)column; }
INLINE uint32_t seen_halves(int key, int first, int end) { return (void)key, (void)first, (void)end, 0; }

INLINE void copy_values(float *values, const cached *cache, const int32_t *table, int head, int start, int first, int end) {
  for (int at = first & ~3; at < end; at += 4) {
    const cached *from = side_of(cache, table[at / TABLE_TOKENS], 1, head, at % S);
    uint32_t *to = (uint32_t *)values + (at - start) / 2 * VALUE_D;
    for (int d = 0; d < D; d += 16) store_e4m3(to + d, VALUE_D, w16_load(from + 4 * d));
  }
}
