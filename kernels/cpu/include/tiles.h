// Products of many rows by AMX (Sapphire Rapids on): tiles of up to 16 rows of 64 bytes. What one instruction computes, as Intel documents it:
//
//     _tile_dpbf16ps    sum[t][r] += (even + odd): of 16 pairs of columns, ascending, the fused sums of the first numbers and of the second,
//                       each from 0; float32, to nearest even, subnormals are 0
//     _tile_dpbsud      sum[t][r] += signed bytes of x times unsigned bytes of weights, exact integers
//
// Thirty-two columns of a panel in BF16 are a tile as they are, sixteen words of sixteen rows; so are the words of an unpacked part
// (unpacked.h), eight or four of them. Rows of x are a tile with PREPARED bytes from one to the next.
//
// BF16: all rows are multiplied here, also a single one, because v16_dot_bf16 adds in another order. Integers: from STREAM_TOKENS + 1 rows on;
// sums are exact and join acc as in dot_one_part, so any number of rows has the bits of lanes_avx512.h.
//
// Tiles have no names but numbers, constants of each instruction: 0 and 1 are sums of rows 0 to 15 with panels a and b, 2 and 3 of rows 16 to
// 31; 4 and 5 are these rows of x, 6 and 7 the weights of a and b.
#pragma once
#include "lanes.h"

#if BY_TILES
#if INTEGERS
#define TILE_X_BYTES PART
#else
#define TILE_X_BYTES 64
#endif

