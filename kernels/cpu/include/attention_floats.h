// attention.h for caches of floats and KV_FP8: keys are transposed, and a block of rows is multiplied with columns of sixteen of them. What a
// number is, and how values are read: attention_singles.h, or attention_pairs.h.
#pragma once
#include "attention.h"

// Where a tile's values are: runs of `length` keys, of VALUE_D numbers each, and D from each to the next where they are `stored`.
struct values {
  const void *run[TILE / 8];
};

// A tile's keys, transposed, and where its values are.
struct tile {
  key_word *keys;
  struct values values;
#if BY_PAIRS && PACKED_CACHE
  float key_scale[TILE], value_scale[TILE];
#endif
};

#if BY_PAIRS
#include "attention_pairs.h"
#else
#include "attention_singles.h"
#endif

// Keys first to end - 1 of the tile at `start`, as [SCORE_STEPS, TILE]; those around them that share a column are garbage. Blocks that
// hold none of them are not read.
INLINE void load_keys(struct prefetch *prefetch, struct tile *tile, const cached *cache, const int32_t *table, int head, int start,
                      int first, int end) {
  for (int at = first & ~15; at < end; at += 16) {
    const int low = max(at, first & -S), high = second_eight(at, first, end);
    const cached *a = side_of(cache, table[low / TABLE_TOKENS], 0, head, low % S),
                 *b = side_of(cache, table[high / TABLE_TOKENS], 0, head, high % S);
#if PACKED_CACHE
    v16 scales[2];
    for (int side = 0; side < 1 + BY_PAIRS; side++)
      scales[side] = load_scales(scales_of(cache, table[low / TABLE_TOKENS], side, head) + low % S,
                                 scales_of(cache, table[high / TABLE_TOKENS], side, head) + high % S);
    unpack_keys(prefetch, tile, at - start, a, b, scales);
#else
    transpose_keys(FETCH_MORE, prefetch, tile->keys + (at - start), a, b);
#endif
  }
}

// Scores of N rows and C columns of sixteen keys: s [N, TILE].
INLINE void score_block(int N, int C, struct prefetch *prefetch, const query *q, const key_word *kt, float *s) {
  v16 sum[ROWS][COLUMNS];
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = v16_set(0.0f);
  for (int d = 0; d < SCORE_STEPS; d++) {
    if (d % FETCH_EVERY == 0) fetch(prefetch, FETCH_LINES);
    key_column k[COLUMNS];
    UNROLL for (int c = 0; c < C; c++) k[c] = load_column(kt + d * TILE + 16 * c);
    UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = add_score(sum[r][c], q[r * D + d], k[c]);
  }
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) v16_store(s + r * TILE + 16 * c, sum[r][c]);
}

INLINE void add_values(int N, struct prefetch *prefetch, int stored, int length, float *sums, long stride, const weight *p,
                       const struct values *values, int first, int end) {
  int column = 0;
  for (; column + 16 * WIDE <= VALUE_D; column += 16 * WIDE)
    add_value_columns(N, WIDE, prefetch, stored, length, sums, stride, p, values, column, first, end);
  if (REST > 0) add_value_columns(N, REST, prefetch, stored, length, sums, stride, p, values, column, first, end);
}

// The same of one row. Not inlined: it is for the borders of what several rows see, and has a third of the instructions of a block.
NOINLINE void add_row_values(struct prefetch *prefetch, int stored, float *sums, const weight *p, const struct values *values, int first,
                             int end) {
  if (stored) add_values(1, prefetch, 1, RUN, sums, 0, p, values, first, end);
  else add_values(1, prefetch, 0, TILE, sums, 0, p, values, first, end);
}

