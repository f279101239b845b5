// What decode and prefill share: attention of rows to one tile of keys of one KV head. A row's result has the same bits in both, however
// rows are grouped and wherever they are in the batch, because the order of its arithmetic is fixed here:
//
//   - tiles of TILE keys begin at multiples of TILE, partitions of PARTITION keys at multiples of PARTITION, counted from the sequence's
//     first token;
//   - a score is one accumulator over d from 0 to D - 1; a partition keeps the maximum m, sixteen partial sums of the weights
//     exp((score - m) * SCALE), and D weighted sums of values, each one accumulator over ascending keys, rescaled when a tile raises m;
//   - the partitions of a row are merged in ascending order.
//
// A row reads the values of the keys that it sees, and no others: unused slots, blocks before the window and keys after a row's own position
// may hold NaN. Their scores are computed where that is cheaper, and dropped.
//
// Constants: H, K, D, S, M, CACHE_TYPE (F32, F16, BF16), SCALE (above 0), WINDOW (0: none). H % K == 0, D % 16 == 0, D from 32 to 256, S a
// power of two from 8 to 256.
//
// The online softmax is Milakov and Gimelshein's (arXiv:1805.02867), tiles of rows and keys are FlashAttention's (arXiv:2205.14135), the
// split over keys and its merge are flash decoding's.
#pragma once
#include "cache.h"
#include "lanes.h"
#include "thread_team.h"

#define G (H / K)
#define TILE (D <= 64 ? 64 : 32)
#define PARTITION 256
#define PARTITIONS ((M * S + PARTITION - 1) / PARTITION)
#define NO_SCORE (-__builtin_inff())

// A register block of rows x columns of sixteen, as large as the registers can hold without spills.
#if defined(LANES_AVX512)
#define ROWS 4
#define COLUMNS 4
#else
#define ROWS 2
#define COLUMNS 2
#endif

// Columns at the same time: four, or what divides D / 16 without a small rest.
#define WIDE (COLUMNS < 4 ? COLUMNS : D % 64 == 0 ? 4 : D % 80 == 0 ? 5 : D % 48 == 0 ? 3 : 4)
#define REST (D / 16 % WIDE)

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

// Rows that share a KV head, and the keys of a tile. Row r is at `position` + r / G of its sequence; where rows are of several sequences,
// at positions[r / G].
struct rows {
  const float *q;  // row r at q + r * D
  float *sums;     // weighted sums of values, row r at sums + r * stride
  long stride;
  float *top;     // [rows] largest score so far, unscaled; NO_SCORE before the first key of a partition
  float *weight;  // [rows, 16] partial sums of the weights
  int position;
  const int *positions;  // 0: one sequence
};

INLINE int position_of(const struct rows *rows, int r) { return rows->positions ? rows->positions[r / G] : rows->position + r / G; }

static inline int first_visible(int position) { return WINDOW > 0 ? max(0, position - WINDOW + 1) : 0; }

// One KV head's keys in a block; its values are K * S * D numbers further. [P, 2, K, S, D]
static inline const cached *keys_of(const cached *cache, int block, int head) { return cache + ((long)block * 2 * K + head) * (S * D); }

// The tile that will be read next. Its cache lines are prefetched gradually, between the arithmetic on the tile before: a processor
// drops requests that come all together, and blocks are too far apart for it to guess. So FETCH_LINES are requested at every FETCH_EVERY
// steps of the products, and where that does not suffice, FETCH_MORE in each quarter of a transpose. One or two heads per KV head finish
// a tile quickly and wait for memory anyway; there some requests too many (the last find nothing left) were fastest.
#define RUN (S < TILE ? S : TILE)
#define RUN_BYTES (RUN * D * (int)sizeof(cached))
#define TILE_LINES (TILE * D * (int)sizeof(cached) / 32)
#define QUARTERS (TILE / 16 * ((D * (int)sizeof(cached) + 63) / 64) * 4)
#define STEPS ((G / ROWS + G % ROWS / 2 + G % 2) * (D + TILE * ((D / 16 + WIDE - 1) / WIDE)))
#define FETCH_EVERY (STEPS < 2 * TILE_LINES ? 1 : STEPS < 4 * TILE_LINES ? 2 : STEPS < 8 * TILE_LINES ? 4 : 8)
#define FETCH_LINES (STEPS < TILE_LINES ? TILE_LINES / STEPS : 1)
#define FETCH_LEFT (TILE_LINES - STEPS * FETCH_LINES)
#define FETCH_MORE (FETCH_LEFT > 0 ? (FETCH_LEFT + QUARTERS - 1) / QUARTERS : G < 3 ? 2 : 0)

struct prefetch {
  const char *run[2 * TILE / 8];  // where pieces of RUN_BYTES begin, the first to request at the end
  const char *next, *stop;        // the rest of the present one
  int runs;
};

static inline void prefetch_nothing(struct prefetch *prefetch) { prefetch->next = prefetch->stop = 0, prefetch->runs = 0; }

