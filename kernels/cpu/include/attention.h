// What decode and prefill share: attention of rows to one tile of keys of one KV head. A row's result has the same bits in both, however
// rows are grouped and wherever they are in the batch, because the order of its arithmetic is fixed here, in attention_floats.h (KV_FP8, too),
// there for BF16 and KV_FP8 in attention_pairs.h where pairs of bfloat16 are multiplied, in attention_integers.h (KV_INT8, KV_INT4) and in
// attention_tiles.h (BF16 and KV_FP8 with AMX):
//
//   - tiles of TILE keys begin at multiples of TILE, partitions of PARTITION keys at multiples of PARTITION, counted from the sequence's
//     first token;
//   - a score is one accumulator over d from 0 to D - 1 or over pairs of these, a sum of integers, or what tiles add; a partition keeps the maximum m, sixteen partial sums of the weights
//     exp((score - m) * SCALE), and VALUE_D weighted sums of values, each one accumulator over ascending keys or pairs of keys, rescaled when a tile raises m;
//   - the partitions of a row are merged in ascending order;
//   - a sink, one more score of a head that has no value, is added to the sum of the weights last.
//
// A row reads the values of the keys that it sees, and no others: unused slots, blocks before the window and keys after a row's own position
// may hold NaN. Their scores are computed where that is cheaper, and dropped.
//
// Constants: H, K, D, S, M, CACHE_TYPE (cache.h), SCALE (above 0), WINDOW (0: none), CAP (of scores * SCALE, none if not defined), SINKS (none
// if not defined; they are not scaled).
// H % K == 0, D % 16 == 0, D from 32 to 512, S a power of two from 8 to 256. If LATENT (cache.h), D is at most 1024, VALUE_D % 16 == 0, and K is
// only in how many parts the heads are divided among units: all read the same keys. Else VALUE_D is D.
//
// The online softmax is Milakov and Gimelshein's (arXiv:1805.02867), tiles of rows and keys are FlashAttention's (arXiv:2205.14135), the
// split over keys and its merge are flash decoding's.
#pragma once
#include "activations.h"
#include "cache.h"
#include "lanes.h"
#include "thread_team.h"
#include "tile_shapes.h"

#ifndef SINKS
#define SINKS 0
#endif
#if SINKS
#define SINKS_ARGUMENT const float *sinks,
#else
#define SINKS_ARGUMENT
#define sinks ((const float *)0)
#endif

#define G (H / K)
#define INTEGER_CACHE (CACHE_TYPE == KV_INT8 || CACHE_TYPE == KV_INT4)
#ifdef LANES_AMX
#define BY_TILES (CACHE_TYPE == BF16 || CACHE_TYPE == KV_FP8)
#else
#define BY_TILES 0
#endif
#if !BY_TILES && (CACHE_TYPE == BF16 && defined(BF16_PAIRS) || CACHE_TYPE == KV_FP8 && defined(E4M3_PAIRS))
#define BY_PAIRS 1
#else
#define BY_PAIRS 0
#endif
#define KEYS_AT_ONCE (!BY_PAIRS ? 1 : PACKED_CACHE ? 4 : 2)  // whose values are words of their own
#if INTEGER_CACHE && defined(LANES_AMX)
#define COPIED(count) ((count) >= 32)  // rows of a sequence for which a tile of keys and values is copied; fewer are faster without
#else
#define COPIED(count) 1
#endif
#define TILE (BY_TILES && D <= 128 ? 128 : D <= 64 || INTEGER_CACHE || BY_TILES ? 64 : 32)
#define PARTITION 256
#define PARTITIONS ((M * TABLE_TOKENS + PARTITION - 1) / PARTITION)
#define NO_SCORE (-__builtin_inff())

// A register block of rows x columns of sixteen, as large as the registers can hold without spills.
#if defined(LANES_AVX512)
#define ROWS 4
#define COLUMNS 4
#else
#define ROWS 2
#define COLUMNS 2
#endif

