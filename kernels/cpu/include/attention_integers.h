// attention.h for KV_INT8 and KV_INT4: sums of products of integers, which are exact and so have one result in any order and variant.
//
// A row of q becomes whole numbers up to 127 with one scale: they are off by 4e-3 of the largest number, as keys of KV_INT8 are. The weights of
// a row in a tile, each times its value's scale first, become whole numbers up to 126; what rounding leaves of a weight is added to
// the weight sixteen keys later, and the sum of many small ones is kept. (Queries and weights of 8 bits: SageAttention, arXiv:2410.02367.)
// The quants are unsigned. The sums of quant * n are less by CENTRE * sum(n), CENTRE being 128 or 7.5. Blocks are read where they are: words of
// four columns of sixteen keys, and of four keys for sixteen columns.
#pragma once
#include "attention.h"

#define MAX_WEIGHT 126.0f  // and up to half of one that was left over
#define MAX_QUERY 127.0f
#define CENTRE (CACHE_TYPE == KV_INT8 ? 128.0f : 7.5f)
#define SMALLEST 0x1p-100f  // rows and weights whose largest number is smaller count as 0: its inverse must not overflow
#define HALVES (CACHE_TYPE == KV_INT4 ? 2 : 1)  // columns in a load of values

#define TILE_KEYS 16
#define TILE_VALUES(copied) 16

struct tile {
  const uint8_t *keys[TILE / 8], *values[TILE / 8];  // each eight keys': their word j at keys + j * S * 4, and two groups of four values
  float key_scale[TILE], value_scale[TILE];
  uint32_t *unpacked_keys;    // [TILE / 16, KEY_WORDS, 16], if `copied` (attention_integer_tiles.h)
  uint32_t *unpacked_values;  // [D / 16, TILE / 4, 16]
};

// What sixteen numbers are multiplied with to become whole ones up to `most`, `top` being the largest; 0 if they are too small.
INLINE v16 inverse_of(float top, float most) { return v16_set(top > SMALLEST ? most / top : 0.0f); }

// The scale of numbers that had the factor `most` / `top`, from the sum of the whole ones: NaN if one of them was not finite.
INLINE float scale_of(float top, float most, float sum) { return sum == sum ? (top > SMALLEST ? top / most : 0.0f) : sum; }

// The sum of products of quants with whole numbers whose sum is `less` / CENTRE, without what the quants are too large by. Exact.
INLINE v16 centred(i16 sum, float less) { return v16_sub(v16_from_i16(sum), v16_set(less)); }

static inline void prepare_query(uint32_t *to, struct query_scale *scale, const float *q) {
  v16 most = v16_set(0.0f), sum = v16_set(0.0f);
  for (int d = 0; d < D; d += 16) most = v16_max(most, v16_abs(v16_load(q + d)));
  const float top = v16_max_of(most);
  const v16 inverse = inverse_of(top, MAX_QUERY);
  for (int d = 0; d < D; d += 16) {
    const v16 whole = v16_round(v16_mul(v16_load(q + d), inverse));
    v16_store_i8((int8_t *)(to + d / 4), whole);
    sum = v16_add(sum, whole);
  }
  scale->scale = scale_of(top, MAX_QUERY, v16_sum(sum));
  scale->less = CENTRE * v16_sum(sum);
}

INLINE w16 key_words(const struct tile *tile, int column, int j) {
  const uint8_t *low = tile->keys[2 * column] + (long)j * S * 4;
  return S == 8 ? w16_load_halves(low, tile->keys[2 * column + 1] + (long)j * S * 4) : w16_load(low);
}

// Sums of products of N rows and C columns of sixteen keys from key `low` of the tile on.
INLINE void multiply_keys(int N, int C, struct prefetch *prefetch, const struct rows *rows, int r, const struct tile *tile, int low,
                          i16 (*sum)[COLUMNS]) {
  const uint32_t *q = rows->q + (long)r * D;
  UNROLL for (int i = 0; i < N; i++) UNROLL for (int c = 0; c < C; c++) sum[i][c] = i16_set(0);
  for (int j = 0; j < ROW_BYTES / 4; j++) {
    if (j % FETCH_EVERY == 0) fetch(prefetch, FETCH_LINES);
    UNROLL for (int c = 0; c < C; c++) {
      const w16 words = key_words(tile, low / 16 + c, j);
      UNROLL for (int i = 0; i < N; i++) {
#if CACHE_TYPE == KV_INT8
        sum[i][c] = i16_dot_u8s8(sum[i][c], words, q[i * D + j]);
#else
        sum[i][c] = i16_dot_u4s8(sum[i][c], w16_low_nibbles(words), q[i * D + j]);
        sum[i][c] = i16_dot_u4s8(sum[i][c], w16_high_nibbles(words), q[i * D + D / 8 + j]);
#endif
      }
    }
  }
}

