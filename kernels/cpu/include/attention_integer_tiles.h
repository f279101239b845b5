// attention_integers.h for many rows with AMX. Integer sums are exact, so a row has the bits that dot products give it, and few rows keep those.
//
// Quants are unpacked once for all rows of a tile of keys: the words of sixteen keys, four columns each, and of sixteen columns of values, four keys
// each, are the second operand of _tile_dpbssd or _tile_dpbsud. Sixteen rows of q, or of weights, are the first. Tiles 0 to 3 are sums, 4 is
// the rows, 5 the words.
#pragma once
#include "attention_integers.h"

#define KEY_WORDS ((D + 63) / 64 * 16)       // of a key: fours of columns, and zeros up to whole tiles
#define ROW_BLOCK 128                        // what a unit has at most, but for 129 query heads or more on a KV head
#define FETCH_FOUR ((TILE_LINES + 31) / 32)  // lines of the next tile, for four of 128 rows

#if CACHE_TYPE == KV_INT8  // less their centre, quants are signed bytes
#define MULTIPLY_WORDS(sums) _tile_dpbssd(sums, 4, 5)
INLINE w16 quants_of_word(w16 words) { return _mm512_xor_si512(words, _mm512_set1_epi8((char)128)); }
INLINE v16 number_of(i16 sum, float less) {
  (void)less;
  return v16_from_i16(sum);
}
#else
#define MULTIPLY_WORDS(sums) _tile_dpbsud(sums, 4, 5)
INLINE v16 number_of(i16 sum, float less) { return centred(sum, less); }
#endif

// --- unpacking

INLINE void unpack_keys(const struct tile *tile, int low, int high) {
  for (int column = low / 16; column < (high + 15) / 16; column++) {
    uint32_t *to = tile->unpacked_keys + column * 16 * KEY_WORDS;
    for (int j = 0; j < ROW_BYTES / 4; j++) {
      const w16 words = key_words(tile, column, j);
#if CACHE_TYPE == KV_INT8
      _mm512_store_si512(to + 16 * j, quants_of_word(words));
#else
      _mm512_store_si512(to + 16 * j, w16_low_nibbles(words));
      _mm512_store_si512(to + 16 * (D / 8 + j), w16_high_nibbles(words));
#endif
    }
    for (int j = D / 4; j < KEY_WORDS; j++) _mm512_store_si512(to + 16 * j, _mm512_setzero_si512());
  }
}

// Weights of keys that are not unpacked are 0.
INLINE void unpack_values(const struct tile *tile, int low, int high) {
  for (int j = low / 4; j < (high + 3) / 4; j++) {
    const uint8_t *from = tile->values[j / 2] + j % 2 * 4 * ROW_BYTES;
    uint32_t *to = tile->unpacked_values + 16 * j;
    for (int d = 0; d < ROW_BYTES; d += 16) {
      const w16 words = w16_load(from + 4 * d);
#if CACHE_TYPE == KV_INT8
      _mm512_store_si512(to + TILE / 4 * d, quants_of_word(words));
#else
      _mm512_store_si512(to + TILE / 4 * d, w16_low_nibbles(words));
      _mm512_store_si512(to + TILE / 4 * (d + D / 2), w16_high_nibbles(words));
#endif
    }
  }
}

INLINE void unpack_tile(const struct tile *tile, int low, int high) {
  unpack_keys(tile, low, high);
  unpack_values(tile, low, high);
}

// --- products

static inline void configure_tiles(void) {
  struct tile_shapes shapes = {.palette = 1};
  for (int i = 0; i < 6; i++) set_shape(&shapes, i, 16, 64);
  _tile_loadconfig(&shapes);
}

// ints [16, 64]: sixteen rows with four times sixteen keys, whose words begin KEY_WORDS * 16 apart. Those that were not unpacked are garbage.
INLINE void score_ints(i16 *ints, const uint32_t *q, const uint32_t *keys) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int j = 0; j < KEY_WORDS; j += 16, keys += 256) {
    _tile_loadd(4, q + j, 4 * D);
    _tile_loadd(5, keys, 64);
    MULTIPLY_WORDS(0);
    _tile_loadd(5, keys + KEY_WORDS * 16, 64);
    MULTIPLY_WORDS(1);
    _tile_loadd(5, keys + KEY_WORDS * 32, 64);
    MULTIPLY_WORDS(2);
    _tile_loadd(5, keys + KEY_WORDS * 48, 64);
    MULTIPLY_WORDS(3);
  }
  _tile_stored(0, ints, 256);
  _tile_stored(1, ints + 1, 256);
  _tile_stored(2, ints + 2, 256);
  _tile_stored(3, ints + 3, 256);
}

