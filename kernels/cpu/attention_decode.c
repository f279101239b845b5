// out[b] = softmax(q[b] k^T * SCALE) v over the keys of sequence b that its newest token sees: one row a sequence.
//
//   out           [T, H, D] float32          rows from `count` on are not touched
//   partial       [B * H * CHUNKS * (D + 2)] float32, scratch (B: as many as `count` may say); CHUNKS = ceil(M * S / 256)
//   q             [T, H, D] float32          row b is sequence b's
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; this step's are in it
//   block_tables  [B, M] int32
//   context_lens  [B] int32                  tokens in the cache, at least 1, at most M * S
//   count         [1] int32                  sequences that count
//   alike         [B] int32, if CASCADE      leading tokens of sequence b that lie in the same blocks as those of sequence b - 1, whole blocks
//                                            that both have filled; 0 for the first, and a smaller number is never wrong
//
// Units: (group, chunk of 256 keys, KV head). A group is a run of sequences that begin the chunk with the same tile in the same blocks, or a
// part of it with MOST sequences; alone, a sequence is a group of its own. One reading of the keys and values serves its count * H / K query
// heads: a tile is converted once, lies in L1, and meets the rows in register blocks that go across sequences. The tile in which tables
// part, and those behind it, are read by each for itself. Only the reading is shared: each (sequence, query head, chunk) has the
// arithmetic, and the bits, that it has alone, and is merged as it is alone. (Shared prefixes by log-sum-exp: Hydragen, arXiv:2402.05099;
// there the prefix is one piece and the suffix another. Here the pieces are the chunks that are there anyway, so that nothing depends on
// who is in the group.)
//
// A sequence of one chunk is finished at once; if there is a longer one, all meet, and (sequence, query head) are the units of the merge.
// float32 throughout; the order of the arithmetic is attention.h's.
#include "attention.h"

#ifndef CASCADE
#define CASCADE 0
#endif

// Sequences that a unit serves: copies of their rows' q and sums take 32 KiB of stack. Half of it cost 5%, twice as much gained nothing.
#define MOST (CASCADE && G * D <= 4096 ? 4096 / (G * D) : 1)

static inline int first_chunk(int context) { return first_seen(context - 1) / CHUNK; }
static inline int chunks_of(int context) { return (context - 1) / CHUNK + 1 - first_chunk(context); }

// What the kernel is given, for all sequences.
struct step {
  const float *q;
  const cached *cache;
  const int32_t *tables, *contexts, *alike;
  int count;
};

// Sequences b to b + size - 1 at one chunk, counted from position 0; their units are `units` from `before` on, K for each of `parts`.
struct group {
  int b, chunk, size, parts, before, units;
};

// A piece of a group for one KV head.
struct unit {
  int b, size, chunk, head;
};

static inline const int32_t *table_of(const struct step *step, int b) { return step->tables + (long)b * M; }

// Whether sequence b has its first tile of a chunk, one of those that it sees, in common with b - 1.
static inline int joins(const struct step *step, int b, int chunk) {
  if (!CASCADE || b == 0 || step->alike[b] < chunk * CHUNK + TILE) return 0;
  return chunk >= first_chunk(step->contexts[b]) && chunk >= first_chunk(step->contexts[b - 1]);
}

// Go on to the group that `unit` belongs to; 0 behind the last. Units only ascend.
static inline int find_group(struct group *group, const struct step *step, int unit) {
  while (unit >= group->before + group->units) {
    group->before += group->units, group->units = 0, group->chunk++;
    if (group->chunk * CHUNK >= step->contexts[group->b]) {
      if (++group->b >= step->count) return 0;
      group->chunk = first_chunk(step->contexts[group->b]);
    }
    if (joins(step, group->b, group->chunk)) continue;
    group->size = 1;
    while (group->b + group->size < step->count && joins(step, group->b + group->size, group->chunk)) group->size++;
    group->parts = (group->size + MOST - 1) / MOST;
    group->units = group->parts * K;
  }
  return 1;
}

