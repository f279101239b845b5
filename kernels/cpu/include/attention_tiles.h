// attention.h for BF16 and KV_FP8 with AMX: keys and values are multiplied as they are stored, but for their scales; rows of q and the weights of a tile
// are rounded to bfloat16 first, as GPUs do it. Sums are float32, in the order of _tile_dpbf16ps (tiles.h), 32 features or keys at a time, ascending.
//
// Any number of rows is multiplied by tiles, one too, so that a row has its bits in any batch. Of many rows (`copied`) 32 are a block: four sums
// of 16 x 16; keys are transposed and values paired once for all of them. Of few rows 16 are a block: keys are the first operand, where they are
// stored, and the scores are transposed instead, which is the same sum; values are paired 32 keys at a time. A tile of keys and the scores of a
// block must fit the L1 together. Lines of the next tile are requested at all steps: where pairing alone requested them, decodes took an eighth longer.
//
// The largest score of a row is followed loosely: a partition's sums are rescaled when a score is SLACK above the one that weights are relative to,
// which then are up to 2^8, and hardly ever after its first tile. (As FlashAttention 4 does it.)
#pragma once
#include "attention.h"

#define ROW_BLOCK 32
#define PAIRS ((D + 31) / 32 * 16)  // words of a row of q, and of a key: pairs of features, and zeros up to whole tiles
#define STEP_WORDS (16 * VALUE_D)   // 32 keys' values: [VALUE_D / 16, 16, 16], pairs of keys for sixteen features

#define FETCH_ROW ((TILE_LINES + 127) / 128)  // lines of the next tile that are requested at each of many rows

#if CACHE_TYPE == KV_FP8
#include "attention_tile_fp8.h"
#else
#include "attention_tile_bf16.h"
#endif

// --- products. Tiles 0 and 1 are sums of rows 0 to 15 of a block, 2 and 3 of rows 16 to 31; 4 and 5 are these rows of q or of weights, 6 and 7
// words of keys or of values. `both`: whether there are more than sixteen rows.

static inline void configure_rows(int first, int second) {
  struct tile_shapes shapes = {.palette = 1};
  for (int i = 0; i < 6; i++) set_shape(&shapes, i, i == 2 || i == 3 || i == 5 ? second : first, 64);
  set_shape(&shapes, 6, 16, 64), set_shape(&shapes, 7, 16, 64);
  _tile_loadconfig(&shapes);
}

