// out[b] = softmax(q[b] k^T * SCALE) v over the keys of sequence b that its newest token sees, and the head's sink: one row a sequence.
//
//   out                 [T, H, VALUE_D] float32     rows from `count` on are not touched
//   partial             [B * H * PARTITIONS * (VALUE_D + 2)] float32, scratch (B: the largest `count`); PARTITIONS = ceil(M * S / 256)
//   q                   [T, H, D] float32          row b is sequence b's
//   cache               [P, BLOCK] CACHE_TYPE      blocks of keys and values (cache.h); this step's are in them
//   block_tables        [B, M] int32
//   context_lens        [B] int32                  tokens in the cache, at least 1, at most M * S
//   count               [1] int32                  sequences that count
//   sinks               [H] float32, if SINKS      attention.h
//   shared_prefix_lens  [B] int32, if CASCADE      leading tokens of sequence b that are in the same blocks as those of sequence b - 1, whole
//                                                  blocks that both have filled; 0 for the first, and a smaller number is never wrong
//
// Units: (group, partition of 256 keys, KV head). A group is a run of sequences that begin the partition with the same tile in the same
// blocks, or a part of it with MAX_SEQUENCES sequences; any other sequence is a group of its own. One read of the keys and values serves
// its sequences' H / K query heads each: a tile is converted once, stays in L1, and is multiplied with the rows in register blocks that span sequences.
// The tile in which tables differ, and those after it, are read once per sequence. Only the reading is shared: each (sequence, query head,
// partition) has the arithmetic, and the bits, that it has outside of a group, and is merged in the same way. (Shared prefixes by
// log-sum-exp: Hydragen, arXiv:2402.05099; there the prefix is one piece and the suffix another. Here the pieces are the partitions of
// split attention, so that nothing depends on the other sequences of the group.)
//
// A sequence of one partition is finished at once; if there is a longer one, all threads wait at a barrier, and (sequence, query head) are
// the units of the merge. Sums are float32; the order of the arithmetic is attention.h's.
#include "attention.h"

#ifndef CASCADE
#define CASCADE 0
#endif
#if CASCADE
#define SHARED_PREFIX_LENS_ARGUMENT const int32_t *shared_prefix_lens,
#else
#define SHARED_PREFIX_LENS_ARGUMENT
#define shared_prefix_lens ((const int32_t *)0)
#endif

// Sequences that a unit serves: copies of their rows' q and sums take 32 KiB of stack. Half of it cost 5%, twice as much gained nothing.
#define MAX_SEQUENCES (CASCADE && G * D <= 4096 ? 4096 / (G * D) : 1)

struct step {  // the kernel's arguments, for all sequences
  const float *q;
  const cached *cache;
  const int32_t *tables, *contexts, *prefixes;
  const float *head_sinks;
  int count;
};

struct group {  // sequences b to b + size - 1 at one partition, counted from position 0
  int b, partition, size;
  int parts, before, units;  // its units are `units` from `before` on, K for each of `parts`
};

struct unit {  // a part of a group for one KV head
  int b, size, partition, head;
};

static inline int first_partition(int context) { return first_visible(context - 1) / PARTITION; }
static inline int partitions_of(int context) { return (context - 1) / PARTITION + 1 - first_partition(context); }
static inline int find_group(struct group *group, const struct step *step, int unit);
static inline void unit_of(struct unit *unit, const struct group *group, int index);
NOINLINE void decode_unit(float *out, float *sums, float *ends, const struct step *step, const struct unit *unit, int next_partition,
                          int next_head);
static inline void merge_row(float *out, const float *sums, const float *ends, int partitions, const float *head_sinks, int head);

static void attention_decode(float *out, float *partial, const float *q, const cached *cache, const int32_t *block_tables,
                             const int32_t *context_lens, const int32_t *count,
                             SINKS_ARGUMENT SHARED_PREFIX_LENS_ARGUMENT const struct thread_team *team) {
  const struct step step = {q, cache, block_tables, context_lens, shared_prefix_lens, sinks, count[0]};
  float *ends = partial + (long)step.count * H * PARTITIONS * VALUE_D;
  struct group group = {0, 0, 0, 0, 0, 0};
  int longest = 0;
  for (int b = 0; b < step.count; b++) longest = max(longest, partitions_of(step.contexts[b]));
  if (longest == 0) return;
  group.partition = first_partition(step.contexts[0]) - 1;
  for (int ticket = next_unit(team); find_group(&group, &step, ticket); ticket = next_unit(team)) {
    const int index = ticket - group.before, after = index + team->threads;  // this thread's next unit, if the threads take turns
    const int head = group.parts == 1 ? after : after / group.parts;
    struct unit unit;
    unit_of(&unit, &group, index);
    decode_unit(out, partial, ends, &step, &unit, group.partition + head / K, head % K);
  }
  if (longest == 1) return;
  barrier(team);
  for (int row = next_unit(team); row < step.count * H; row = next_unit(team)) {
    const int partitions = partitions_of(step.contexts[row / H]);
    if (partitions == 1) continue;
    merge_row(out + (long)row * VALUE_D, partial + (long)row * PARTITIONS * VALUE_D, ends + row * 2L * PARTITIONS, partitions, sinks,
              row % H);
  }
}