static inline void unit_of(struct unit *unit, const struct group *group, int index) {
  unit->b = group->b, unit->size = group->size, unit->chunk = group->chunk, unit->head = index;
  if (group->parts == 1) return;  // a lone sequence should not wait for divisions
  const int part = index % group->parts, first = part * group->size / group->parts;
  unit->b += first, unit->size = (part + 1) * group->size / group->parts - first, unit->head = index / group->parts;
}

// The keys of a sequence from `from` to `to` - 1 that it sees will probably be read next.
static inline void look_on(struct ahead *ahead, const struct step *step, int b, int head, int from, int to) {
  const int context = step->contexts[b], first = larger(from, first_seen(context - 1)), past = smaller(context, to);
  if (first < past) look_ahead(ahead, step->cache, table_of(step, b), head, first, past);
  else look_nowhere(ahead);
}

// A tile for the rows of the sequences b to b + size - 1, which have it in common.
static inline void decode_tile(struct ahead *ahead, const struct step *step, const struct rows *rows, float *kt, int b, int size, int head,
                               int start) {
  const int32_t *table = table_of(step, b);
  struct values values;
  int first = start + TILE, past = start;
  for (int i = 0; i < size; i++) {
    first = smaller(first, larger(start, first_seen(rows->positions[i])));
    past = larger(past, smaller(start + TILE, rows->positions[i] + 1));
  }
  if (first >= past) return;
  load_keys(ahead, kt, step->cache, table, head, start, first, past);
  for (int at = first & -RUN; at < past; at += RUN)
    values.run[(at - start) / RUN] = keys_of(step->cache, table[at / S], head) + (long)K * S * D + at % S * D;
  attend(ahead, 1, RUN, rows, size * G, kt, &values, start);
}

// A chunk, tile by tile. `next_chunk` and `next_head`: where the first sequence will probably be read on.
static inline void decode_chunk(const struct step *step, const struct unit *unit, const struct rows *rows, int next_chunk, int next_head) {
  float kt[D * TILE] __attribute__((aligned(64)));
  struct ahead ahead;
  int seen = (unit->chunk + 1) * CHUNK, end = 0;
  for (int i = 0; i < unit->size; i++) {
    seen = smaller(seen, larger(unit->chunk * CHUNK, first_seen(rows->positions[i])));
    end = larger(end, smaller((unit->chunk + 1) * CHUNK, rows->positions[i] + 1));
  }
  for (int r = 0; r < unit->size * G; r++) begin_chunk(rows, r);
  for (int start = seen & -TILE; start < end; start += TILE)
    for (int i = 0, past = 1; i < unit->size; i = past++) {
      while (CASCADE && past < unit->size && step->alike[unit->b + past] >= start + TILE) past++;
      const struct rows together = {rows->q + (long)i * G * D, rows->sums + i * G * rows->apart, rows->apart, rows->top + i * G,
                                    rows->weight + 16 * i * G, 0, rows->positions + i};
      if (past < unit->size) look_on(&ahead, step, unit->b + past, unit->head, start, start + TILE);
      else if (start + TILE < end) look_on(&ahead, step, unit->b, unit->head, start + TILE, smaller(end, start + 2 * TILE));
      else look_on(&ahead, step, unit->b, next_head, next_chunk * CHUNK, next_chunk * CHUNK + TILE);
      decode_tile(&ahead, step, &together, kt, unit->b + i, past - i, unit->head, start);
    }
}

// What a chunk came to for the rows of one sequence: the result, or a part of it.
static inline void end_chunk(float *out, float *sums, float *ends, const struct rows *rows, int i, int b, int head, int chunk, int chunks) {
  for (int g = 0; g < G; g++) {
    const long row = (long)b * H + head * G + g, part = row * CHUNKS + chunk;
    const float *from = rows->sums + (i * G + g) * rows->apart;
    const float total = v16_sum(v16_load(rows->weight + 16 * (i * G + g)));
    if (chunks == 1) {
      finish(out + row * D, from, total);
      continue;
    }
    float *to = sums + part * D;
    if (to != from)
      for (int d = 0; d < D; d += 16) v16_store(to + d, v16_load(from + d));
    ends[part * 2] = rows->top[i * G + g], ends[part * 2 + 1] = total;
  }
}