// Columns at the same time: four, or what divides VALUE_D / 16 without a small rest.
#define WIDE (COLUMNS < 4 ? COLUMNS : BY_PAIRS ? WIDE_PAIRS : VALUE_D % 64 == 0 ? 4 : VALUE_D % 80 == 0 ? 5 : VALUE_D % 48 == 0 ? 3 : 4)
#define WIDE_PAIRS (VALUE_D == 80 ? 5 : VALUE_D == 48 ? 3 : 4)  // columns are in twos
#define REST (VALUE_D / 16 % WIDE)

// Loads of sixteen bytes' columns of integer values at the same time; one of KV_INT4 has two columns.
#define LOADS (CACHE_TYPE == KV_INT4 ? WIDE_INT4 : WIDE)
#define WIDE_INT4 (COLUMNS < 4 ? 1 : 2)

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

// A row of q as attention to a tile takes it: float32 [D], or up to D words, of integers with a scale.
#if INTEGER_CACHE || BY_TILES || BY_PAIRS
typedef uint32_t query;
#else
typedef float query;
#endif

struct query_scale {  // of a row in words
  float scale;
  float less;  // what sums of its products with unsigned quants are too large by
};

// Rows that share a KV head, and the keys of a tile. Row r is at `position` + r / G of its sequence; where rows are of several sequences,
// at positions[r / G].
struct rows {
  const query *q;                     // row r at q + r * D
  const struct query_scale *q_scale;  // [rows], if INTEGER_CACHE
  float *sums;                        // weighted sums of values, row r at sums + r * stride
  long stride;
  float *top;     // [rows] what weights are relative to: the largest score so far, unscaled; NO_SCORE before the first key of a partition
  float *weight;  // [rows, 16] partial sums of the weights
  int position;
  const int *positions;  // 0: one sequence
};

INLINE int position_of(const struct rows *rows, int r) { return rows->positions ? rows->positions[r / G] : rows->position + r / G; }

static inline int first_visible(int position) { return WINDOW > 0 ? max(0, position - WINDOW + 1) : 0; }

// Where the second eight of sixteen keys from `at` on are, of which first to end - 1 are read: a block of 8 that holds none of them may be none.
INLINE int second_eight(int at, int first, int end) { return S == 8 ? max(min(at + 8, (end - 1) & -S), first & -S) : at + 8; }

// One KV head's keys (side 0) or values (side 1) of a block, from slot s on. In packed blocks keys are rows of words, and slots in fours.
static inline const cached *side_of(const cached *cache, int block, int side, int head, int s) {
#if PACKED_CACHE
  return quants_of(cache, block, side, head) + (side == 0 ? s * 4 : s * ROW_BYTES);
#else
  return cache + place_of(block, side, head, s);
#endif
}

#if PACKED_CACHE
// The scales of sixteen slots, eight from each of two places.
INLINE v16 load_scales(const uint16_t *low, const uint16_t *high) {
  uint16_t both[16];
  if (S == 8)
    for (int i = 0; i < 8; i++) both[i] = low[i], both[8 + i] = high[i];
  return v16_load_bf16(S == 8 ? both : low);
}
#endif

// The tile that will be read next. Its cache lines are prefetched gradually, between the arithmetic on the tile before: a processor
// drops requests that come all together, and blocks are too far apart for it to guess. So FETCH_LINES are requested at every FETCH_EVERY
// steps of the products, and where that does not suffice, FETCH_MORE in each quarter of a transpose. One or two heads per KV head finish
// a tile quickly and wait for memory anyway; there some requests too many (the last find nothing left) were fastest.
#define RUN (S < TILE ? S : TILE)
#define RUN_BYTES (RUN * ROW_BYTES)
#define TILE_LINES (TILE * ROW_BYTES * SIDES / 64)
#define QUARTERS (TILE / 16 * ((ROW_BYTES + 63) / 64) * 4)
#if INTEGER_CACHE
#define STEPS ((G / ROWS + G % ROWS / 2 + G % 2) * (ROW_BYTES / 4 + TILE / 4 * ((ROW_BYTES / 16 + LOADS - 1) / LOADS)))
#else
#define STEPS ((G / ROWS + G % ROWS / 2 + G % 2) * (D + TILE * ((VALUE_D / 16 + WIDE - 1) / WIDE)) / (1 + BY_PAIRS))
#endif
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
    const int block = table[at / TABLE_TOKENS];
    if (!LATENT) prefetch->run[prefetch->runs++] = (const char *)side_of(cache, block, 1, head, at % S);
    // words of more than RUN slots are too far apart: the processor sees their distance by itself
    if (!PACKED_CACHE || RUN == S) prefetch->run[prefetch->runs++] = (const char *)side_of(cache, block, 0, head, at % S);
