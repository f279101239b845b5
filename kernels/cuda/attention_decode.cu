// out[b] = softmax(q[b] k^T * SCALE) v over the keys that the newest token of sequence b sees, and the head's sink: one row a sequence.
//
//   out           [T, H, D] float32          rows from `count` on are not touched
//   partial       [RECORDS_OF_ALL * ROWS * (VALUES + 2)] float32, of each half, scratch. RECORDS_OF_ALL = grid * 2 * (SECTION / 256 + SECTIONS), plus, if
//                                            CASCADE, B * K * PARTS * (SECTIONS + min(cascade, ceil(M * S / 256)));
//                                            SECTIONS = ceil(M * S / SECTION)
//   counters      [grid * 2 + (CASCADE ? B * K * PARTS : 0)] uint32, of each half, zero between launches
//   q             [T, H, D] float32          row b belongs to sequence b
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; includes this step's
//   block_tables  [B, M] int32               entries after the end of a context are not read
//   context_lens  [B] int32                  tokens in the cache, 1 to M * S, for sequences below `count`
//   count         [1] int32                  number of sequences
//   sinks         [H] float32, if SINKS      attention.cuh
//   shared_prefix_lens  [B] int32, if CASCADE  leading tokens of sequence b that are in the same blocks as those of sequence b - 1, whole
//                                            blocks that both have filled; 0 for the first; a smaller number is always correct
//   B             integer                    length of context_lens
//   cascade       integer                    partitions at the start of a sequence that another sequence's warp may read for it, a multiple
//                                            of SECTION / 256; 0 if not CASCADE
//
// Constants: those of attention.cuh; CASCADE: 1 for cascades, see below, or 0. The text does not depend on B. PARTS = ceil(H / K / 16), ROWS = ceil(H / K / PARTS).
// Launch: block 32; shared memory RING * 32 * (2 * D + 16) + (D <= 128 ? 0 : 32 * D - 512 * REGISTER_STEPS) bytes, RING = min(8, max(2, 512 / D));
// grid: as many blocks as the GPU holds at once, multiprocessors * floor(shared memory of one / (that + 1024)), and at most as many as
// there can be units, B * K * PARTS * ceil(M * S / 256). D = 128: 34 KiB, six on a multiprocessor of 228 KiB. D = 512: 81 KiB, two.
// For D > 256 `grid` is half of the blocks that the GPU holds, and the launch has (grid, 2): both halves of a unit are computed at the same
// time, so that the second to read its keys finds them in the L2 cache. No CASCADE.
//
// Unit of work: a thread block is one warp. Units are (sequence, KV head's rows, partition of 256 keys), in this order, and each warp takes
// an equal run of them, whatever the lengths of the sequences: one long sequence fills the GPU, and so do many short ones. A warp's keys
// and values pass through its own ring of RING stages of 32 rows, across the borders of units: while it works on one stage, the others are
// being copied, 8 KiB each at D = 128. More than sixteen query heads per KV head form PARTS parts, which read the same keys.
//
// A sequence of one partition is finished at once. Otherwise each partition leaves a record (max, sum, ROWS rows of weighted values); the
// last warp to finish its part of a section (SECTION keys) merges the section's records into one, and the last to finish a section merges
// those.
//
// Cascade: a partition that consecutive sequences have in the same blocks is one unit, which the warp of the first of them reads for all.
// Their rows fill the sixteen rows of an mma (H / K rows per sequence), and for heads up to 64, where there are enough registers, a tile is
// multiplied with a second group of sixteen rows before its stages are replaced. Such a unit counts as two when units are divided among
// warps; if there are fewer units than warps, no unit has two groups. A partition in which block tables differ is read by each sequence for
// itself: a tile of it would be multiplied with rows that do not see it, and 0 times a NaN in another sequence's values is NaN. The same
// holds for everything once a context exceeds its WINDOW. Only the reading is shared: each (sequence, query head, partition) has the
// arithmetic, and the bits, that it has alone, and is merged as it is alone.
//
// Scores and sums are float32; the order of arithmetic is attention.cuh's.
#ifndef CASCADE
#define CASCADE 0
#endif
#include "decode_merge.cuh"  // and, through it, decode_tile.cuh, decode_ring.cuh, decode_split.cuh, attention.cuh

extern "C" __global__ void __launch_bounds__(32, D <= 32 ? 10 : 1)
    attention_decode(float *out, float *partial, u32 *counters, const float *q, const uint4 *cache, const int *block_tables,
#if CASCADE
                     const int *context_lens, const int *count, SINKS_ARGUMENT const int *shared_prefix_lens, int B, int cascade) {
#else
                     const int *context_lens, const int *count, SINKS_ARGUMENT int B, int cascade) {
  const int *shared_prefix_lens = nullptr;
#endif
  await_previous();
  DYNAMIC_SHARED(ring);
  if (HALVES == 2) out += blockIdx.y * VALUES, counters += blockIdx.y * gridDim.x * 2;
  const Batch batch = {block_tables, context_lens, shared_prefix_lens, min(B, count[0]), cascade};
  const Records records = records_at(partial, B, cascade);
  Run run;
  Stream stream;
  if (!find_run(run, stream.next, batch)) return;
  Cursor at = stream.next;
  look_up_blocks(stream, batch, run);
  stream.slot = 0;
#pragma unroll 1
  for (int i = 0; i < RING; i++) request_stage(stream, i % 4, ring, cache, batch, run);

  Queries queries;
  const SecondQueries second = {ring};
  RowState state;
  int sequences = 1, loaded = 0;  // of the present unit; sequences whose queries are loaded
  int for_next = 0;               // partitions that are also read for the next sequence
  while (at.unit < run.end) {
    if (CASCADE && loaded == 0) for_next = partitions_for_next(at, batch, run);
    if (CASCADE) sequences = at.start / PARTITION < for_next ? sequences_of_unit(at, batch, run) : 1;
    if (sequences > loaded) {
      const RowPair first = rows_of_pass(q, at, 0, sequences);
      load_queries(queries, first.row, first.row_plus_8, ring + RING * STAGE_BYTES, threadIdx.x, 32);
      if (PASSES == 2 && sequences > TOGETHER) load_second(second, rows_of_pass(q, at, 1, sequences));
      loaded = sequences;
    }
    reset(state);
    if (PASSES == 2 && sequences > TOGETHER) {
      RowState second_state;
      reset(second_state);
#pragma unroll 1
      for (int tile = 0; tile < PARTITION / TILE; tile++) {
        attend_tile_first(state, queries, stream, ring);
        attend_tile<true>(second_state, second, stream, ring, cache, at, batch, run);
      }
      at.start += PARTITION - TILE;
      float sum[2];
      sum_rows(sum, second_state);
      write_follower_records(second_state, sum, records, at, 1, TOGETHER, sequences);
    } else {
#pragma unroll 1
      for (;; at.start += TILE) {
        attend_tile<false>(state, queries, stream, ring, cache, at, batch, run);
        if (is_unit_end(at)) break;
      }
    }
    end_unit(state, out, SINKS_POINTER, records, counters, batch, run, at, sequences);
    if (at.start + TILE >= at.context) loaded = 0;
    advance(at, batch, run);
  }
}