// ints [16, 64]: weights of sixteen rows, in tile 4, times 16 C columns.
INLINE void value_ints(const int C, i16 *ints, const uint32_t *values) {
  _tile_zero(0);
  _tile_loadd(5, values, 64);
  MULTIPLY_WORDS(0);
  _tile_stored(0, ints, 256);
  if (C > 1) {
    _tile_zero(1);
    _tile_loadd(5, values + 16 * TILE / 4, 64);
    MULTIPLY_WORDS(1);
    _tile_stored(1, ints + 1, 256);
  }
  if (C > 2) {
    _tile_zero(2);
    _tile_loadd(5, values + 32 * TILE / 4, 64);
    MULTIPLY_WORDS(2);
    _tile_stored(2, ints + 2, 256);
  }
  if (C > 3) {
    _tile_zero(3);
    _tile_loadd(5, values + 48 * TILE / 4, 64);
    MULTIPLY_WORDS(3);
    _tile_stored(3, ints + 3, 256);
  }
}

// --- rows

// Their integers with the keys of the tile become weights p of N rows from row r on.
INLINE void weigh_rows(const int N, uint32_t *p, struct query_scale *scale, const i16 *ints, const struct rows *rows, int r,
                       const struct tile *tile, int start) {
  v16 s[N][COLUMNS_OF_TILE];
  int first[N], end[N], whole = 0;
  UNROLL for (int i = 0; i < N; i++) {
    const struct query_scale *q = rows->q_scale + r + i;
    UNROLL for (int c = 0; c < COLUMNS_OF_TILE; c++) s[i][c] =
        scores_of(number_of(ints[4 * i + c], q->less), tile->key_scale + 16 * c, q->scale);
  }
  UNROLL for (int i = 0; i < N; i++) {
    const int position = position_of(rows, r + i);
    first[i] = max(0, first_visible(position) - start), end[i] = min(TILE, position + 1 - start);
    whole += first[i] == 0 && end[i] == TILE;
  }
  if (WHOLE_IN_REGISTERS && whole == N) {
    weigh_whole(N, p, scale, s, rows, r, tile);
    return;
  }
  softmax_rows(N, (float *)s, first, end, rows->top + r, rows->weight + 16 * r, rows->sums + r * rows->stride, rows->stride);
  prepare_weights(N, p, scale, (float *)s, tile->value_scale, first, end);
}

// sums of 16 C columns += their integers times the scale of each row's weights.
INLINE void add_products(const int C, float *sums, long stride, const i16 *ints, const struct query_scale *scale, int count) {
  for (int i = 0; i < count; i++) {
    const v16 factor = v16_set(scale[i].scale);
    for (int c = 0; c < C; c++) {
      float *to = sums + i * stride + 16 * c;
      v16_store(to, v16_fma(number_of(ints[4 * i + c], scale[i].less), factor, v16_load(to)));
    }
  }
}

// The weights of up to sixteen rows from row r on, of which p and scale are, times their values.
INLINE void add_rows(const struct rows *rows, int r, int count, const uint32_t *p, const struct query_scale *scale,
                     const struct tile *tile) {
  i16 ints[64];
  float *sums = rows->sums + r * rows->stride;
  int d = 0;
  _tile_loadd(4, p, TILE);
  for (; d + 64 <= D; d += 64) {
    value_ints(4, ints, tile->unpacked_values + TILE / 4 * d);
    add_products(4, sums + d, rows->stride, ints, scale, count);
  }
  if (D % 64 > 0) {
    value_ints(D % 64 / 16, ints, tile->unpacked_values + TILE / 4 * d);
    add_products(D % 64 / 16, sums + d, rows->stride, ints, scale, count);
  }
}

// All rows together: blocks of 32 took 1.04 to 1.10 of the time, of sixteen 1.14, and 1.14 where the next sixteen were multiplied with keys, and the
// ones before with values, while these were weighed.
NOINLINE void attend_block_by_tiles(struct prefetch *prefetch, const struct rows *rows, int r, int count, const struct tile *tile,
                                    int start) {
  i16 ints[ROW_BLOCK * TILE / 16];
  uint32_t p[ROW_BLOCK * TILE / 4] __attribute__((aligned(64)));
  struct query_scale scale[ROW_BLOCK];
  int i = 0;
  for (; i < count; i += 16) score_ints(ints + 4 * i, rows->q + (long)(r + i) * D, tile->unpacked_keys);
  for (i = 0; i + 4 <= count; i += 4) {
    weigh_rows(4, p + i * TILE / 4, scale + i, ints + 4 * i, rows, r + i, tile, start);
    fetch(prefetch, FETCH_FOUR);
  }
  for (; i < count; i++) weigh_rows(1, p + i * TILE / 4, scale + i, ints + 4 * i, rows, r + i, tile, start);
  for (i = 0; i < count; i += 16) add_rows(rows, r + i, min(16, count - i), p + i * TILE / 4, scale + i, tile);
}

INLINE void attend_by_tiles(struct prefetch *prefetch, const struct rows *rows, int count, const struct tile *tile, int start) {
  configure_tiles();
  for (int r = 0; r < count; r += ROW_BLOCK) attend_block_by_tiles(prefetch, rows, r, min(ROW_BLOCK, count - r), tile, start);
  _tile_release();
}
