// The part of attention_decode.cu that a rank has where WORLD ranks divide contexts: the results of each of its partitions of 256 keys, for
// one row a sequence. merge_ranks.cu makes the row's values of those of all ranks.
//
//   site          meeting.cuh: this rank's own; its place of this turn gets the results (rank_results.cuh)
//   turns         [2] uint32                 meeting.cuh; not changed
//   q             [T, H, D] float32          row b belongs to sequence b
//   cache         [P, 2, K, S, D] CACHE_TYPE this rank's blocks, keys at [:, 0], values at [:, 1]; this step's are in them
//   block_tables  [B, M] int32               of blocks of all ranks together
//   context_lens  [B] int32                  tokens in all ranks
//   count         [1] int32                  number of sequences
//   before        not read: what the launch before this one has written
//   first, B      integers: the first sequence of this launch, and how many it has at most
//
// Constants: those of attention.cuh and meeting.cuh; S is 256. B is at most SEQUENCES (rank_results.cuh).
// Launch, units of work and order of arithmetic: attention_decode.cu's, without CASCADE; units are of this rank's partitions alone.
#define CASCADE 0
#include "decode_tile.cuh"
#include "rank_results.cuh"
#include "site.cuh"

DEVICE void write_results(float *place, const RowState &state, const Cursor &at);

extern "C" __global__ void __launch_bounds__(32, D <= 32 ? 10 : 1)
    attention_decode_ranks(u8 *site, const u32 *turns, const float *q, const uint4 *cache, const int *block_tables, const int *context_lens,
                           const int *count, const void *before, int first, int B) {
  await_previous();
  DYNAMIC_SHARED(ring);
  const Batch batch = {block_tables + (s64)first * M, context_lens + first, nullptr, min(B, count[0] - first), 0};
  q += (s64)first * H * D;
  Run run;
  Stream stream;
  if (!find_run(run, stream.next, batch)) return;
  float *place = (float *)place_of(site, turns[0]);
  Cursor at = stream.next;
  look_up_blocks(stream, batch, run);
  stream.slot = 0;
#pragma unroll 1
  for (int i = 0; i < RING; i++) request_stage(stream, i % 4, ring, cache, batch, run);

  Queries queries;
  RowState state;
  bool loaded = false;
  while (at.unit < run.end) {
    if (!loaded) {
      const RowPair rows = rows_of_pass(q, at, 0, 1);
      load_queries(queries, rows.row, rows.row_plus_8, ring + RING * STAGE_BYTES, threadIdx.x, 32);
    }
    reset(state);
#pragma unroll 1
    for (;; at.start += TILE) {
      attend_tile<false>(state, queries, stream, ring, cache, at, batch, run);
      if (is_unit_end(at)) break;
    }
    write_results(place, state, at);
    loaded = at.start + TILE < at.context;
    advance(at, batch, run);
  }
}

// The end of a unit, of which `at` is a tile.
DEVICE void write_results(float *place, const RowState &state, const Cursor &at) {
  const int g = lane_of() / 4, t = lane_of() % 4, entry = at.b * M + at.start / PARTITION;
  const int first = HALVES == 2 ? blockIdx.y * VALUES : 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = g + 8 * r;
    const float sum = row_sum(state.sum[r]);
    if (row >= ROWS || at.head % PARTS * ROWS + row >= G) continue;
    const int head = query_head(at.head, row);
    float *to = place + values_at(entry, head) + first + t * 2;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) *(float2 *)(to + n * 8) = make_float2(state.o[n][2 * r], state.o[n][2 * r + 1]);
    if (t == 0 && first == 0) *(float2 *)(place + ends_at(entry, head)) = make_float2(state.max[r], sum);
  }
}
