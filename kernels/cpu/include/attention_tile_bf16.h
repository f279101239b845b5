// Operands of attention_tiles.h from caches of BF16: keys are transposed as words and values paired, or keys are read where they are stored.
#pragma once
#include "attention_tiles.h"

// Whether keys are read where they are stored: by tiles of sixteen, of one block, without features after the last.
#define IN_PLACE(copied) (!(copied) && S >= 16 && D % 32 == 0)

#define TILE_KEYS (IN_PLACE(0) ? 16 : TILE * PAIRS)
#define TILE_VALUES(copied) (IN_PLACE(copied) ? STEP_WORDS : TILE / 32 * STEP_WORDS)

struct tile {
  uint32_t *keys;                                                 // [TILE / 16, PAIRS, 16]: pair j of sixteen keys, if not IN_PLACE
  uint32_t *values;                                               // [TILE / 32, STEP_WORDS], or one step at a time, if IN_PLACE
  const cached *stored_keys[TILE / 8], *stored_values[TILE / 8];  // each eight
  int first, end;                                                 // the keys that some row sees
};

static inline void prepare_query(uint32_t *to, struct query_scale *scale, const float *q) {
  (void)scale;
  round_query(to, q);
  for (int j = D / 2; j < PAIRS; j++) to[j] = 0;
}

// Lines of the next tile that are requested by few rows, at each step of loading or multiplying this one.
#define STEPS_IN_PLACE (TILE / 32 * (PAIRS / 16) + TILE / 8 + TILE / 32 * (VALUE_D / 32))
#define FETCH_STEP ((TILE_LINES / 2 + STEPS_IN_PLACE - 1) / STEPS_IN_PLACE)
#define FETCH_PAIR 2
#define FETCH_KEYS ((TILE_LINES + QUARTERS - 1) / QUARTERS)

// --- keys and values

INLINE void store_key_words(key_word *kt, int j, w16 words) { _mm512_storeu_si512(kt + j * 16, words); }

INLINE void find_stored(struct tile *tile, const cached *cache, const int32_t *table, int head, int start, int first, int end) {
  for (int at = first & -min(S, 16); at < end; at += 8) {  // as keys are multiplied: not of a block that no row sees
    const int block = table[at / TABLE_TOKENS], i = (at - start) / 8;
    tile->stored_keys[i] = side_of(cache, block, 0, head, at % S), tile->stored_values[i] = side_of(cache, block, 1, head, at % S);
  }
}

INLINE void load_keys(const int lines, struct prefetch *prefetch, struct tile *tile) {
  for (int i = tile->first / 16; 16 * i < tile->end; i++) {
    const cached *low = tile->stored_keys[2 * i], *high = tile->stored_keys[2 * i + 1];
    uint32_t *kt = tile->keys + 16 * i * PAIRS;
    if (16 * i + 8 <= tile->first) low = high;  // a block that no row sees may be none
    if (16 * i + 8 >= tile->end) high = low;
    transpose_keys(lines, prefetch, kt, low, high);
    for (int j = D / 2; j < PAIRS; j++) store_key_words(kt, j, _mm512_setzero_si512());
  }
}

// Values of two keys (bf16_pairs.h), zeros where `low` or `high` is 0.
INLINE void pair_values(const int lines, struct prefetch *prefetch, uint32_t *to, const cached *v, int low, int high) {
  const w16 zero = _mm512_setzero_si512();
  int d = 0;
  for (; d + 32 <= VALUE_D; d += 32) {
    const w16 a = low ? w16_load(v + d) : zero, b = high ? w16_load(v + D + d) : zero;
    w16 both[2];
    fetch(prefetch, lines);
    pair(both, a, b);
    _mm512_storeu_si512(to + 16 * d, both[0]);
    _mm512_storeu_si512(to + 16 * d + 256, both[1]);
  }
  if (d < VALUE_D) {
    const w16 a = low ? w16_load_u16(v + d) : zero, b = high ? w16_load_u16(v + D + d) : zero;
    _mm512_storeu_si512(to + 16 * d, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
  }
}

// The 32 keys from `from` on: words [STEP_WORDS], zeros for keys that no row sees.
INLINE void load_step(const int lines, struct prefetch *prefetch, uint32_t *to, const struct tile *tile, int from) {
  for (int key = from; key < from + 32; key += 2, to += 16) {
    const int low = key >= tile->first && key < tile->end, high = key + 1 >= tile->first && key + 1 < tile->end;
    const cached *v = tile->stored_values[key / 8] + key % 8 * D;
    if (low & high) pair_values(lines, prefetch, to, v, 1, 1);
    else pair_values(lines, prefetch, to, v, low, high);
  }
}

INLINE void load_tile(struct prefetch *prefetch, int copied, struct tile *tile, float *keys, float *values, const cached *cache,
                      const int32_t *table, int head, int start, int first, int end) {
  tile->keys = (uint32_t *)keys, tile->values = (uint32_t *)values, tile->first = first - start, tile->end = end - start;
  find_stored(tile, cache, table, head, start, first, end);
  if (IN_PLACE(copied)) return;
  load_keys(copied ? 0 : FETCH_KEYS, prefetch, tile);
  for (int from = tile->first & ~31; from < tile->end; from += 32)
    load_step(0, prefetch, tile->values + from / 32 * STEP_WORDS, tile, from);
}

// --- what has no scales needs nothing

#define VALUES_ARE_FINITE 0

INLINE void scale_scores(float *s, const struct tile *tile, int low, int high) { (void)s, (void)tile, (void)low, (void)high; }

// The weights of 32 keys from `key` on, in two halves, as pairs.
INLINE w16 weight_words(const int whole, v16 a, v16 b, const struct tile *tile, int key, int first, int end) {
  (void)whole, (void)tile, (void)key, (void)first, (void)end;
  return rounded_pairs(a, b);
}