INLINE void zero_sums(const int both) {
  _tile_zero(0);
  _tile_zero(1);
  if (both) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

INLINE void load_sums(const int both, const float *a, const float *b, long pitch) {
  _tile_loadd(0, a, 4 * pitch);
  _tile_loadd(1, b, 4 * pitch);
  if (both) {
    _tile_loadd(2, a + 16 * pitch, 4 * pitch);
    _tile_loadd(3, b + 16 * pitch, 4 * pitch);
  }
}

INLINE void store_sums(const int both, float *a, float *b, long pitch) {
  _tile_stored(0, a, 4 * pitch);
  _tile_stored(1, b, 4 * pitch);
  if (both) {
    _tile_stored(2, a + 16 * pitch, 4 * pitch);
    _tile_stored(3, b + 16 * pitch, 4 * pitch);
  }
}

// The four loads first: in another order they take a fifth longer.
INLINE void multiply_step(const int both, const uint32_t *x, long x_pitch, const uint32_t *a, const uint32_t *b) {
  _tile_loadd(4, x, 4 * x_pitch);
  _tile_loadd(6, a, 64);
  _tile_loadd(7, b, 64);
  if (both) _tile_loadd(5, x + 16 * x_pitch, 4 * x_pitch);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (both) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Scores s [rows, TILE] of the keys low to high - 1, which are multiples of 32.
INLINE void score_block(const int both, float *s, const uint32_t *q, const uint32_t *keys, int low, int high) {
  for (int c = low; c < high; c += 32) {
    const uint32_t *a = keys + c * PAIRS, *b = a + 16 * PAIRS;
    zero_sums(both);
    for (int j = 0; j < PAIRS; j += 16) multiply_step(both, q + j, D, a + 16 * j, b + 16 * j);
    store_sums(both, s + c, s + c + 16, TILE);
  }
}

// sums += weights p [rows, TILE / 2] of 32 keys at each of `steps` times their values.
INLINE void add_values(const int both, const int lines, struct prefetch *prefetch, float *sums, long pitch, const uint32_t *p,
                       const uint32_t *values, int steps) {
  for (int d = 0; d < VALUE_D; d += 32) {
    const int next = d + 16 < VALUE_D ? 16 : 0;  // where sixteen features are left, they are computed twice
    const uint32_t *a = values + 16 * d, *b = a + 16 * next;
    load_sums(both, sums + d, sums + d + next, pitch);
    for (int step = 0; step < steps; step++) {
      multiply_step(both, p + 16 * step, TILE / 2, a + step * STEP_WORDS, b + step * STEP_WORDS);
      fetch(prefetch, lines);
    }
    store_sums(both, sums + d, sums + d + next, pitch);
  }
}

// --- scores to weights

#define EXPONENT (SCALE * 1.44269504f)
#define SLACK (8.0f / EXPONENT)

// 2^x, 9e-5 off at most relative to the result, a twentieth of what rounding to bfloat16 changes; 0 below -100, as v16_exp2. The polynomial is for 2^r, r from 0
// to 1, fitted for the least relative error.
INLINE v16 power_of_two(v16 x) {
  const v16 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  v16 y = v16_set(7.706705481e-2f);
  y = v16_fma(y, r, v16_set(2.276449800e-1f));
  y = v16_fma(y, r, v16_set(6.951168180e-1f));
  y = v16_fma(y, r, v16_set(1.0f));
  return v16_zero_below(_mm512_scalef_ps(y, x), x, v16_set(-100.0f));
}

// The largest score of the keys first to end - 1 in each of sixteen columns. `whole`: of all keys.
INLINE v16 largest(const int whole, const float *s, int first, int end) {
  v16 most = v16_set(NO_SCORE);
  if (whole) return max_columns(TILE / 16, s);
  for (int c = first & ~15; c < end; c += 16) most = v16_max(most, within(v16_load(s + c), c, first, end, v16_set(NO_SCORE)));
  return most;
}

// Scores s of a row become weights p, 0 for keys that it does not see, from key low to high - 1; returned is their sum before rounding.
INLINE v16 weigh(const int whole, uint32_t *p, const float *s, const struct tile *tile, float top, int first, int end, int low, int high) {
  const v16 zero = v16_set(0.0f), less = v16_set(-top * EXPONENT), factor = v16_set(EXPONENT);
  v16 sum = zero;
  for (int c = low; c < high; c += 32) {
    v16 a = power_of_two(v16_fma(v16_load(s + c), factor, less)), b = power_of_two(v16_fma(v16_load(s + c + 16), factor, less));
    if (!whole) a = within(a, c, first, end, zero), b = within(b, c + 16, first, end, zero);
    sum = v16_add(sum, v16_add(a, b));
    _mm512_storeu_si512(p + c / 2, weight_words(whole, a, b, tile, c, first, end));
  }
  return sum;
}

// From here on the weights of row r are relative to `now`.
INLINE void raise_top(const struct rows *rows, int r, float now) {
  const float before = rows->top[r];
  float *sums = rows->sums + r * rows->stride, *weight = rows->weight + 16 * r;
  rows->top[r] = now;
  if (before == NO_SCORE) return;  // all of these are 0 yet
  const v16 fade = exp_scaled(v16_set(before - now));
  v16_store(weight, v16_mul(v16_load(weight), fade));
  for (int d = 0; d < VALUE_D; d += 16) v16_store(sums + d, v16_mul(v16_load(sums + d), fade));
}

// --- rows

struct block {  // of `count` rows, from `row` on, and a tile
  int row, count;
  int first[ROW_BLOCK], end[ROW_BLOCK];  // row i sees the keys first[i] to end[i] - 1 of the tile, if there are any
  int low, high;                         // multiples of 32 around the keys that some row sees; equal if there are none
  int partly;                            // whether a row does not see all that others see
};

INLINE void place_block(struct block *block, const struct rows *rows, int row, int count, const struct tile *tile, int start) {
  int low = TILE, high = 0;
  block->row = row, block->count = count, block->partly = 0;
  for (int i = 0; i < count; i++) {
    const int position = position_of(rows, row + i);
    const int first = block->first[i] = max(0, first_visible(position) - start), end = block->end[i] = min(TILE, position + 1 - start);
    block->partly |= first > tile->first || end < tile->end;
    if (first < end) low = min(low, first), high = max(high, end);
  }
  block->low = low & ~31, block->high = max(block->low, (high + 31) & ~31);
}

INLINE void weigh_block(const int lines, struct prefetch *prefetch, uint32_t *p, float *s, const struct block *block,
                        const struct rows *rows, const struct tile *tile) {
  for (int i = 0; i < block->count; i += 4) {
    const int count = min(4, block->count - i);
    v16 most[4] = {v16_set(NO_SCORE), v16_set(NO_SCORE), v16_set(NO_SCORE), v16_set(NO_SCORE)};
    float now[4];
    for (int j = 0; j < count; j++) {
      const int first = block->first[i + j], end = block->end[i + j], whole = first == 0 && end == TILE;
      scale_scores(s + (i + j) * TILE, tile, block->low, block->high);
      cap_scores(1, s + (i + j) * TILE);
      most[j] = whole ? largest(1, s + (i + j) * TILE, 0, TILE) : largest(0, s + (i + j) * TILE, first, end);
    }
    v16_max_four(now, most);
    for (int j = i; j < i + count; j++) {
      const int first = block->first[j], end = block->end[j], r = block->row + j;
      const float *from = s + j * TILE;
      float *weight = rows->weight + 16 * r;
      if (!(now[j - i] <= rows->top[r] + SLACK)) raise_top(rows, r, now[j - i]);
      const float top = rows->top[r];
      const v16 sum = first == 0 && end == TILE ? weigh(1, p + j * (TILE / 2), from, tile, top, 0, TILE, 0, TILE)
                                                : weigh(0, p + j * (TILE / 2), from, tile, top, first, end, block->low, block->high);
      v16_store(weight, v16_add(v16_load(weight), sum));
      fetch(prefetch, lines);
    }
  }
}

static inline int are_finite(const uint32_t *words, int count) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  for (int i = 0; i < count; i += 16)
    if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(w16_load(words + i), exponent), exponent)) return 0;
  return 1;
}