// The scores of a row with sixteen keys, from what centred returned.
INLINE v16 scores_of(v16 number, const float *key_scale, float scale) {
  return v16_mul(v16_mul(number, v16_load(key_scale)), v16_set(scale));
}

// Scores of N rows and C columns of sixteen keys from key `low` of the tile on: s [N, TILE].
INLINE void score_block(int N, int C, struct prefetch *prefetch, const struct rows *rows, int r, const struct tile *tile, int low,
                        float *s) {
  i16 sum[ROWS][COLUMNS];
  multiply_keys(N, C, prefetch, rows, r, tile, low, sum);
  UNROLL for (int i = 0; i < N; i++) {
    const struct query_scale *q = rows->q_scale + r + i;
    UNROLL for (int c = 0; c < C; c++)
        v16_store(s + i * TILE + 16 * c, scores_of(centred(sum[i][c], q->less), tile->key_scale + low + 16 * c, q->scale));
  }
}

// Weights p [N, TILE] of a tile, each times its value's scale, as words. Row i sees the keys first[i] to end[i] - 1.
INLINE void prepare_weights(int N, uint32_t *to, struct query_scale *scale, float *p, const float *value_scale, const int *first,
                            const int *end) {
  v16 most[ROWS], sum[ROWS], zero = v16_set(0.0f);
  float top[ROWS], total[ROWS];
  UNROLL for (int i = 0; i < N; i++) {
    most[i] = zero;
    const int all = first[i] == 0 && end[i] == TILE;
    UNROLL for (int c = 0; c < TILE / 16; c++) {
      v16 weight = v16_mul(v16_load(p + i * TILE + 16 * c), v16_load(value_scale + 16 * c));
      if (!all) {
        weight = v16_first(min(max(first[i] - 16 * c, 0), 16), zero, weight);
        weight = v16_first(min(max(end[i] - 16 * c, 0), 16), weight, zero);
      }
      v16_store(p + i * TILE + 16 * c, weight);
      most[i] = v16_max(most[i], weight);
    }
  }
  max_of_rows(N, top, most);
  UNROLL for (int i = 0; i < N; i++) {
    const v16 inverse = inverse_of(top[i], MAX_WEIGHT);
    v16 rest = sum[i] = zero;
    UNROLL for (int c = 0; c < TILE / 16; c++) {
      const v16 exact = v16_fma(v16_load(p + i * TILE + 16 * c), inverse, rest), whole = v16_round(exact);
      v16_store_i8((int8_t *)(to + i * TILE / 4 + 4 * c), whole);
      sum[i] = v16_add(sum[i], whole), rest = v16_sub(exact, whole);
    }
  }
  if (N == 4) v16_sum_four(total, sum);
  else UNROLL for (int i = 0; i < N; i++) total[i] = v16_sum(sum[i]);
  UNROLL for (int i = 0; i < N; i++) scale[i].scale = scale_of(top[i], MAX_WEIGHT, total[i]), scale[i].less = CENTRE * total[i];
}

#ifdef LANES_AVX512
#define COLUMNS_OF_TILE (TILE / 16)
#ifdef CAP
#define WHOLE_IN_REGISTERS 0
#else
#define WHOLE_IN_REGISTERS 1
#endif

// Sixty-four whole numbers to bytes, `magic` (1.5 * 2^23) being added to each.
INLINE void store_whole(uint32_t *to, const v16 *a) {
  const w16 less = _mm512_set1_epi32(0x4B400000), order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  w16 n[4];
  UNROLL for (int c = 0; c < 4; c++) n[c] = _mm512_sub_epi32((w16)a[c], less);
  const w16 bytes = _mm512_packs_epi16(_mm512_packs_epi32(n[0], n[1]), _mm512_packs_epi32(n[2], n[3]));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
}

