// out[t] = softmax(q[t] k^T * SCALE) v over the keys that row t sees and the head's sink, for the rows of sequences with several: chunks of prefills.
//
//   out           [T, H, VALUE_D] float32     only rows of the prefill sequences are written
//   scratch       [64 * THREAD_FLOATS] float32: an area for each of 64 threads (further threads do nothing);
//                 THREAD_FLOATS = 256 * D + R * (3 * D + 32), R = max(1, 128 / G) * G in whole numbers, G = H / K
//   q             [T, H, D] float32
//   cache         [P, BLOCK] CACHE_TYPE      blocks of keys and values (cache.h); this step's are in them
//   block_tables  [B, M] int32
//   context_lens  [B] int32                  tokens in the cache, with this step's
//   query_starts  [B + 1] int32              sequence b's rows are query_starts[b] to query_starts[b + 1] - 1; its last one is at
//                                            position context_lens[b] - 1
//   counts        [2] int32                  first prefill sequence, number of prefill sequences
//   sinks         [H] float32, if SINKS      attention.h
//
// Units: (sequence, SPAN query positions, KV head), the latest and so the longest first. A thread reads the keys that any of its rows sees,
// tile by tile, converts them once, and serves SPAN * G rows. Sums are float32; the order of the arithmetic is attention.h's.
#include "attention_area.h"

NOINLINE void prefill_unit(const struct area *area, float *out, const float *q, const cached *cache, const int32_t *table,
                           const float *head_sinks, int head, int position, int count);

static void attention_prefill(float *out, float *scratch, const float *q, const cached *cache, const int32_t *block_tables,
                              const int32_t *context_lens, const int32_t *query_starts, const int32_t *counts,
                              SINKS_ARGUMENT const struct thread_team *team) {
  if (team->thread >= MAX_THREADS) return;
  struct area area;
  area_of(&area, scratch, team->thread);
  const int end = counts[0] + counts[1];
  int b = counts[0], before = 0;  // units of the sequences before b
  for (int unit = next_unit(team);; unit = next_unit(team)) {
    int queries = 0, spans = 0;
    for (; b < end; b++, before += spans * K) {
      queries = query_starts[b + 1] - query_starts[b], spans = (queries + SPAN - 1) / SPAN;
      if (unit < before + spans * K) break;
    }
    if (b >= end) break;
    const int first = (spans - 1 - (unit - before) / K) * SPAN, head = (unit - before) % K;
    const long row = (long)(query_starts[b] + first) * H + head * G;
    prefill_unit(&area, out + row * VALUE_D, q + row * D, cache, block_tables + (long)b * M, sinks, head, context_lens[b] - queries + first,
                 min(SPAN, queries - first) * G);
  }
}

static inline void begin_rows(const struct area *area, const struct rows *rows, const float *q, int count) {
  prepare_queries(area, q, count);
  for (int r = 0; r < count; r++) {
    area->out_top[r] = NO_SCORE;
    begin_partition(rows, r);
  }
}

// Up to sixteen rows from row r on, as merge does it: their factors are computed together.
static inline void merge_rows(const struct area *area, const struct rows *rows, int r, int count) {
  float top[16], weight[16], old[16], new[16];
  for (int i = 0; i < 16; i++) {
    const int at = r + min(i, count - 1);
    const float a = area->out_top[at], b = rows->top[at];
    top[i] = a > b ? a : b, weight[i] = v16_sum(v16_load(rows->weight + 16 * at));
    old[i] = a - top[i], new[i] = b - top[i];
  }
  v16_store(old, exp_scaled(v16_load(old)));
  v16_store(new, exp_scaled(v16_load(new)));
  for (int i = 0; i < count; i++) {
    // this partition is before the row's window or after its position; a row of NaNs may have no largest score, but its weights are NaN
    if (rows->top[r + i] == NO_SCORE && weight[i] == 0.0f) continue;
    float *out = area->out + (r + i) * D, *sums = rows->sums + (r + i) * D, *total = area->out_weight + r + i;
    if (area->out_top[r + i] == NO_SCORE) {
      for (int d = 0; d < VALUE_D; d += 16) v16_store(out + d, v16_load(sums + d));
      *total = weight[i];
    } else {
      merge_by(v16_set(old[i]), v16_set(new[i]), total, out, weight[i], sums);
    }
    area->out_top[r + i] = top[i];
    begin_partition(rows, r + i);
  }
}

NOINLINE void end_partition(const struct area *area, const struct rows *rows, int count) {
  for (int r = 0; r < count; r += 16) merge_rows(area, rows, r, min(16, count - r));
}

// `count` rows of G query heads; the first are at `position`.
NOINLINE void prefill_unit(const struct area *area, float *out, const float *q, const cached *cache, const int32_t *table,
                           const float *head_sinks, int head, int position, int count) {
  const struct rows rows = {area->q, area->q_scale, area->sums, D, area->top, area->weight, position};
  struct tile tile;
  struct prefetch prefetch;
  const int visible = first_visible(position), end = position + (count - 1) / G + 1;
  begin_rows(area, &rows, q, count);
  for (int start = visible & -TILE; start < end; start += TILE) {
    const int first = max(visible, start), tile_end = min(end, start + TILE);
    prefetch_nothing(&prefetch);
    if (tile_end < end) prefetch_keys(&prefetch, cache, table, head, tile_end, min(end, tile_end + TILE));
    load_tile(&prefetch, COPIED(count), &tile, area->keys, area->values, cache, table, head, start, first, tile_end);
    attend(&prefetch, COPIED(count), &rows, count, &tile, start);
    if ((start + TILE) % PARTITION == 0 || start + TILE >= end) end_partition(area, &rows, count);
  }
  for (int r = 0; r < count; r++)
    finish(out + r / G * (long)(H * VALUE_D) + r % G * VALUE_D, area->out + r * D,
           with_sink(area->out_weight[r], area->out_top[r], head_sinks, head * G + r % G));
}