// add_values row by row, each with the values that it sees, of the keys from `key` on: 0 times a NaN of another key is not 0.
NOINLINE void add_seen_values(const struct block *block, const struct rows *rows, const uint32_t *p, const uint32_t *values, int key,
                              int steps) {
  uint32_t seen[STEP_WORDS] __attribute__((aligned(64)));
  configure_rows(1, 0);
  for (int i = 0; i < block->count; i++)
    for (int step = 0; step < steps; step++) {
      for (int at = 0; at < STEP_WORDS; at += 16) {
        const int low = key + 32 * step + at / 16 % 16 * 2, first = block->first[i], end = block->end[i];
        const uint32_t mask = (low >= first && low < end ? 0xFFFFu : 0) | (low + 1 >= first && low + 1 < end ? 0xFFFF0000u : 0);
        _mm512_store_si512(seen + at, _mm512_and_si512(w16_load(values + step * STEP_WORDS + at), _mm512_set1_epi32((int)mask)));
      }
      add_values(0, 0, 0, rows->sums + (block->row + i) * rows->stride, rows->stride, p + i * (TILE / 2) + 16 * step, seen, 1);
    }
}

// The values of the keys from `key` on, of which p and values are. If some are not finite, tiles are configured again.
INLINE int add_block(const int both, const int lines, struct prefetch *prefetch, const struct block *block, const struct rows *rows,
                     const uint32_t *p, const uint32_t *values, int key, int steps) {
  if (!VALUES_ARE_FINITE && block->partly && !are_finite(values, steps * STEP_WORDS)) {
    add_seen_values(block, rows, p, values, key, steps);
    return 0;
  }
  add_values(both, lines, prefetch, rows->sums + block->row * rows->stride, rows->stride, p, values, steps);
  return 1;
}

// Not inlined twice into the loop over tiles: a quarter of the time of a first start that the kernel took.
NOINLINE void attend_many(const int both, struct prefetch *prefetch, const struct block *block, const struct rows *rows,
                          const struct tile *tile) {
  float s[ROW_BLOCK * TILE] __attribute__((aligned(64)));
  uint32_t p[ROW_BLOCK * TILE / 2] __attribute__((aligned(64)));
  const int low = block->low, high = block->high;
  score_block(both, s, rows->q + (long)block->row * D, tile->keys, low, high);
  weigh_block(FETCH_ROW, prefetch, p, s, block, rows, tile);
  add_block(both, 0, prefetch, block, rows, p + low / 2, tile->values + low / 32 * STEP_WORDS, low, (high - low) / 32);
}

#if CACHE_TYPE == BF16
#include "attention_few_rows.h"
#endif

INLINE void attend_copies(struct prefetch *prefetch, const struct rows *rows, int count, const struct tile *tile, int start) {
  for (int row = 0; row < count; row += ROW_BLOCK) {
    struct block block;
    place_block(&block, rows, row, min(ROW_BLOCK, count - row), tile, start);
    if (block.low == block.high) continue;
    configure_rows(min(block.count, 16), max(block.count - 16, 0));
    if (block.count > 16) attend_many(1, prefetch, &block, rows, tile);
    else attend_many(0, prefetch, &block, rows, tile);
  }
}

// All `count` rows and one tile. Threads that hold no tiles are switched faster.
INLINE void attend(struct prefetch *prefetch, int copied, const struct rows *rows, int count, const struct tile *tile, int start) {
#if CACHE_TYPE == BF16
  if (IN_PLACE(copied))
    for (int row = 0; row < count; row += FEW_ROWS) attend_few(prefetch, rows, row, min(FEW_ROWS, count - row), tile, start);
  else attend_copies(prefetch, rows, count, tile, start);
#else
  (void)copied;
  attend_copies(prefetch, rows, count, tile, start);
#endif
  _tile_release();
}