// --- units

static inline const int32_t *table_of(const struct step *step, int b) { return step->tables + (long)b * M; }

// Whether sequence b has its first visible tile of a partition in common with b - 1.
static inline int joins(const struct step *step, int b, int partition) {
  if (!CASCADE || b == 0 || step->prefixes[b] < partition * PARTITION + TILE) return 0;
  return partition >= first_partition(step->contexts[b]) && partition >= first_partition(step->contexts[b - 1]);
}

// Advance to the group that `unit` belongs to; 0 after the last. Units only ascend.
static inline int find_group(struct group *group, const struct step *step, int unit) {
  while (unit >= group->before + group->units) {
    group->before += group->units, group->units = 0, group->partition++;
    if (group->partition * PARTITION >= step->contexts[group->b]) {
      if (++group->b >= step->count) return 0;
      group->partition = first_partition(step->contexts[group->b]);
    }
    if (joins(step, group->b, group->partition)) continue;
    group->size = 1;
    while (group->b + group->size < step->count && joins(step, group->b + group->size, group->partition)) group->size++;
    group->parts = (group->size + MAX_SEQUENCES - 1) / MAX_SEQUENCES;
    group->units = group->parts * K;
  }
  return 1;
}

static inline void unit_of(struct unit *unit, const struct group *group, int index) {
  unit->b = group->b, unit->size = group->size, unit->partition = group->partition, unit->head = index;
  if (group->parts == 1) return;  // a single sequence should not wait for divisions
  const int part = index % group->parts, first = part * group->size / group->parts;
  unit->b += first, unit->size = (part + 1) * group->size / group->parts - first, unit->head = index / group->parts;
}

// --- one unit

// The keys of a sequence from `from` to `to` - 1 that it sees will probably be read next.
static inline void prefetch_sequence(struct prefetch *prefetch, const struct step *step, int b, int head, int from, int to) {
  const int context = step->contexts[b], first = max(from, first_visible(context - 1)), end = min(context, to);
  if (first < end) prefetch_keys(prefetch, step->cache, table_of(step, b), head, first, end);
  else prefetch_nothing(prefetch);
}

// A tile for the rows of the sequences b to b + size - 1, which have it in common.
static inline void decode_tile(struct prefetch *prefetch, const struct step *step, const struct rows *rows, float *keys, float *copies,
                               int b, int size, int head, int start) {
  const int32_t *table = table_of(step, b);
  struct tile tile;
  int first = start + TILE, end = start;
  for (int i = 0; i < size; i++) {
    first = min(first, max(start, first_visible(rows->positions[i])));
    end = max(end, min(start + TILE, rows->positions[i] + 1));
  }
  if (first >= end) return;
  load_tile(prefetch, 0, &tile, keys, copies, step->cache, table, head, start, first, end);
  attend(prefetch, 0, rows, size * G, &tile, start);
}