// What softmax_rows and prepare_weights do, in registers, for N rows that see all keys of the tile, and their scores.
INLINE void weigh_whole(int N, uint32_t *to, struct query_scale *scale, v16 (*s)[COLUMNS_OF_TILE], const struct rows *rows, int r,
                        const struct tile *tile) {
  const v16 magic = v16_set(0x1.8p23f), zero = v16_set(0.0f);
  v16 most[ROWS], sum[ROWS];
  float now[ROWS], top[ROWS], total[ROWS];
  UNROLL for (int i = 0; i < N; i++) {
    most[i] = v16_set(NO_SCORE);
    UNROLL for (int c = 0; c < COLUMNS_OF_TILE; c++) most[i] = v16_max(most[i], s[i][c]);
  }
  max_of_rows(N, now, most);
  UNROLL for (int i = 0; i < N; i++) {
    float *weight = rows->weight + 16 * (r + i);
    v16 weights = v16_load(weight);
    const float peak = raise_peak(now[i], rows->top + r + i, &weights, rows->sums + (r + i) * rows->stride);
    most[i] = zero;
    UNROLL for (int c = 0; c < COLUMNS_OF_TILE; c++) {
      const v16 p = exp_scaled(v16_sub(s[i][c], v16_set(peak)));
      weights = v16_add(weights, p);
      s[i][c] = v16_mul(p, v16_load(tile->value_scale + 16 * c));
      most[i] = v16_max(most[i], s[i][c]);
    }
    v16_store(weight, weights);
  }
  max_of_rows(N, top, most);
  UNROLL for (int i = 0; i < N; i++) {
    const v16 inverse = inverse_of(top[i], MAX_WEIGHT);
    v16 rest = zero;
    sum[i] = zero;
    UNROLL for (int c = 0; c < COLUMNS_OF_TILE; c++) {
      const v16 exact = v16_fma(s[i][c], inverse, rest);
      s[i][c] = v16_add(exact, magic);
      const v16 whole = v16_sub(s[i][c], magic);
      sum[i] = v16_add(sum[i], whole), rest = v16_sub(exact, whole);
    }
    store_whole(to + i * TILE / 4, s[i]);
  }
  if (N == 4) v16_sum_four(total, sum);
  else UNROLL for (int i = 0; i < N; i++) total[i] = v16_sum(sum[i]);
  UNROLL for (int i = 0; i < N; i++) scale[i].scale = scale_of(top[i], MAX_WEIGHT, total[i]), scale[i].less = CENTRE * total[i];
}

INLINE void score_whole(int N, struct prefetch *prefetch, uint32_t *p, struct query_scale *scale, const struct rows *rows, int r,
                        const struct tile *tile) {
  i16 sum[ROWS][COLUMNS];
  v16 s[ROWS][COLUMNS_OF_TILE];
  multiply_keys(N, COLUMNS_OF_TILE, prefetch, rows, r, tile, 0, sum);
  UNROLL for (int i = 0; i < N; i++) {
    const struct query_scale *q = rows->q_scale + r + i;
    UNROLL for (int c = 0; c < COLUMNS_OF_TILE; c++) s[i][c] = scores_of(centred(sum[i][c], q->less), tile->key_scale + 16 * c, q->scale);
  }
  weigh_whole(N, p, scale, s, rows, r, tile);
}
#endif

// sums of N rows += weights p [N, TILE] of the keys low to high - 1, in fours, times C loads of columns from byte `column` of their values.
INLINE void add_value_columns(int N, int C, struct prefetch *prefetch, float *sums, long stride, const uint32_t *p,
                              const struct query_scale *scale, const struct tile *tile, int column, int low, int high) {
  i16 sum[ROWS][5 * HALVES];
  UNROLL for (int i = 0; i < N; i++) UNROLL for (int c = 0; c < C * HALVES; c++) sum[i][c] = i16_set(0);
  for (unsigned j = (unsigned)low / 4; j < (unsigned)high / 4; j++) {
    const uint8_t *from = tile->values[j / 2] + (j % 2 * 4 * ROW_BYTES + 4 * (unsigned)column);
    if (j % FETCH_EVERY == 0) fetch(prefetch, FETCH_LINES);
    UNROLL for (int c = 0; c < C; c++) {
      const w16 words = w16_load(from + 64 * c);
      UNROLL for (int i = 0; i < N; i++) {
#if CACHE_TYPE == KV_INT8
        sum[i][c] = i16_dot_u8s8(sum[i][c], words, p[i * (TILE / 4) + j]);
#else
        sum[i][2 * c] = i16_dot_u4s8(sum[i][2 * c], w16_low_nibbles(words), p[i * (TILE / 4) + j]);
        sum[i][2 * c + 1] = i16_dot_u4s8(sum[i][2 * c + 1], w16_high_nibbles(words), p[i * (TILE / 4) + j]);
#endif
      }
    }
  }
  UNROLL for (int i = 0; i < N; i++) UNROLL for (int c = 0; c < C * HALVES; c++) {
    float *to = sums + i * stride + column + c / HALVES * 16 + c % HALVES * (D / 2);
    v16_store(to, v16_fma(centred(sum[i][c], scale[i].less), v16_set(scale[i].scale), v16_load(to)));
  }
}

