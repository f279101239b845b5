// attention_tiles.h for few rows and keys that are multiplied where they are stored (IN_PLACE).
#pragma once
#include "attention_tiles.h"

#define FEW_ROWS 64  // that share paired values

// Sixteen rows of sixteen words, of which `count` are there: columns of words, and back to rows.
INLINE void to_columns(uint32_t *to, const uint32_t *from, long pitch, int count) {
  w16 r[16];
  UNROLL for (int i = 0; i < 16; i++) r[i] = i < count ? w16_load(from + i * pitch) : _mm512_setzero_si512();
  w16_transpose(r);
  UNROLL for (int i = 0; i < 16; i++) _mm512_store_si512(to + 16 * i, r[i]);
}

INLINE void to_rows(float *to, long pitch, const float *from, int count) {
  w16 r[16];
  UNROLL for (int i = 0; i < 16; i++) r[i] = w16_load(from + 16 * i);
  w16_transpose(r);
  UNROLL for (int i = 0; i < 16; i++) if (i < count) _mm512_storeu_si512(to + i * pitch, r[i]);
}

// score_block of up to sixteen rows and keys in place: tiles 2 and 3 are sums of sixteen keys each, 5 is these keys, 6 the rows.
INLINE void score_in_place(int count, struct prefetch *prefetch, float *s, const uint32_t *q, const struct tile *tile, int low, int high) {
  uint32_t columns[PAIRS * 16] __attribute__((aligned(64)));
  float sums[2][256] __attribute__((aligned(64)));
  for (int j = 0; j < PAIRS; j += 16) to_columns(columns + 16 * j, q + j, D, count);
  for (int c = low; c < high; c += 32) {
    const int none_of_a = c + 16 <= tile->first, none_of_b = c + 16 >= tile->end;  // of a block that no row sees: the others twice
    const cached *a = tile->stored_keys[c / 8 + 2 * none_of_a], *b = tile->stored_keys[c / 8 + 2 * !none_of_b];
    _tile_zero(2);
    _tile_zero(3);
    for (int j = 0; j < PAIRS; j += 16) {
      _tile_loadd(5, a + 2 * j, 2 * D);
      _tile_loadd(6, columns + 16 * j, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(5, b + 2 * j, 2 * D);
      _tile_dpbf16ps(3, 5, 6);
      fetch(prefetch, FETCH_STEP);
    }
    _tile_stored(2, sums[0], 64);
    _tile_stored(3, sums[1], 64);
    for (int half = 0; half < 2; half++) {
      fetch(prefetch, 2 * FETCH_STEP);
      to_rows(s + c + 16 * half, TILE, sums[half], count);
    }
  }
}

// Up to FEW_ROWS rows from `row` on, and keys in place. Tiles 2, 3 and 5 have sixteen rows.
INLINE void attend_few(struct prefetch *prefetch, const struct rows *rows, int row, int count, const struct tile *tile, int start) {
  float s[16 * TILE] __attribute__((aligned(64)));
  uint32_t p[FEW_ROWS * TILE / 2] __attribute__((aligned(64)));
  struct block blocks[FEW_ROWS / 16];
  const int number = (count + 15) / 16;
  configure_rows(min(count, 16), 16);
  for (int i = 0; i < number; i++) {
    struct block *block = blocks + i;
    place_block(block, rows, row + 16 * i, min(16, count - 16 * i), tile, start);
    if (block->low == block->high) continue;
    score_in_place(block->count, prefetch, s, rows->q + (long)block->row * D, tile, block->low, block->high);
    weigh_block(0, prefetch, p + 16 * i * (TILE / 2), s, block, rows, tile);
  }
  int configured = min(count, 16);
  for (int key = tile->first & ~31; key < tile->end; key += 32) {
    load_step(FETCH_PAIR, prefetch, tile->values, tile, key);
    for (int i = 0; i < number; i++) {
      const struct block *block = blocks + i;
      if (key < block->low || key >= block->high) continue;
      if (block->count != configured) configure_rows(block->count, 16);
      const int done = add_block(0, FETCH_STEP, prefetch, block, rows, p + 16 * i * (TILE / 2) + key / 2, tile->values, key, 1);
      configured = done ? block->count : 0;
    }
  }
}
