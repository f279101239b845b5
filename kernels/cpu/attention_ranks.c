// out[t] = softmax(q[t] k^T * SCALE) v over the keys that row t sees and the head's sink, for all rows of a step, where WORLD ranks divide contexts
//
//   out           [T, H, VALUE_D] float32     further rows than those of sequences that count are unchanged
//   shared        meeting.h: the memory of all ranks; this one writes what its keys give into its place
//   scratch       [64 * THREAD_FLOATS] float32 (attention_area.h)
//   q             [T, H, D] float32
//   cache         [P, BLOCK] CACHE_TYPE      this rank's part of the blocks of keys and values (cache.h); this step's are in them
//   block_tables  [B, M] int32               of blocks of all ranks together
//   context_lens  [B] int32                  tokens in the cache, with this step's
//   query_starts  [B + 1] int32              sequence b's rows are query_starts[b] to query_starts[b + 1] - 1; its last one is at
//                                            position context_lens[b] - 1
//   decodes       [1] int32                  sequences of one row that count, from sequence 0 on
//   chunks        [2] int32                  first sequence of several rows, number of those that count
//   sinks         [H] float32, if SINKS      attention.h
//
// S == 256: partition p of a context is rank p % WORLD's. Units: (SPAN query positions of a sequence, partition of this rank, KV head), and after
// all ranks have met (row, query head), for which each rank merges the partitions of all. So a row has the arithmetic of attention.h, and the bits,
// that it has in one process. Rows take turns where a place has no room for all: PLACE has room for one row with the longest context.
// (Partial results of a divided context: ring attention's, arXiv:2310.01889; here they are merged by place, not as they come.)
#include "attention_area.h"
#include "meeting.h"

#define ENTRIES (PLACE / (H * (VALUE_D + 2)))  // results of H heads that a place has room for

struct step {  // the kernel's arguments, for all sequences
  const float *q;
  const cached *cache;
  const int32_t *tables, *contexts, *starts, *decodes, *chunks;
  const float *head_sinks;
};

struct span {  // rows of sequence b, at most SPAN
  int b, row, rows, position;
  int first, last;  // partitions that they see
  int parts;        // entries of a row: one for each of the partitions that a rank may have
};

static inline void first_span(struct span *span, const struct step *step);
static inline int next_span(struct span *span, const struct step *step);
static inline int own_partition(const struct span *span, int i);
static inline int own_partitions(const struct span *span);
static inline void attend_partition(const struct area *area, float *place, const struct step *step, const struct span *span, int entry,
                                    int partition, int head);
static inline void merge_row(float *out, const float *places, const struct span *span, int entry, int head, int position,
                             const float *head_sinks);

static void attention_ranks(float *out, uint8_t *shared, float *scratch, const float *q, const cached *cache, const int32_t *block_tables,
                            const int32_t *context_lens, const int32_t *query_starts, const int32_t *decodes, const int32_t *chunks,
                            SINKS_ARGUMENT const struct thread_team *team) {
  const struct step step = {q, cache, block_tables, context_lens, query_starts, decodes, chunks, sinks};
  struct meeting *meeting = (struct meeting *)shared;
  struct area area;
  struct span span;
  area_of(&area, scratch, min(team->thread, MAX_THREADS - 1));
  first_span(&span, &step);
  int more = next_span(&span, &step);
  for (unsigned turn = turn_of(meeting); more; turn++) {
    float *places = (float *)(shared + MEETING_BYTES) + (long)(turn % 2) * WORLD * PLACE, *own = places + (long)RANK * PLACE;
    const struct span begin = span;
    int entries = 0, before = 0, ticket = team->thread < MAX_THREADS ? next_unit(team) : 0x7FFFFFFF;
    for (; more && entries + span.rows * span.parts <= ENTRIES; more = next_span(&span, &step)) {
      const int units = own_partitions(&span) * K;
      for (; ticket < before + units; ticket = next_unit(team))
        attend_partition(&area, own, &step, &span, entries, own_partition(&span, (ticket - before) / K), (ticket - before) % K);
      before += units, entries += span.rows * span.parts;
    }
    meet(meeting, turn, team);
    struct span merged = begin;
    ticket = next_unit(team);
    for (int entry = 0, row = 0; entry < entries; entry += merged.rows * merged.parts, next_span(&merged, &step)) {
      for (; ticket < row + merged.rows * H; ticket = next_unit(team)) {
        const int r = (ticket - row) / H, head = (ticket - row) % H;
        merge_row(out + ((long)(merged.row + r) * H + head) * VALUE_D, places, &merged, entry + r * merged.parts, head, merged.position + r,
                  sinks);
      }
      row += merged.rows * H;
    }
    barrier(team);
  }
}