#if PACKED_CACHE
    __builtin_prefetch(scales_of(cache, block, 0, head) + at % S);
    __builtin_prefetch(scales_of(cache, block, 1, head) + at % S);
#endif
  }
}

// Into the L2 where that was measured: a core waits for few lines of its L1 (product.h; decodes 1.1 to 1.6 times as fast on Zen 4).
#if (defined(LANES_AVX512) || defined(LANES_AVX2)) && !defined(LANES_AMX)
#define FETCH_LEVEL 2
#else
#define FETCH_LEVEL 3
#endif

INLINE void fetch(struct prefetch *prefetch, int lines) {
  if (lines == 0) return;
  if (prefetch->next >= prefetch->stop) {
    if (prefetch->runs == 0) return;
    prefetch->next = prefetch->run[--prefetch->runs], prefetch->stop = prefetch->next + RUN_BYTES;
  }
  UNROLL for (int i = 0; i < lines; i++) __builtin_prefetch(prefetch->next + 64 * i, 0, FETCH_LEVEL);
  prefetch->next += 64 * lines;
}

// e^(distance * SCALE) for distances of at most 0.
static inline v16 exp_scaled(v16 distance) { return v16_exp2(v16_mul(distance, v16_set(SCALE * 1.44269504f))); }

INLINE void max_of_rows(int N, float *to, const v16 *rows) {
  if (N == 4) v16_max_four(to, rows);
  else UNROLL for (int i = 0; i < N; i++) to[i] = v16_max_of(rows[i]);
}

INLINE v16 max_columns(int columns, const float *s) {
  v16 most = v16_set(NO_SCORE);
  for (int c = 0; c < columns; c++) most = v16_max(most, v16_load(s + 16 * c));
  return most;
}

// The largest score of a row that now has one of `now`. If it is a new one, what the row has so far is rescaled, its sum of weights in `weight`.
INLINE float raise_peak(float now, float *top, v16 *weight, float *sums) {
  const float before = *top, peak = before > now ? before : now;
  if (peak != before) {
    const v16 fade = exp_scaled(v16_set(before - peak));
    *weight = v16_mul(*weight, fade);
    for (int d = 0; d < VALUE_D; d += 16) v16_store(sums + d, v16_mul(v16_load(sums + d), fade));
    *top = peak;
  }
  return peak;
}

// `now`: the largest of s.
INLINE void softmax_columns(int columns, float *s, float now, float *top, float *weight, float *sums) {
  v16 sum = v16_load(weight);
  const float peak = raise_peak(now, top, &sum, sums);
  for (int c = 0; c < columns; c++) {
    const v16 p = exp_scaled(v16_sub(v16_load(s + 16 * c), v16_set(peak)));
    v16_store(s + 16 * c, p);
    sum = v16_add(sum, p);
  }
  v16_store(weight, sum);
}

// Scores s of the keys first to end - 1 of a tile become weights under the row's new maximum; what the row has so far is rescaled.
NOINLINE void softmax_tile(float *s, int first, int end, float *top, float *weight, float *sums) {
  const int low = first & ~15, high = (end - 1) & ~15;
  v16_store(s + low, v16_first(first - low, v16_set(NO_SCORE), v16_load(s + low)));
  v16_store(s + high, v16_first(end - high, v16_load(s + high), v16_set(NO_SCORE)));
  const int columns = (high - low) / 16 + 1;
  softmax_columns(columns, s + low, v16_max_of(max_columns(columns, s + low)), top, weight, sums);
}

// Scores s [N, TILE] become what exp_scaled needs for softmax(CAP tanh(score * SCALE / CAP)).
INLINE void cap_scores(int N, float *s) {
#ifdef CAP
  for (int i = 0; i < N * TILE; i += 16) v16_store(s + i, capped(v16_load(s + i), CAP / SCALE));
#endif
}