static inline void decode_unit(float *out, float *sums, float *ends, const struct step *step, const struct unit *unit, int next_chunk,
                               int next_head) {
  float top[MOST * G], weight[MOST * G * 16] __attribute__((aligned(64)));
  int positions[MOST];
  const long row = (long)unit->b * H + unit->head * G;
  struct rows rows = {step->q + row * D, out + row * D, D, top, weight, 0, positions};
  for (int i = 0; i < unit->size; i++) positions[i] = step->contexts[unit->b + i] - 1;
  float q[MOST * G * D] __attribute__((aligned(64))), own[MOST * G * D] __attribute__((aligned(64)));
  if (MOST > 1 && unit->size > 1) {  // rows of different sequences do not lie together
    for (int i = 0; i < unit->size; i++)
      for (int d = 0; d < G * D; d += 16) v16_store(q + i * G * D + d, v16_load(rows.q + (long)i * H * D + d));
    rows.q = q, rows.sums = own;
  } else if (chunks_of(positions[0] + 1) > 1) {
    rows.sums = sums + (row * CHUNKS + unit->chunk - first_chunk(positions[0] + 1)) * D, rows.apart = (long)CHUNKS * D;
  }
  decode_chunk(step, unit, &rows, next_chunk, next_head);
  for (int i = 0; i < unit->size; i++) {
    const int context = positions[i] + 1;
    end_chunk(out, sums, ends, &rows, i, unit->b + i, unit->head, unit->chunk - first_chunk(context), chunks_of(context));
  }
}

static inline void merge_row(float *out, const float *sums, const float *ends, int chunks) {
  float top = ends[0], weight = ends[1];
  for (int d = 0; d < D; d += 16) v16_store(out + d, v16_load(sums + d));
  for (int c = 1; c < chunks; c++) merge(&top, &weight, out, ends[2 * c], ends[2 * c + 1], sums + (long)c * D);
  finish(out, out, weight);
}

static inline void decode(float *out, float *partial, const struct step *step, const struct team *team) {
  float *ends = partial + (long)step->count * H * CHUNKS * D;
  struct group group = {0, 0, 0, 0, 0, 0};
  struct unit unit;
  int longest = 0;
  for (int b = 0; b < step->count; b++) longest = larger(longest, chunks_of(step->contexts[b]));
  if (longest == 0) return;
  group.chunk = first_chunk(step->contexts[0]) - 1;
  for (int ticket = next(team); find_group(&group, step, ticket); ticket = next(team)) {
    const int index = ticket - group.before, after = index + team->lanes;  // what this lane gets next if the lanes take turns
    const int head = group.parts == 1 ? after : after / group.parts;
    unit_of(&unit, &group, index);
    decode_unit(out, partial, ends, step, &unit, group.chunk + head / K, head % K);
  }
  if (longest == 1) return;
  meet(team);
  for (int row = next(team); row < step->count * H; row = next(team)) {
    const int chunks = chunks_of(step->contexts[row / H]);
    if (chunks > 1) merge_row(out + (long)row * D, partial + (long)row * CHUNKS * D, ends + row * 2L * CHUNKS, chunks);
  }
}

#if CASCADE
static void attention_decode(float *out, float *partial, const float *q, const cached *cache, const int32_t *block_tables,
                             const int32_t *context_lens, const int32_t *count, const int32_t *alike, const struct team *team) {
#else
static void attention_decode(float *out, float *partial, const float *q, const cached *cache, const int32_t *block_tables,
                             const int32_t *context_lens, const int32_t *count, const struct team *team) {
  const int32_t *alike = 0;
#endif
  const struct step step = {q, cache, block_tables, context_lens, alike, count[0]};
  decode(out, partial, &step, team);
}
