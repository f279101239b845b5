// out[b] = softmax(q[b] k^T * SCALE) v over the keys of sequence b that its newest token sees: one row a sequence.
//
//   out           [T, H, D] float32          rows from `count` on are not touched
//   partial       [B * H * CHUNKS * (D + 2)] float32, scratch (B: as many as `count` may say); CHUNKS = ceil(M * S / 256)
//   q             [T, H, D] float32          row b is sequence b's
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; this step's are in it
//   block_tables  [B, M] int32
//   context_lens  [B] int32                  tokens in the cache, at least 1, at most M * S
//   count         [1] int32                  sequences that count
//
// Units: (sequence, chunk of 256 keys, KV head), and one reading of the keys and values serves the H / K query heads. A sequence of one
// chunk is finished at once; if there is a longer one, all meet, and (sequence, query head) are the units of the merge. float32 throughout;
// the order of the arithmetic is attention.h's.
#include "attention.h"

static inline int first_chunk(int context) { return first_seen(context - 1) / CHUNK; }
static inline int chunks_of(int context) { return (context - 1) / CHUNK + 1 - first_chunk(context); }

// The tile that this lane will probably read after the one that ends before `past`: the next one of its chunk, or the first one of the unit
// `guess`, which it gets if the lanes take turns.
static inline void look_on(struct ahead *ahead, const cached *cache, const int32_t *table, int head, int past, int end, int guess,
                           int context) {
  const int start = guess / K * CHUNK;
  if (past < end) look_ahead(ahead, cache, table, head, past, smaller(end, past + TILE));
  else if (start >= context) look_nowhere(ahead);
  else look_ahead(ahead, cache, table, guess % K, larger(start, first_seen(context - 1)), smaller(context, start + TILE));
}

static inline void decode_chunk(const struct rows *rows, const cached *cache, const int32_t *table, int head, int chunk, int context,
                                int guess) {
  float kt[D * TILE] __attribute__((aligned(64)));
  struct values values;
  struct ahead ahead;
  const int seen = larger(chunk * CHUNK, first_seen(context - 1)), end = smaller(context, (chunk + 1) * CHUNK);
  for (int g = 0; g < G; g++) begin_chunk(rows, g);
  for (int start = seen & -TILE; start < end; start += TILE) {
    const int first = larger(seen, start), past = smaller(end, start + TILE);
    look_on(&ahead, cache, table, head, past, end, guess, context);
    load_keys(&ahead, kt, cache, table, head, start, first, past);
    for (int at = first & -RUN; at < past; at += RUN)
      values.run[(at - start) / RUN] = keys_of(cache, table[at / S], head) + (long)K * S * D + at % S * D;
    attend(&ahead, 1, RUN, rows, G, kt, &values, start);
  }
}

static inline void decode_unit(float *out, float *sums, float *ends, const float *q, const cached *cache, const int32_t *block_tables,
                               int b, int chunk, int head, int context, int lanes) {
  const int chunks = chunks_of(context), first = first_chunk(context);
  float top[G], weight[G * 16] __attribute__((aligned(64)));
  const long row = (long)b * H + head * G;
  const long part = row * CHUNKS + chunk;
  struct rows rows = {q + row * D, out + row * D, D, top, weight, context - 1};
  if (chunks > 1) rows.sums = sums + part * D, rows.apart = (long)CHUNKS * D;
  decode_chunk(&rows, cache, block_tables + (long)b * M, head, first + chunk, context, (first + chunk) * K + head + lanes);
  ends += part * 2;
  for (int g = 0; g < G; g++) {
    const float total = v16_sum(v16_load(weight + 16 * g));
    if (chunks == 1) finish(rows.sums + g * D, rows.sums + g * D, total);
    else ends[g * CHUNKS * 2] = top[g], ends[g * CHUNKS * 2 + 1] = total;
  }
}

static inline void merge_row(float *out, const float *sums, const float *ends, int chunks) {
  float top = ends[0], weight = ends[1];
  for (int d = 0; d < D; d += 16) v16_store(out + d, v16_load(sums + d));
  for (int c = 1; c < chunks; c++) merge(&top, &weight, out, ends[2 * c], ends[2 * c + 1], sums + (long)c * D);
  finish(out, out, weight);
}

static void attention_decode(float *out, float *partial, const float *q, const cached *cache, const int32_t *block_tables,
                             const int32_t *context_lens, const int32_t *count, const struct team *team) {
  float *ends = partial + (long)count[0] * H * CHUNKS * D;
  int b = 0, before = 0, longest = 0;  // units of the sequences before b
  for (int i = 0; i < count[0]; i++) longest = larger(longest, chunks_of(context_lens[i]));
  for (int unit = next(team);; unit = next(team)) {
    while (b < count[0] && unit >= before + K * chunks_of(context_lens[b])) before += K * chunks_of(context_lens[b++]);
    if (b == count[0]) break;
    decode_unit(out, partial, ends, q, cache, block_tables, b, (unit - before) / K, (unit - before) % K, context_lens[b], team->lanes);
  }
  if (longest <= 1) return;
  meet(team);
  for (int unit = next(team); unit < count[0] * H; unit = next(team)) {
    const int chunks = chunks_of(context_lens[unit / H]);
    if (chunks > 1)
      merge_row(out + (long)unit * D, partial + (long)unit * CHUNKS * D, ends + unit * 2L * CHUNKS, chunks);
  }
}