// Returned through a pointer: some compilers call memcpy to return so large a structure, and there is none.
static inline void prefetch_keys(struct prefetch *prefetch, const cached *cache, const int32_t *table, int head, int first, int end) {
  prefetch_nothing(prefetch);
  for (int at = (end - 1) & -RUN; at >= (first & -RUN); at -= RUN) {
    const cached *keys = keys_of(cache, table[at / S], head) + at % S * D;
    prefetch->run[prefetch->runs++] = (const char *)(keys + (long)K * S * D);
    prefetch->run[prefetch->runs++] = (const char *)keys;
  }
}

INLINE void fetch(struct prefetch *prefetch, int lines) {
  if (prefetch->next >= prefetch->stop) {
    if (prefetch->runs == 0) return;
    prefetch->next = prefetch->run[--prefetch->runs], prefetch->stop = prefetch->next + RUN_BYTES;
  }
  UNROLL for (int i = 0; i < lines; i++) __builtin_prefetch(prefetch->next + 64 * i);
  prefetch->next += 64 * lines;
}

// Sixteen keys, eight from each of two places, to columns of kt [D, TILE].
INLINE void transpose_keys(struct prefetch *prefetch, float *kt, const cached *low, const cached *high) {
  const int words = D * (int)sizeof(cached) / 4;
  for (int j = 0; j < words; j += 16) {
    const int at = min(j, words - 16);  // words % 16 may be 8: the last sixteen once more rather than reading beyond the row
    w16 r[16];
    fetch(prefetch, FETCH_MORE);
    UNROLL for (int i = 0; i < 8; i++) r[i] = w16_load((const uint32_t *)(low + i * D) + at);
    fetch(prefetch, FETCH_MORE);
    UNROLL for (int i = 0; i < 8; i++) r[8 + i] = w16_load((const uint32_t *)(high + i * D) + at);
    w16_transpose(r);
    fetch(prefetch, FETCH_MORE);
    UNROLL for (int i = 0; i < 16; i++) {
      if (i == 8) fetch(prefetch, FETCH_MORE);
#if CACHE_TYPE == F32
      v16_store(kt + (at + i) * TILE, v16_from_w16(r[i]));
#elif CACHE_TYPE == F16
      v16_store(kt + 2 * (at + i) * TILE, v16_from_low_f16(r[i]));
      v16_store(kt + (2 * (at + i) + 1) * TILE, v16_from_high_f16(r[i]));
#else
      v16_store(kt + 2 * (at + i) * TILE, v16_from_low_bf16(r[i]));
      v16_store(kt + (2 * (at + i) + 1) * TILE, v16_from_high_bf16(r[i]));
#endif
    }
  }
}

// Keys first to end - 1 of the tile at `start`, to kt [D, TILE]; those around them that share a column are garbage. Blocks that
// hold none of them are not read.
INLINE void load_keys(struct prefetch *prefetch, float *kt, const cached *cache, const int32_t *table, int head, int start, int first,
                      int end) {
  for (int at = first & ~15; at < end; at += 16) {
    const int low = max(at, first & -S), high = min(at + 8, (end - 1) & -S);  // S = 8: the neighbour may have no block
    const cached *a = keys_of(cache, table[low / S], head) + low % S * D;
    const cached *b = S == 8 ? keys_of(cache, table[max(high, first & -S) / S], head) : a + 8 * D;
    transpose_keys(prefetch, kt + (at - start), a, b);
  }
}

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

// e^(distance * SCALE) for distances of at most 0: 2e-7 off at most relative to the result, 1 for 0, 0 for -infinity and from 2^-126 down.
// Shorter than v16_exp: one product takes SCALE and log2 e, and the rest below a whole power of two needs no second part. The polynomial is
// 2^r - 1 over r for r from -1/2 to 1/2, fitted for the least relative error of 2^r.
static inline v16 exp_scaled(v16 distance) {
  const v16 low = v16_set(-126.0f);
  const v16 x = v16_mul(distance, v16_set(SCALE * 1.44269504f));
  const v16 within = v16_max(low, x);  // in this order a NaN stays one
  const v16 n = v16_round(within), r = v16_sub(within, n);
  v16 y = v16_set(1.326472731e-3f);
  y = v16_fma(y, r, v16_set(9.671512991e-3f));
  y = v16_fma(y, r, v16_set(5.550733581e-2f));
  y = v16_fma(y, r, v16_set(2.402224243e-1f));
  y = v16_fma(y, r, v16_set(6.931470037e-1f));
  y = v16_fma(y, r, v16_set(1.0f));
  return v16_zero_below(v16_scale2(y, n), x, low);
}

