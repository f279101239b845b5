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
// Many rows are blocks of 32, which are multiplied with both panels one after the other. Panels come from memory and rows from the L2, half of
// which is theirs (MAX_TOKENS of product.h); prefetches of the next panels and of the outputs' lines are spread over the steps.
//
// Tiles have no names but numbers, constants of each instruction: 0 and 1 are sums of rows 0 to 15 with panels a and b, 2 and 3 of rows 16 to
// 31; 4 and 5 are these rows of x, 6 and 7 the weights of a and b.
#pragma once
#include "lanes.h"
#include "tile_shapes.h"

#if BY_TILES
#if INTEGERS
#define TILE_X_BYTES PART
#else
#define TILE_X_BYTES 64
#endif

// For `tokens` rows of x, where they are fewer than sixteen: few cost less. Else blocks of sixteen, of which the last may have rows after the
// last one of x.
static inline void configure_tiles(int tokens) {
  const int first = INTEGERS || tokens > 16 ? 16 : tokens, second = INTEGERS || tokens > 16 ? 16 : 0;
  struct tile_shapes shapes = {.palette = 1};
  for (int i = 0; i < 6; i++) {
    const int rows = i == 2 || i == 3 || i == 5 ? second : first;
    set_shape(&shapes, i, rows, i < 4 ? 64 : TILE_X_BYTES);
  }
  for (int i = 6; i < 8; i++) set_shape(&shapes, i, TILE_X_BYTES / 4, 64);
  _tile_loadconfig(&shapes);
}

#if INTEGERS
// Weights less their zero point fit signed bytes: the same sums, without an addition for each.
#define SIGNED (!MINIMUMS && ZERO_POINT > 0)

#if SIGNED
#define MULTIPLY_PART(sums, x, w) _tile_dpbssd(sums, x, w)
#else
#define MULTIPLY_PART(sums, x, w) _tile_dpbsud(sums, x, w)
#endif

static inline void take_zero_point(struct unpacked_part *parts, int count) {
#if SIGNED
  for (int i = 0; i < count; i++)
    for (int j = 0; j < PART_WORDS; j++)
      parts[i].words[j].bytes = _mm512_sub_epi8(parts[i].words[j].bytes, _mm512_set1_epi8((char)ZERO_POINT));
#else
  (void)parts, (void)count;
#endif
}

// The bytes of part `part` of a row.
INLINE const int8_t *part_bytes(const uint8_t *x, int part) {
  return ((const struct x_group *)x + (part * PART - BEFORE) / 32)->q + part * PART % 32 / 16 * 16;
}

// ints[t][r] = the integer dots of a part with sixteen rows, whose bytes begin at `q`.
INLINE void multiply_part(const struct unpacked_part *part, const int8_t *q, i16 *ints) {
  _tile_zero(0);
  _tile_loadd(4, q, PREPARED);
  _tile_loadd(6, part->words, 64);
  MULTIPLY_PART(0, 4, 6);
  _tile_stored(0, ints, 64);
}

// acc[t] += a part's integers, for sixteen rows.
INLINE void add_ints_of_part(const struct unpacked_part *parts, int part, const uint8_t *x, const i16 *ints, v16 *acc) {
  const struct x_group *group = (const struct x_group *)x + (part * PART - BEFORE) / 32;
  const int half = part * PART % 32 / 16;
  struct part_sum sum[16];
  UNROLL for (int t = 0; t < 16; t++) {
    sum[t] = (struct part_sum){ints[t]};
    if (!MINIMUMS && !SIGNED) sum[t].total = add_ints(begin_part(of_row(group, t, PREPARED), half).total, ints[t]);
  }
  add_part(16, sum, group, half, parts->scale, acc);
#if MINIMUMS
  add_minimum(16, parts->minimum, group, half, acc);
#endif
}

// acc[t] += `count` parts, from number `part` of the row on, for sixteen rows from x on. One part after the other: four in tiles at a
// time, or the next one's tiles meanwhile, was slower or no faster (decision 81).
NOINLINE void dot_parts_of_block(const struct unpacked_part *parts, int part, int count, const uint8_t *x, v16 *acc) {
  v16 sums[16];
  UNROLL for (int t = 0; t < 16; t++) sums[t] = acc[t];
  for (int i = 0; i < count; i++) {
    i16 ints[16];
    multiply_part(parts + i, part_bytes(x, part + i), ints);
    add_ints_of_part(parts + i, part + i, x, ints, sums);
  }
  UNROLL for (int t = 0; t < 16; t++) acc[t] = sums[t];
}