INLINE void add_values(int N, struct prefetch *prefetch, float *sums, long stride, const uint32_t *p, const struct query_scale *scale,
                       const struct tile *tile, int low, int high) {
  int column = 0;
  for (; column + 16 * LOADS <= ROW_BYTES; column += 16 * LOADS)
    add_value_columns(N, LOADS, prefetch, sums, stride, p, scale, tile, column, low, high);
  if (ROW_BYTES / 16 % LOADS > 0) add_value_columns(N, ROW_BYTES / 16 % LOADS, prefetch, sums, stride, p, scale, tile, column, low, high);
}

// N rows from row r on, and the tile of keys that begins at `start`.
INLINE void attend_block(int N, struct prefetch *prefetch, const struct rows *rows, int r, const struct tile *tile, int start) {
  float s[ROWS * TILE] __attribute__((aligned(64)));
  uint32_t p[ROWS * TILE / 4] __attribute__((aligned(64)));
  struct query_scale scale[ROWS];
  int first[ROWS], end[ROWS], low = TILE, high = 0;
  UNROLL for (int i = 0; i < N; i++) {
    const int position = position_of(rows, r + i);
    first[i] = max(0, first_visible(position) - start);
    end[i] = min(TILE, position + 1 - start);
    if (first[i] < end[i]) low = min(low, first[i]), high = max(high, end[i]);
  }
  low &= ~15, high = (high + 15) & ~15;
  if (low >= high) return;
#ifdef LANES_AVX512
  int whole = 0;
  UNROLL for (int i = 0; i < N; i++) whole += first[i] == 0 && end[i] == TILE;
  if (WHOLE_IN_REGISTERS && whole == N) {
    score_whole(N, prefetch, p, scale, rows, r, tile);
    add_values(N, prefetch, rows->sums + r * rows->stride, rows->stride, p, scale, tile, 0, TILE);
    return;
  }
#endif
  int at = low;
  for (; at + 16 * COLUMNS <= high; at += 16 * COLUMNS) score_block(N, COLUMNS, prefetch, rows, r, tile, at, s + at);
  if (COLUMNS > 2 && at + 16 < high) score_block(N, 2, prefetch, rows, r, tile, at, s + at), at += 32;
  for (; at < high; at += 16) score_block(N, 1, prefetch, rows, r, tile, at, s + at);
  float *sums = rows->sums + r * rows->stride;
  softmax_rows(N, s, first, end, rows->top + r, rows->weight + 16 * r, sums, rows->stride);
  prepare_weights(N, p, scale, s, tile->value_scale, first, end);
  add_values(N, prefetch, sums, rows->stride, p, scale, tile, low, high);
}

#ifdef LANES_AMX
#include "attention_integer_tiles.h"
#endif

// Keys first to end - 1 of the tile at `start`; those around them that share sixteen slots are garbage. Blocks that hold none of them
// are not read.
INLINE void load_tile(struct prefetch *prefetch, int copied, struct tile *tile, float *keys, float *values, const cached *cache,
                      const int32_t *table, int head, int start, int first, int end) {
  (void)prefetch, (void)copied;
  tile->unpacked_keys = (uint32_t *)keys, tile->unpacked_values = (uint32_t *)values;
  for (int at = first & ~15; at < end; at += 16) {
    const int low = max(at, first & -S), high = second_eight(at, first, end);
    const int a = table[low / TABLE_TOKENS], b = table[high / TABLE_TOKENS], i = (at - start) / 8;
    tile->keys[i] = side_of(cache, a, 0, head, low % S), tile->keys[i + 1] = side_of(cache, b, 0, head, high % S);
    tile->values[i] = side_of(cache, a, 1, head, low % S), tile->values[i + 1] = side_of(cache, b, 1, head, high % S);
    for (int side = 0; side < 2; side++)
      v16_store((side == 0 ? tile->key_scale : tile->value_scale) + 8 * i,
                load_scales(scales_of(cache, a, side, head) + low % S, scales_of(cache, b, side, head) + high % S));
  }
#ifdef LANES_AMX
  if (copied) unpack_tile(tile, first - start, end - start);
#endif
}

// All `count` rows and one tile.
INLINE void attend(struct prefetch *prefetch, int copied, const struct rows *rows, int count, const struct tile *tile, int start) {
#ifdef LANES_AMX
  if (copied) {
    attend_by_tiles(prefetch, rows, count, tile, start);
    return;
  }
#endif
  (void)copied;
  int r = 0;
  for (; r + ROWS <= count; r += ROWS) attend_block(ROWS, prefetch, rows, r, tile, start);
  if (ROWS > 2 && r + 2 <= count) attend_block(2, prefetch, rows, r, tile, start), r += 2;
  for (; r < count; r++) attend_block(1, prefetch, rows, r, tile, start);
}