struct tile_shapes {  // what LDTILECFG reads
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// For `tokens` rows of x. Integers always take sixteen: their sums are read whole.
static inline void configure_tiles(int tokens) {
  const int first = INTEGERS || tokens > 16 ? 16 : tokens, second = INTEGERS ? 16 : tokens - first;
  struct tile_shapes shapes = {.palette = 1};
  for (int i = 0; i < 6; i++) {
    const int rows = i == 2 || i == 3 || i == 5 ? second : first;
    shapes.rows[i] = (uint8_t)rows, shapes.bytes[i] = rows == 0 ? 0 : i < 4 ? 64 : TILE_X_BYTES;  // a tile has both, or neither
  }
  for (int i = 6; i < 8; i++) shapes.rows[i] = TILE_X_BYTES / 4, shapes.bytes[i] = 64;
  _tile_loadconfig(&shapes);
}

#if INTEGERS
// ints[t][r] = the integer dots of a part with `q`, bytes of rows 16 block to 16 block + 15.
INLINE void multiply_part(const int block, const struct unpacked_part *part, const int8_t *q, i16 *ints) {
  _tile_loadd(6, part->words, 64);
  if (block == 0) {
    _tile_zero(0);
    _tile_loadd(4, q, PREPARED);
    _tile_dpbsud(0, 4, 6);
    _tile_stored(0, ints, 64);
  } else {
    _tile_zero(2);
    _tile_loadd(5, q, PREPARED);
    _tile_dpbsud(2, 5, 6);
    _tile_stored(2, ints, 64);
  }
}

// acc[t] += `count` parts, from number `part` of the row on, for the sixteen rows of a block. x: the first of these rows.
INLINE void dot_parts_of_block(const int block, const struct unpacked_part *parts, int part, int count, const uint8_t *x, v16 *acc) {
  v16 sums[16];
  UNROLL for (int t = 0; t < 16; t++) sums[t] = acc[t];
  for (int i = 0; i < count; i++, part++) {
    const struct x_group *group = (const struct x_group *)x + (part * PART - BEFORE) / 32;
    const int half = part * PART % 32 / 16;
    i16 ints[16];
    multiply_part(block, &parts[i], group->q + half * 16, ints);
    struct part_sum sum[16];
    UNROLL for (int t = 0; t < 16; t++) {
      sum[t] = begin_part(of_row(group, t, PREPARED), half);
      sum[t].total = add_ints(sum[t].total, ints[t]);
    }
    add_part(16, sum, group, half, parts[i].scale, sums);
#if MINIMUMS
    add_minimum(16, parts[i].minimum, group, half, sums);
#endif
  }
  UNROLL for (int t = 0; t < 16; t++) acc[t] = sums[t];
}

NOINLINE void dot_parts_of_rows(const struct unpacked_part *parts, int part, int count, const uint8_t *x, int tokens, v16 *acc) {
  dot_parts_of_block(0, parts, part, count, x, acc);
  if (tokens > 16) dot_parts_of_block(1, parts, part, count, x + 16 * PREPARED, acc + 16);
}

#else
#define TILE_COLUMNS 32
#define TILE_BYTES (PANEL_BLOCK_BYTES / BLOCK * TILE_COLUMNS)

// The sums of one panel and sixteen rows, or of two panels and the `tokens` rows of two blocks, over columns 32 k to 32 end - 1.
INLINE void dot_columns(const int wide, const uint8_t *a, const uint8_t *b, const uint8_t *next_panel, const uint8_t *x, long k, long end,
                        v16 sums[2][MAX_TOKENS]) {
  _tile_zero(0);
  if (wide) {
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (; k < end; k++) {
    fetch_ahead(a, wide ? a : next_panel, k * TILE_BYTES, TILE_BYTES, AHEAD(1 + wide, MAX_TOKENS));
    _tile_loadd(6, a + k * TILE_BYTES, 64);
    _tile_loadd(4, x + k * 64, PREPARED);
    _tile_dpbf16ps(0, 4, 6);
    if (wide) {
      fetch_ahead(b, next_panel, k * TILE_BYTES, TILE_BYTES, AHEAD(1 + wide, MAX_TOKENS));
      _tile_loadd(7, b + k * TILE_BYTES, 64);
      _tile_loadd(5, x + 16 * PREPARED + k * 64, PREPARED);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], 64);
  if (wide) {
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[0] + 16, 64);
    _tile_stored(3, sums[1] + 16, 64);
  }
}

// tile[t * pitch + r] = row t of x . row r of panel a, and above of panel b if `wide`.
INLINE void dot_floats(const int wide, const uint8_t *a, const uint8_t *b, const uint8_t *next_panel, const uint8_t *x, int tokens,
                       float *tile, int pitch) {
  v16 sums[2][MAX_TOKENS], waiting[2][WAITING][MAX_TOKENS];
  for (int slice = 0; slice < SLICES; slice++) {
    dot_columns(wide, a, b, next_panel, x, slice_column(slice) / TILE_COLUMNS, slice_column(slice + 1) / TILE_COLUMNS, sums);
    for (int p = 0; SLICES > 1 && p <= wide; p++)
      for (int t = 0; t < tokens; t++) add_slice(1, slice, sums[p] + t, (v16(*)[MAX_TOKENS])(waiting[p][0] + t));
  }
  for (int t = 0; t < tokens; t++)
    for (int p = 0; p <= wide; p++) v16_store(tile + t * pitch + p * 16, sums[p][t]);
}

NOINLINE void dot_two_panels(const uint8_t *a, const uint8_t *b, const uint8_t *next_panel, const uint8_t *x, int tokens, float *tile,
                             int pitch) {
  dot_floats(1, a, b, next_panel, x, tokens, tile, pitch);
}
NOINLINE void dot_panel(const uint8_t *panel, const uint8_t *next_panel, const uint8_t *x, int tokens, float *tile, int pitch) {
  dot_floats(0, panel, 0, next_panel, x, tokens, tile, pitch);
}
#endif

// What panel_dot does with more than STREAM_TOKENS rows of integers, or any of BF16. Threads that hold no tiles are switched faster.
static inline void dot_by_tiles(const uint8_t *a, const uint8_t *b, const uint8_t *next_panel, const uint8_t *x, int tokens, float *tile,
                                int pitch) {
  configure_tiles(tokens);
#if INTEGERS
  dot_unpacked(a, b, x, tokens, tile, pitch);
  dot_unpacked(b, next_panel, x, tokens, tile + 16, pitch);
#else
  if (tokens > 16) dot_two_panels(a, b, next_panel, x, tokens, tile, pitch);
  else {
    dot_panel(a, b, x, tokens, tile, pitch);
    dot_panel(b, next_panel, x, tokens, tile + 16, pitch);
  }
#endif
  _tile_release();
}
#endif