// N rows from row r on, and the tile of keys that begins at `start`.
INLINE void attend_block(int N, struct prefetch *prefetch, int stored, int length, const struct rows *rows, int r, const struct tile *tile,
                         int start) {
  float s[ROWS * TILE] __attribute__((aligned(64)));
  int first[ROWS], end[ROWS], low = TILE, high = 0, both_low = 0, both_high = TILE;
  UNROLL for (int i = 0; i < N; i++) {
    const int position = position_of(rows, r + i);
    first[i] = max(0, first_visible(position) - start);
    end[i] = min(TILE, position + 1 - start);
    low = min(low, first[i]), high = max(high, end[i]);
    both_low = max(both_low, first[i]), both_high = min(both_high, end[i]);
  }
  low &= ~15;
  if (low >= high) return;
  const int from = low;
  const query *q = rows->q + (long)r * D;
  const key_word *kt = tile->keys;
  const struct values *values = &tile->values;
  for (; low + 16 * COLUMNS <= ((high + 15) & ~15); low += 16 * COLUMNS) score_block(N, COLUMNS, prefetch, q, kt + low, s + low);
  if (COLUMNS > 2 && low + 16 < high) score_block(N, 2, prefetch, q, kt + low, s + low), low += 32;
  for (; low < high; low += 16) score_block(N, 1, prefetch, q, kt + low, s + low);
  float *sums = rows->sums + r * rows->stride;
  scale_scores(N, s, tile, from, high);
  softmax_rows(N, s, first, end, rows->top + r, rows->weight + 16 * r, sums, rows->stride);
  round_weights(N, s, tile, first, end, from, high);
  const weight *p = (const weight *)s;
  both_low = (both_low + KEYS_AT_ONCE - 1) & -KEYS_AT_ONCE, both_high &= -KEYS_AT_ONCE;
  const int together = N > 1 && both_low < both_high;  // the keys that all see; what one sees before and after them it takes alone
  if (!together) both_low = both_high = TILE;
  for (int i = 0; i < N; i++)
    if (first[i] < both_low && first[i] < end[i])
      add_row_values(prefetch, stored, sums + i * rows->stride, p + i * TILE, values, first[i], min(both_low, end[i]));
  if (!together) return;
  add_values(N, prefetch, stored, length, sums, rows->stride, p, values, both_low, both_high);
  for (int i = 0; i < N; i++)
    if (end[i] > both_high) add_row_values(prefetch, stored, sums + i * rows->stride, p + i * TILE, values, both_high, end[i]);
}

// What a tile may need of a thread's scratch: [D, TILE] of keys, and [TILE, VALUE_D] of values if they are copied.
#define TILE_KEYS (SCORE_STEPS * TILE)
#define TILE_VALUES(copied) (STORED(copied) ? 16 : TILE / (1 + BY_PAIRS) * VALUE_D)

// Whether values are read where they are stored. `copied`: many rows read them, which pays for converting them once.
#define STORED(copied) (!PACKED_CACHE && !(copied))

INLINE void load_tile(struct prefetch *prefetch, int copied, struct tile *tile, float *keys, float *values, const cached *cache,
                      const int32_t *table, int head, int start, int first, int end) {
  tile->keys = (key_word *)keys;
  load_keys(prefetch, tile, cache, table, head, start, first, end);
  if (STORED(copied)) {
    for (int at = first & -RUN; at < end; at += RUN)
      tile->values.run[(at - start) / RUN] = side_of(cache, table[at / TABLE_TOKENS], 1, head, at % S);
  } else {
    copy_values(values, cache, table, head, start, first, end);
    tile->values.run[0] = values;
  }
}

// All `count` rows and one tile.
INLINE void attend(struct prefetch *prefetch, int copied, const struct rows *rows, int count, const struct tile *tile, int start) {
  const int stored = STORED(copied), length = stored ? RUN : TILE;
  int r = 0;
  for (; r + ROWS <= count; r += ROWS) attend_block(ROWS, prefetch, stored, length, rows, r, tile, start);
  if (ROWS > 2 && r + 2 <= count) attend_block(2, prefetch, stored, length, rows, r, tile, start), r += 2;
  for (; r < count; r++) attend_block(1, prefetch, stored, length, rows, r, tile, start);
}
