// attention.h for caches of floats: keys are transposed and converted to float32, values are converted as they are read, or once for many rows.
#pragma once
#include "attention.h"

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
// Their words are columns already. `scales`: of the sixteen keys.
INLINE void unpack_keys(struct prefetch *prefetch, float *kt, const cached *low, const cached *high, v16 scales) {
  for (int j = 0; j < ROW_BYTES / 4; j++) {
    const w16 words = w16_load_halves(low + (long)j * S * 4, high + (long)j * S * 4);
    fetch(prefetch, FETCH_LINES);
    UNROLL for (int i = 0; i < 4; i++) v16_store(kt + (4 * j + i) * TILE, v16_mul(v16_from_e4m3(words, i), scales));
  }
}
#endif

// Keys first to end - 1 of the tile at `start`, to kt [D, TILE]; those around them that share a column are garbage. Blocks that
// hold none of them are not read.
INLINE void load_keys(struct prefetch *prefetch, float *kt, const cached *cache, const int32_t *table, int head, int start, int first,
                      int end) {
  for (int at = first & ~15; at < end; at += 16) {
    const int low = max(at, first & -S), high = second_eight(at, first, end);
    const cached *a = side_of(cache, table[low / TABLE_TOKENS], 0, head, low % S),
                 *b = side_of(cache, table[high / TABLE_TOKENS], 0, head, high % S);
#if PACKED_CACHE
    const uint16_t *of_a = scales_of(cache, table[low / TABLE_TOKENS], 0, head) + low % S,
                   *of_b = scales_of(cache, table[high / TABLE_TOKENS], 0, head) + high % S;
    unpack_keys(prefetch, kt + (at - start), a, b, load_scales(of_a, of_b));
#else
    transpose_keys(FETCH_MORE, prefetch, kt + (at - start), a, b);
#endif
  }
}

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

// Scores of N rows and C columns of sixteen keys: s [N, TILE].
INLINE void score_block(int N, int C, struct prefetch *prefetch, const float *q, const float *kt, float *s) {
  v16 sum[ROWS][COLUMNS];
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = v16_set(0.0f);
  for (int d = 0; d < D; d++) {
    if (d % FETCH_EVERY == 0) fetch(prefetch, FETCH_LINES);
    v16 k[COLUMNS];
    UNROLL for (int c = 0; c < C; c++) k[c] = v16_load(kt + d * TILE + 16 * c);
    UNROLL for (int r = 0; r < N; r++) {
      const v16 x = v16_set(q[r * D + d]);
      UNROLL for (int c = 0; c < C; c++) sum[r][c] = v16_fma(x, k[c], sum[r][c]);
    }
  }
  UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < C; c++) v16_store(s + r * TILE + 16 * c, sum[r][c]);
}

// Where a tile's values are: runs of `length` keys, of VALUE_D numbers each, and D from each to the next where they are `stored`.
struct values {
  const void *run[TILE / 8];
};

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

INLINE void add_values(int N, struct prefetch *prefetch, int stored, int length, float *sums, long stride, const float *p,
                       const struct values *values, int first, int end) {
  int column = 0;
  for (; column + 16 * WIDE <= VALUE_D; column += 16 * WIDE)
    add_value_columns(N, WIDE, prefetch, stored, length, sums, stride, p, values, column, first, end);
  if (REST > 0) add_value_columns(N, REST, prefetch, stored, length, sums, stride, p, values, column, first, end);
}

// The same of one row. Not inlined: it is for the borders of what several rows see, and has a third of the instructions of a block.
NOINLINE void add_row_values(struct prefetch *prefetch, int stored, float *sums, const float *p, const struct values *values, int first,
                             int end) {
  if (stored) add_values(1, prefetch, 1, RUN, sums, 0, p, values, first, end);
  else add_values(1, prefetch, 0, TILE, sums, 0, p, values, first, end);
}

// N rows from row r on, and the tile of keys that begins at `start`.
INLINE void attend_block(int N, struct prefetch *prefetch, int stored, int length, const struct rows *rows, int r, const float *kt,
                         const struct values *values, int start) {
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
  const float *q = rows->q + (long)r * D;
  for (; low + 16 * COLUMNS <= ((high + 15) & ~15); low += 16 * COLUMNS) score_block(N, COLUMNS, prefetch, q, kt + low, s + low);
  if (COLUMNS > 2 && low + 16 < high) score_block(N, 2, prefetch, q, kt + low, s + low), low += 32;
  for (; low < high; low += 16) score_block(N, 1, prefetch, q, kt + low, s + low);
  float *sums = rows->sums + r * rows->stride;
  softmax_rows(N, s, first, end, rows->top + r, rows->weight + 16 * r, sums, rows->stride);
  const int together = N > 1 && both_low < both_high;  // the keys that all see; what one sees before and after them it takes alone
  if (!together) both_low = both_high = TILE;
  for (int i = 0; i < N; i++)
    if (first[i] < both_low && first[i] < end[i])
      add_row_values(prefetch, stored, sums + i * rows->stride, s + i * TILE, values, first[i], min(both_low, end[i]));
  if (!together) return;
  add_values(N, prefetch, stored, length, sums, rows->stride, s, values, both_low, both_high);
  for (int i = 0; i < N; i++)
    if (end[i] > both_high) add_row_values(prefetch, stored, sums + i * rows->stride, s + i * TILE, values, both_high, end[i]);
}

// A tile's keys, transposed, and where its values are.
struct tile {
  float *keys;
  struct values values;
};

// What a tile may need of a thread's scratch: [D, TILE] of keys, and [TILE, VALUE_D] of values if they are copied.
#define TILE_KEYS (D * TILE)
#define TILE_VALUES(copied) (STORED(copied) ? 16 : TILE * VALUE_D)

// Whether values are read where they are stored. `copied`: many rows read them, which pays for converting them once.
#define STORED(copied) (!PACKED_CACHE && !(copied))

INLINE void load_tile(struct prefetch *prefetch, int copied, struct tile *tile, float *keys, float *values, const cached *cache,
                      const int32_t *table, int head, int start, int first, int end) {
  tile->keys = keys;
  load_keys(prefetch, keys, cache, table, head, start, first, end);
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
  const float *kt = tile->keys;
  const struct values *values = &tile->values;
  int r = 0;
  for (; r + ROWS <= count; r += ROWS) attend_block(ROWS, prefetch, stored, length, rows, r, kt, values, start);
  if (ROWS > 2 && r + 2 <= count) attend_block(2, prefetch, stored, length, rows, r, kt, values, start), r += 2;
  for (; r < count; r++) attend_block(1, prefetch, stored, length, rows, r, kt, values, start);
}

static inline void prepare_query(float *to, struct query_scale *scale, const float *q) {
  (void)scale;
  for (int d = 0; d < D; d += 16) v16_store(to + d, v16_load(q + d));
}