// A partition, tile by tile. `next_partition` and `next_head`: where the first sequence will probably be read next.
static inline void decode_partition(const struct step *step, const struct unit *unit, const struct rows *rows, int next_partition,
                                    int next_head) {
  float keys[TILE_KEYS] __attribute__((aligned(64))), copies[TILE_VALUES(0)] __attribute__((aligned(64)));
  struct prefetch prefetch;
  const int begin = unit->partition * PARTITION;
  int first = begin + PARTITION, end = 0;  // keys that a sequence sees
  for (int i = 0; i < unit->size; i++) {
    first = min(first, max(begin, first_visible(rows->positions[i])));
    end = max(end, min(begin + PARTITION, rows->positions[i] + 1));
  }
  for (int r = 0; r < unit->size * G; r++) begin_partition(rows, r);
  for (int start = first & -TILE; start < end; start += TILE)
    for (int i = 0, next = 1; i < unit->size; i = next++) {
      while (CASCADE && next < unit->size && step->prefixes[unit->b + next] >= start + TILE) next++;
      const struct rows together = {.q = rows->q + (long)i * G * D,
                                    .q_scale = rows->q_scale + i * G,
                                    .sums = rows->sums + i * G * rows->stride,
                                    .stride = rows->stride,
                                    .top = rows->top + i * G,
                                    .weight = rows->weight + 16 * i * G,
                                    .positions = rows->positions + i};
      if (next < unit->size) prefetch_sequence(&prefetch, step, unit->b + next, unit->head, start, start + TILE);
      else if (start + TILE < end) prefetch_sequence(&prefetch, step, unit->b, unit->head, start + TILE, min(end, start + 2 * TILE));
      else prefetch_sequence(&prefetch, step, unit->b, next_head, next_partition * PARTITION, next_partition * PARTITION + TILE);
      decode_tile(&prefetch, step, &together, keys, copies, unit->b + i, next - i, unit->head, start);
    }
}

// The outcome of a partition for the rows of one sequence: the result, or a part of it.
NOINLINE void end_partition(float *out, float *sums, float *ends, const struct rows *rows, const float *head_sinks, int i, int b, int head,
                            int partition, int partitions) {
  for (int g = 0; g < G; g++) {
    const long row = (long)b * H + head * G + g, part = row * PARTITIONS + partition;
    const float *from = rows->sums + (i * G + g) * rows->stride;
    const float total = v16_sum(v16_load(rows->weight + 16 * (i * G + g)));
    if (partitions == 1) {
      finish(out + row * VALUE_D, from, with_sink(total, rows->top[i * G + g], head_sinks, head * G + g));
      continue;
    }
    float *to = sums + part * VALUE_D;
    if (to != from)
      for (int d = 0; d < VALUE_D; d += 16) v16_store(to + d, v16_load(from + d));
    ends[part * 2] = rows->top[i * G + g], ends[part * 2 + 1] = total;
  }
}

NOINLINE void decode_unit(float *out, float *sums, float *ends, const struct step *step, const struct unit *unit, int next_partition,
                          int next_head) {
  float top[MAX_SEQUENCES * G], weight[MAX_SEQUENCES * G * 16] __attribute__((aligned(64)));
  int positions[MAX_SEQUENCES];
  const long row = (long)unit->b * H + unit->head * G;
  query q[MAX_SEQUENCES * G * D] __attribute__((aligned(64)));
  struct query_scale q_scale[MAX_SEQUENCES * G];
  float own[MAX_SEQUENCES * G * VALUE_D] __attribute__((aligned(64)));
  struct rows rows = {q, q_scale, out + row * VALUE_D, VALUE_D, top, weight, 0, positions};
  for (int i = 0; i < unit->size; i++) positions[i] = step->contexts[unit->b + i] - 1;
  for (int i = 0; i < unit->size; i++)
    for (int g = 0; g < G; g++) prepare_query(q + (i * G + g) * D, q_scale + i * G + g, step->q + (row + (long)i * H + g) * D);
  if (MAX_SEQUENCES > 1 && unit->size > 1) {  // rows of different sequences are not contiguous
    rows.sums = own;
  } else if (partitions_of(positions[0] + 1) > 1) {
    rows.sums = sums + (row * PARTITIONS + unit->partition - first_partition(positions[0] + 1)) * VALUE_D,
    rows.stride = (long)PARTITIONS * VALUE_D;
  }
  decode_partition(step, unit, &rows, next_partition, next_head);
  for (int i = 0; i < unit->size; i++) {
    const int context = positions[i] + 1;
    const int partition = unit->partition - first_partition(context);
    end_partition(out, sums, ends, &rows, step->head_sinks, i, unit->b + i, unit->head, partition, partitions_of(context));
  }
}

static inline void merge_row(float *out, const float *sums, const float *ends, int partitions, const float *head_sinks, int head) {
  float top = ends[0], weight = ends[1];
  for (int d = 0; d < VALUE_D; d += 16) v16_store(out + d, v16_load(sums + d));
  for (int p = 1; p < partitions; p++) merge(&top, &weight, out, ends[2 * p], ends[2 * p + 1], sums + (long)p * VALUE_D);
  finish(out, out, with_sink(weight, top, head_sinks, head));
}