// --- spans: every thread of every rank goes through the same ones

static inline void first_span(struct span *span, const struct step *step) { span->b = -1, span->row = span->rows = 0; }

// The rows after these; 0 after the last.
static inline int next_span(struct span *span, const struct step *step) {
  const int end = step->chunks[0] + step->chunks[1];
  span->row += span->rows;
  while (span->b < 0 || span->row >= step->starts[span->b + 1]) {
    if (++span->b == step->decodes[0]) span->b = step->chunks[0];
    if (span->b >= end) return 0;
    span->row = step->starts[span->b];
  }
  const int left = step->starts[span->b + 1] - span->row;
  span->position = step->contexts[span->b] - left, span->rows = min(SPAN, left);
  span->first = first_visible(span->position) / PARTITION;
  span->parts = (span->position + span->rows - 1) / PARTITION / WORLD - span->first / WORLD + 1;
  span->rows = max(1, min(span->rows, ENTRIES / span->parts));
  span->last = (span->position + span->rows - 1) / PARTITION;
  return 1;
}

// The i-th partition of this rank that the rows see.
static inline int own_partition(const struct span *span, int i) {
  return span->first + (RANK + WORLD - span->first % WORLD) % WORLD + i * WORLD;
}

static inline int own_partitions(const struct span *span) {
  const int first = own_partition(span, 0);
  return first > span->last ? 0 : (span->last - first) / WORLD + 1;
}

// --- one partition

// `copied`: attention_floats.h
INLINE void attend_tiles(int copied, const struct area *area, const struct rows *rows, int count, const struct step *step,
                         const int32_t *table, int head, int from, int end) {
  struct tile tile;
  struct prefetch prefetch;
  for (int start = from & -TILE; start < end; start += TILE) {
    const int first = max(from, start), tile_end = min(end, start + TILE);
    prefetch_nothing(&prefetch);
    if (tile_end < end) prefetch_keys(&prefetch, step->cache, table, head, tile_end, min(end, tile_end + TILE));
    load_tile(&prefetch, copied && COPIED(count), &tile, area->keys, area->values, step->cache, table, head, start, first, tile_end);
    attend(&prefetch, copied && COPIED(count), rows, count, &tile, start);
  }
}

static inline void attend_partition(const struct area *area, float *place, const struct step *step, const struct span *span, int entry,
                                    int partition, int head) {
  const struct rows rows = {area->q, area->q_scale, area->sums, D, area->top, area->weight, span->position};
  const int begin = partition * PARTITION, count = span->rows * G;
  const int from = max(begin, first_visible(span->position)), end = min(begin + PARTITION, span->position + span->rows);
  const int32_t *table = step->tables + (long)span->b * M;
  prepare_queries(area, step->q + ((long)span->row * H + head * G) * D, count);
  for (int r = 0; r < count; r++) begin_partition(&rows, r);
  if (span->rows == 1) attend_tiles(0, area, &rows, count, step, table, head, from, end);
  else attend_tiles(1, area, &rows, count, step, table, head, from, end);
  float *ends = place + (long)ENTRIES * H * VALUE_D;
  for (int r = 0; r < count; r++) {
    const long at = (long)(entry + r / G * span->parts + partition / WORLD - span->first / WORLD) * H + head * G + r % G;
    for (int d = 0; d < VALUE_D; d += 16) v16_store(place + at * VALUE_D + d, v16_load(rows.sums + r * D + d));
    ends[2 * at] = rows.top[r], ends[2 * at + 1] = v16_sum(v16_load(rows.weight + 16 * r));
  }
}

// --- one row and query head: its partitions of all ranks, ascending

static inline void merge_row(float *out, const float *places, const struct span *span, int entry, int head, int position,
                             const float *head_sinks) {
  const int first = first_visible(position) / PARTITION;
  float top = 0.0f, weight = 0.0f;
  for (int p = first; p <= position / PARTITION; p++) {
    const float *place = places + (long)(p % WORLD) * PLACE;
    const long at = (long)(entry + p / WORLD - span->first / WORLD) * H + head;
    const float *sums = place + at * VALUE_D, *ends = place + (long)ENTRIES * H * VALUE_D + 2 * at;
    if (p > first) {
      merge(&top, &weight, out, ends[0], ends[1], sums);
    } else {
      top = ends[0], weight = ends[1];
      for (int d = 0; d < VALUE_D; d += 16) v16_store(out + d, v16_load(sums + d));
    }
  }
  finish(out, out, with_sink(weight, top, head_sinks, head));
}