// The same of N rows: row i sees the keys first[i] to end[i] - 1 of the tile, if there are any.
INLINE void softmax_rows(int N, float *s, const int *first, const int *end, float *top, float *weight, float *sums, long stride) {
  int whole = 0;
  cap_scores(N, s);
  UNROLL for (int i = 0; i < N; i++) whole += first[i] == 0 && end[i] == TILE;
  if (whole < N) {
    UNROLL for (int i = 0; i < N; i++) if (first[i] < end[i])
        softmax_tile(s + i * TILE, first[i], end[i], top + i, weight + 16 * i, sums + i * stride);
    return;
  }
  float now[ROWS];
  v16 most[ROWS];
  UNROLL for (int i = 0; i < N; i++) most[i] = max_columns(TILE / 16, s + i * TILE);
  max_of_rows(N, now, most);
  UNROLL for (int i = 0; i < N; i++) softmax_columns(TILE / 16, s + i * TILE, now[i], top + i, weight + 16 * i, sums + i * stride);
}

// Sixteen numbers of which 0 is the key `key`: `other` before the key first and from end on.
INLINE v16 within(v16 x, int key, int first, int end, v16 other) {
  x = v16_first(min(max(first - key, 0), 16), other, x);
  return v16_first(min(max(end - key, 0), 16), x, other);
}

// Before the first key of a partition.
static inline void begin_partition(const struct rows *rows, int r) {
  rows->top[r] = NO_SCORE;
  v16_store(rows->weight + 16 * r, v16_set(0.0f));
  for (int d = 0; d < VALUE_D; d += 16) v16_store(rows->sums + r * rows->stride + d, v16_set(0.0f));
}

// Adds (partition_weight, sums) times `new` to (weight, out) times `old`.
static inline void merge_by(v16 old, v16 new, float *weight, float *out, float partition_weight, const float *sums) {
  *weight = v16_max_of(v16_fma(v16_set(partition_weight), new, v16_mul(v16_set(*weight), old)));
  for (int d = 0; d < VALUE_D; d += 16) v16_store(out + d, v16_fma(v16_load(sums + d), new, v16_mul(v16_load(out + d), old)));
}

// Adds the next partition to (top, weight, out) of the partitions so far.
static inline void merge(float *top, float *weight, float *out, float partition_top, float partition_weight, const float *sums) {
  const float peak = *top > partition_top ? *top : partition_top;
  const v16 old = exp_scaled(v16_set(*top - peak));
  const v16 new = exp_scaled(v16_set(partition_top - peak));
  *top = peak;
  merge_by(old, new, weight, out, partition_weight, sums);
}

// The sum of a row's weights, relative to its largest score `top`, with that of the head's sink.
static inline float with_sink(float weight, float top, const float *head_sinks, int head) {
  return SINKS ? weight + v16_max_of(v16_exp(v16_set(head_sinks[head] - top * SCALE))) : weight;
}

#include "attention_keys.h"
#include "bf16_pairs.h"  // here, not where it is used: a text has each header once, at its first mention

// A row's sums with its features in order.
INLINE void in_order(float *out, const float *sums) {
#if (BY_TILES || BY_PAIRS) && CACHE_TYPE == BF16
  unpair_all(VALUE_D, out, sums);
#else
  for (int d = 0; d < VALUE_D; d += 16) v16_store(out + d, v16_load(sums + d));
#endif
}

static inline void finish(float *out, const float *sums, float weight) {
  in_order(out, sums);
  for (int d = 0; d < VALUE_D; d += 16) v16_store(out + d, v16_div(v16_load(out + d), v16_set(weight)));
}

#if BY_TILES || BY_PAIRS
// D numbers of q as pairs of bfloat16, in the order of the cache's.
INLINE void round_query(uint32_t *to, const float *q) {
  for (int d = 0; d < D; d += 16) v16_store_bf16((uint16_t *)to + d, v16_load(q + d));
#if CACHE_TYPE == KV_FP8
  uint16_t *row = (uint16_t *)to;
  for (int d = 0; d < D; d += 4) {
    const uint16_t second = row[d + 1];
    row[d + 1] = row[d + 2], row[d + 2] = second;
  }
#endif
}
#endif

#if INTEGER_CACHE
#include "attention_integers.h"
#elif BY_TILES
#include "attention_tiles.h"
#else
#include "attention_floats.h"
#endif