static inline void dot_parts_of_rows(struct unpacked_part *parts, int part, int count, const uint8_t *x, int tokens, v16 *acc) {
  take_zero_point(parts, count);
  for (; tokens > 0; tokens -= 16, x += 16 * PREPARED, acc += 16) dot_parts_of_block(parts, part, count, x, acc);
}

#else
#define TILE_COLUMNS 32
#define TILE_BYTES (PANEL_BLOCK_BYTES / BLOCK * TILE_COLUMNS)

// What comes to the caches while panels are multiplied: `lines` of each of the next two panels for a step of 32 columns, to the L2; and where
// the caller will write its results, a row each second step. Stores that missed took a quarter of the time.
struct coming {
  const uint8_t *panels;
  int lines, rows;  // rows of results that are still to come
  const float *out;
  long pitch;
};
INLINE void fetch_coming(struct coming *c) {
  for (int i = 0; i < c->lines; i++, c->panels += 64) {
    __builtin_prefetch(c->panels, 0, 2);
    __builtin_prefetch(c->panels + PANEL, 0, 2);
  }
}
INLINE void fetch_results(struct coming *c) {
  if (c->rows-- <= 0) return;
  __builtin_prefetch(c->out, 1);
  __builtin_prefetch(c->out + 16, 1);
  c->out += c->pitch;
}

// Columns 32 k to 32 end - 1 of sixteen rows or fewer and one panel, which comes from memory: sums[t * 16 + r].
INLINE void multiply_stream(const uint8_t *a, const uint8_t *next_panel, const uint8_t *x, long k, long end, float *sums) {
  _tile_zero(0);
  for (; k < end; k++) {
    fetch_ahead(1, MAX_TOKENS, a, next_panel, k * TILE_BYTES, TILE_BYTES);
    _tile_loadd(6, a + k * TILE_BYTES, 64);
    _tile_loadd(4, x + k * 64, PREPARED);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, sums, 64);
}

#define TREE (SLICES / PASSES)  // slices of a pass
#define LEVELS (TREE > 4 ? 3 : TREE > 2 ? 2 : 1)

// The sums of an odd slice join those before it in the tree, some at each step of the next slice: tiles and lanes then work together.
struct folding {
  v16 sums[64], waiting[WAITING][64];  // waiting[0]: of the even slice before
  float *tile;
  int pitch, slice, from, share;  // of `slice`'s sums those from `from` on are still to be added, `share` at a step
};
INLINE void fold_level(const int level, struct folding *f, int from, int end) {
  for (int i = from; i < end; i++) {
    v16 sum = v16_add(f->waiting[0][i], f->sums[i]);
    for (int l = 1; l < level; l++) sum = v16_add(f->waiting[l < WAITING ? l : 0][i], sum);
    if (level == LEVELS) v16_store(f->tile + i / 2 * f->pitch + i % 2 * 16, sum);
    else f->waiting[level < WAITING ? level : 0][i] = sum;
  }
}
INLINE void fold(struct folding *f, const int vectors, int share) {
  const int from = f->from, end = from + share < vectors ? from + share : vectors;
  if ((f->slice & 3) == 1) fold_level(1, f, from, end);
  else if ((f->slice & 7) == 3) fold_level(2, f, from, end);
  else fold_level(3, f, from, end);
  f->from = end;
}