INLINE void softmax_columns(int columns, float *s, float *top, float *weight, float *sums) {
  v16 most = v16_set(NO_SCORE);
  for (int c = 0; c < columns; c++) most = v16_max(most, v16_load(s + 16 * c));
  const float now = v16_max_of(most), before = *top, peak = before > now ? before : now;
  v16 sum = v16_load(weight);
  if (peak != before) {
    const v16 fade = exp_scaled(v16_set(before - peak));
    sum = v16_mul(sum, fade);
    for (int d = 0; d < D; d += 16) v16_store(sums + d, v16_mul(v16_load(sums + d), fade));
    *top = peak;
  }
  for (int c = 0; c < columns; c++) {
    const v16 p = exp_scaled(v16_sub(v16_load(s + 16 * c), v16_set(peak)));
    v16_store(s + 16 * c, p);
    sum = v16_add(sum, p);
  }
  v16_store(weight, sum);
}

// Scores s of the keys first to end - 1 of a tile become weights under the row's new maximum; what the row has so far is rescaled.
static inline void softmax_tile(float *s, int first, int end, float *top, float *weight, float *sums) {
  if (first == 0 && end == TILE) {
    softmax_columns(TILE / 16, s, top, weight, sums);
    return;
  }
  const int low = first & ~15, high = (end - 1) & ~15;
  v16_store(s + low, v16_first(first - low, v16_set(NO_SCORE), v16_load(s + low)));
  v16_store(s + high, v16_first(end - high, v16_load(s + high), v16_set(NO_SCORE)));
  softmax_columns((high - low) / 16 + 1, s + low, top, weight, sums);
}

// Where a tile's values are: runs of `length` keys of D numbers each.
struct values {
  const void *run[TILE / 8];
};

INLINE v16 load_value(int stored, const void *row, long at) {
  return stored ? load_cached((const cached *)row + at) : v16_load((const float *)row + at);
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
      UNROLL for (int c = 0; c < C; c++) v[c] = load_value(stored, run, (long)(key & (length - 1)) * D + column + 16 * c);
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
  for (; column + 16 * WIDE <= D; column += 16 * WIDE)
    add_value_columns(N, WIDE, prefetch, stored, length, sums, stride, p, values, column, first, end);
  if (REST > 0) add_value_columns(N, REST, prefetch, stored, length, sums, stride, p, values, column, first, end);
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
  UNROLL for (int i = 0; i < N; i++) if (first[i] < end[i])
      softmax_tile(s + i * TILE, first[i], end[i], rows->top + r + i, rows->weight + 16 * (r + i), sums + i * rows->stride);
  const int together = N > 1 && both_low < both_high;  // the keys that all see; what one sees before and after them it takes alone
  if (!together) both_low = both_high = TILE;
  for (int i = 0; i < N; i++)
    if (first[i] < both_low && first[i] < end[i])
      add_values(1, prefetch, stored, length, sums + i * rows->stride, 0, s + i * TILE, values, first[i], min(both_low, end[i]));
  if (!together) return;
  add_values(N, prefetch, stored, length, sums, rows->stride, s, values, both_low, both_high);
  for (int i = 0; i < N; i++)
    if (end[i] > both_high) add_values(1, prefetch, stored, length, sums + i * rows->stride, 0, s + i * TILE, values, both_high, end[i]);
}

// All `count` rows and one tile. `stored`: the values are stored as in the cache, otherwise as float32.
INLINE void attend(struct prefetch *prefetch, int stored, int length, const struct rows *rows, int count, const float *kt,
                   const struct values *values, int start) {
  int r = 0;
  for (; r + ROWS <= count; r += ROWS) attend_block(ROWS, prefetch, stored, length, rows, r, kt, values, start);
  if (ROWS > 2 && r + 2 <= count) attend_block(2, prefetch, stored, length, rows, r, kt, values, start), r += 2;
  for (; r < count; r++) attend_block(1, prefetch, stored, length, rows, r, kt, values, start);
}

// Before the first key of a partition.
static inline void begin_partition(const struct rows *rows, int r) {
  rows->top[r] = NO_SCORE;
  v16_store(rows->weight + 16 * r, v16_set(0.0f));
  for (int d = 0; d < D; d += 16) v16_store(rows->sums + r * rows->stride + d, v16_set(0.0f));
}

// Adds the next partition to (top, weight, out) of the partitions so far.
static inline void merge(float *top, float *weight, float *out, float partition_top, float partition_weight, const float *sums) {
  const float peak = *top > partition_top ? *top : partition_top;
  const v16 old = exp_scaled(v16_set(*top - peak));
  const v16 new = exp_scaled(v16_set(partition_top - peak));
  *top = peak;
  *weight = v16_max_of(v16_fma(v16_set(partition_weight), new, v16_mul(v16_set(*weight), old)));
  for (int d = 0; d < D; d += 16) v16_store(out + d, v16_fma(v16_load(sums + d), new, v16_mul(v16_load(out + d), old)));
}

static inline void finish(float *out, const float *sums, float weight) {
  for (int d = 0; d < D; d += 16) v16_store(out + d, v16_div(v16_load(sums + d), v16_set(weight)));
}
