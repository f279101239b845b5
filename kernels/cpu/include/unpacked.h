// Many rows of x and integer weights, where few rows fit the registers: some columns of a panel are unpacked once to operands and scales,
// which stay in the L1, and meet all rows of the tile, TOGETHER at a time. The same sums in the same order as in dot_tile.
#pragma once
#include "x_group.h"

#if UNPACKS
#define PIECE_PARTS (256 / PART)  // parts unpacked together
#if BY_TILES
#define TOGETHER 16  // rows whose sums are in registers together
#define ROWS_WITH_SUMS ((tokens + 15) / 16 * 16)
#else
#define TOGETHER 6
#define ROWS_WITH_SUMS MAX_TOKENS
#endif

struct unpacked_part {
  struct operand words[PART_WORDS];
  v16 scale;
#if MINIMUMS
  v16 minimum;
#endif
};

// Parts from number `part` of a panel on, `count` of them.
INLINE void unpack_parts(struct unpacked_part *to, const uint8_t *panel, const uint8_t *next_panel, int part, int count) {
  for (int i = 0; i < count; i++, part++) {
    const int b = part / PARTS, p = part % PARTS;
    const uint8_t *block = panel + (long)b * PANEL_BLOCK_BYTES;
    fetch_ahead(1, MAX_TOKENS, panel, next_panel, (long)b * PANEL_BLOCK_BYTES + p * SHARE, SHARE);
    dot_part(0, block, p, 0, 0, (struct part_sum *)to[i].words);
    to[i].scale = part_scale(block, p);
#if MINIMUMS
    to[i].minimum = part_minimum(block, p);
#endif
  }
}

// acc[t] += `count` parts, from number `part` of the row on; t < tokens. x: the first of these rows.
#if BY_TILES
static inline void dot_parts_of_rows(struct unpacked_part *parts, int part, int count, const uint8_t *x, int tokens, v16 *acc);  // tiles.h
#else
INLINE void dot_parts(const int tokens, const struct unpacked_part *parts, int part, int count, const uint8_t *x, v16 *acc) {
  v16 sums[TOGETHER];
  UNROLL for (int t = 0; t < tokens; t++) sums[t] = acc[t];
  for (int i = 0; i < count; i++, part++) {
    const struct x_group *group = (const struct x_group *)x + (part * PART - BEFORE) / 32;
    const int half = part * PART % 32 / 16;
    struct part_sum sum[TOGETHER];
    UNROLL for (int t = 0; t < tokens; t++) sum[t] = begin_part(of_row(group, t, PREPARED), half);
    UNROLL for (int j = 0; j < PART_WORDS; j++) dot_operand(tokens, &parts[i].words[j], group, half * 4 + j, PREPARED, sum);
    add_part(tokens, sum, group, half, parts[i].scale, sums);
#if MINIMUMS
    add_minimum(tokens, parts[i].minimum, group, half, sums);
#endif
  }
  UNROLL for (int t = 0; t < tokens; t++) acc[t] = sums[t];
}

NOINLINE void dot_parts_of_rows(const struct unpacked_part *parts, int part, int count, const uint8_t *x, int tokens, v16 *acc) {
  for (; tokens > 4; tokens -= TOGETHER, x += TOGETHER * PREPARED, acc += TOGETHER) dot_parts(TOGETHER, parts, part, count, x, acc);
  if (tokens > 2) dot_parts(4, parts, part, count, x, acc);
  else if (tokens > 0) dot_parts(2, parts, part, count, x, acc);
}
#endif

// tile[t * pitch + r] = row t of x . row r of the panel; STREAM_TOKENS < tokens <= MAX_TOKENS.
NOINLINE void dot_unpacked(const uint8_t *panel, const uint8_t *next_panel, const uint8_t *x, int tokens, float *tile, int pitch) {
  struct unpacked_part parts[PIECE_PARTS];
  v16 acc[MAX_TOKENS], waiting[WAITING][MAX_TOKENS];
  for (int slice = 0; slice < SLICES; slice++) {
    const int start = (int)(BEFORE + slice_column(slice)) / PART, end = (int)(BEFORE + slice_column(slice + 1)) / PART;
    for (int t = 0; t < ROWS_WITH_SUMS; t++) acc[t] = v16_set(0.0f);
    for (int part = start, count; part < end; part += count) {
      count = end - part < PIECE_PARTS ? end - part : PIECE_PARTS;
      unpack_parts(parts, panel, next_panel, part, count);
      dot_parts_of_rows(parts, part, count, x, tokens, acc);
    }
    for (int t = 0; t < ROWS_WITH_SUMS; t += TOGETHER) add_slice(TOGETHER, slice, acc + t, (v16(*)[MAX_TOKENS])(waiting[0] + t));
  }
  for (int t = 0; t < tokens; t++) v16_store(tile + t * pitch, acc[t]);
}
#endif