// The same of a block of 16 or 32 rows and two panels: sums[t * pitch + r], b's sixteen after a's.
INLINE void multiply_block(const int rows, const uint8_t *a, const uint8_t *b, const uint8_t *x, long k, long end, struct coming *next,
                           struct folding *last, float *sums, long pitch) {
  _tile_zero(0);
  _tile_zero(1);
  if (rows > 16) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (; k < end; k++) {
    if (next->lines > 0) fetch_coming(next);
    else if (next->lines == 0) {
      fetch_ahead(2, MAX_TOKENS, a, next->panels, k * TILE_BYTES, TILE_BYTES);
      fetch_ahead(2, MAX_TOKENS, b, next->panels + PANEL, k * TILE_BYTES, TILE_BYTES);
    }
    if (k % 2 == 0) fetch_results(next);
    if (TREE > 1) fold(last, 2 * rows, last->share);
    _tile_loadd(4, x + k * 64, PREPARED);
    _tile_loadd(6, a + k * TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + k * TILE_BYTES, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (rows > 16) {
      _tile_loadd(5, x + 16 * PREPARED + k * 64, PREPARED);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  if (TREE > 1) fold(last, 2 * rows, 2 * rows);  // of an empty slice: before its sums replace those of the slice before
  _tile_stored(0, sums, 4 * pitch);
  _tile_stored(1, sums + 16, 4 * pitch);
  if (rows > 16) {
    _tile_stored(2, sums + 16 * pitch, 4 * pitch);
    _tile_stored(3, sums + 16 * pitch + 16, 4 * pitch);
  }
}

#define FIRST_STEP(slice) (slice_column(slice) / TILE_COLUMNS)

// tile[t * pitch + r] = row t of x . row r of the panel; at most sixteen rows.
NOINLINE void dot_stream(const uint8_t *panel, const uint8_t *next_panel, const uint8_t *x, int tokens, float *tile, int pitch) {
  v16 sums[16], waiting[WAITING][MAX_TOKENS];
  for (int slice = 0; slice < SLICES; slice++) {
    multiply_stream(panel, next_panel, x, FIRST_STEP(slice), FIRST_STEP(slice + 1), (float *)sums);
    for (int t = 0; t < tokens; t++) add_slice(1, slice, sums + t, (v16(*)[MAX_TOKENS])(waiting[0] + t));
  }
  for (int t = 0; t < tokens; t++) v16_store(tile + t * pitch, sums[t]);
}

// The same of both panels and a block of rows, over the slices of a pass.
INLINE void dot_block(const int rows, int pass, const uint8_t *a, const uint8_t *b, const uint8_t *x, struct coming *next, float *tile,
                      int pitch) {
  if (TREE == 1) {
    multiply_block(rows, a, b, x, FIRST_STEP(pass), FIRST_STEP(pass + 1), next, 0, tile, pitch);
    return;
  }
  struct folding f = {.tile = tile, .pitch = pitch, .from = 2 * rows};
  for (int slice = 0; slice < TREE; slice++) {
    const long first = FIRST_STEP(pass * TREE + slice), end = FIRST_STEP(pass * TREE + slice + 1);
    f.share = first < end ? (int)((2 * rows + end - first - 1) / (end - first)) : 0;
    multiply_block(rows, a, b, x, first, end, next, &f, (float *)(slice & 1 ? f.sums : f.waiting[0]), 32);
    if (slice & 1) f.slice = slice, f.from = 0;
  }
  fold(&f, 2 * rows, 2 * rows);
}

NOINLINE void dot_blocks(int pass, const uint8_t *a, const uint8_t *b, const uint8_t *next_panel, const uint8_t *x, int tokens,
                         struct results to) {
  const int blocks = (tokens + 31) / 32;
  const uint8_t *next_columns = next_panel + FIRST_STEP(pass * TREE) * TILE_BYTES;
  struct coming next = {next_columns, blocks > 3 ? (TILE_BYTES / 64 + blocks - 1) / blocks : 0, to.out && blocks > 3 ? tokens : 0, to.out,
                        to.out_pitch};
  for (; tokens > 16; tokens -= 32, x += 32 * PREPARED, to.tile += 32 * to.pitch) {
    dot_block(32, pass, a, b, x, &next, to.tile, to.pitch);
    if (next.lines == 0) next.lines = -1;
  }
  if (tokens > 0) dot_block(16, pass, a, b, x, &next, to.tile, to.pitch);
}
#endif

// What panel_dot does with more than STREAM_TOKENS rows of integers, or any of BF16; of BF16 for one pass, or for ALL_PASSES. Threads that hold
// no tiles are switched faster.
static inline void dot_by_tiles(int pass, const uint8_t *a, const uint8_t *b, const uint8_t *next_panel, const uint8_t *x, int tokens,
                                struct results to) {
  configure_tiles(tokens);
#if INTEGERS
  (void)pass;
  dot_unpacked(a, b, x, tokens, to.tile, to.pitch);
  dot_unpacked(b, next_panel, x, tokens, to.tile + 16, to.pitch);
#else
  if (tokens > 16 || pass >= 0) dot_blocks(pass < 0 ? 0 : pass, a, b, next_panel, x, tokens, to);
  else {
    dot_stream(a, b, x, tokens, to.tile, to.pitch);
    dot_stream(b, next_panel, x, tokens, to.tile + 16, to.pitch);
  }
#endif
  _tile_release();
}
#endif
