// Operands of attention_tiles.h from caches of KV_FP8: bfloat16 holds the quants exactly. Words of four columns of sixteen keys, and of four keys of sixteen
// columns, become two words each, of the first and third and of the second and fourth; q and weights have that order, too. Scores are
// multiplied with the scales of keys, weights with those of values.
#pragma once
#include "attention_tiles.h"

#define TILE_KEYS (TILE * PAIRS)
#define TILE_VALUES(copied) (TILE / 32 * STEP_WORDS)
#define VALUES_ARE_FINITE 1
#define FETCH_WORD ((TILE_LINES * 4 + TILE * D / 16 - 1) / (TILE * D / 16))  // lines of the next tile, for each word of sixteen keys

struct tile {
  uint32_t *keys;    // [TILE / 16, PAIRS, 16]
  uint32_t *values;  // [TILE / 32, STEP_WORDS]
  float key_scale[TILE], value_scale[TILE];
  int first, end;  // the keys that some row sees
};

static inline void prepare_query(uint32_t *to, struct query_scale *scale, const float *q) {
  (void)scale;
  round_query(to, q);
  for (int j = D / 2; j < PAIRS; j++) to[j] = 0;
}

// Those around keys first to end - 1 that share sixteen slots with them are garbage.
INLINE void load_keys(const int lines, struct prefetch *prefetch, struct tile *tile, const cached *cache, const int32_t *table, int head,
                      int start, int first, int end) {
  for (int at = first & ~15; at < end; at += 16) {
    const int low = max(at, first & -S), high = second_eight(at, first, end);
    const int a = table[low / TABLE_TOKENS], b = table[high / TABLE_TOKENS];
    const cached *of_a = side_of(cache, a, 0, head, low % S), *of_b = side_of(cache, b, 0, head, high % S);
    uint32_t *kt = tile->keys + (at - start) * PAIRS;
    for (int j = 0; j < D / 4; j++) {
      store_e4m3(kt + 32 * j, 16, w16_load_halves(of_a + (long)j * S * 4, of_b + (long)j * S * 4));
      fetch(prefetch, lines);
    }
    for (int j = D / 2; j < PAIRS; j++) _mm512_store_si512(kt + 16 * j, _mm512_setzero_si512());
    for (int side = 0; side < 2; side++)
      v16_store((side == 0 ? tile->key_scale : tile->value_scale) + at - start,
                load_scales(scales_of(cache, a, side, head) + low % S, scales_of(cache, b, side, head) + high % S));
  }
}

// Steps of 32 keys; zeros for four keys of which no row sees one.
INLINE void load_values(const struct tile *tile, const cached *cache, const int32_t *table, int head, int start, int first, int end) {
  for (int at = first & ~31; at < ((end + 31) & ~31); at += 4) {
    uint32_t *to = tile->values + (at - start) / 32 * STEP_WORDS + at % 32 / 2 * 16;
    if (at + 4 > first && at < end) {
      const cached *from = side_of(cache, table[at / TABLE_TOKENS], 1, head, at % S);
      for (int d = 0; d < D; d += 16) store_e4m3(to + 16 * d, 16, w16_load(from + 4 * d));
    } else {
      for (int d = 0; d < D; d += 16) {
        _mm512_store_si512(to + 16 * d, _mm512_setzero_si512());
        _mm512_store_si512(to + 16 * d + 16, _mm512_setzero_si512());
      }
    }
  }
}

INLINE void load_tile(struct prefetch *prefetch, int copied, struct tile *tile, float *keys, float *values, const cached *cache,
                      const int32_t *table, int head, int start, int first, int end) {
  tile->keys = (uint32_t *)keys, tile->values = (uint32_t *)values, tile->first = first - start, tile->end = end - start;
  load_keys(copied ? 0 : FETCH_WORD, prefetch, tile, cache, table, head, start, first, end);
  load_values(tile, cache, table, head, start, first, end);
}

INLINE void scale_scores(float *s, const struct tile *tile, int low, int high) {
  for (int c = low; c < high; c += 16) v16_store(s + c, v16_mul(v16_load(s + c), v16_load(tile->key_scale + c)));
}

// The weights of 32 keys from `key` on, in two halves, as pairs. Slots that are not used may have any scale.
INLINE w16 weight_words(const int whole, v16 a, v16 b, const struct tile *tile, int key, int first, int end) {
  const v16 zero = v16_set(0.0f);
  a = v16_mul(a, v16_load(tile->value_scale + key)), b = v16_mul(b, v16_load(tile->value_scale + key + 16));
  if (!whole) a = within(a, key, first, end, zero), b = within(b, key + 16, first, end, zero);
  return order_of_e4m3(rounded_pairs(a, b));
}
