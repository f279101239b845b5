// out[t] = softmax(q[t] k^T * SCALE) v over the keys that row t sees and the head's sink, for the rows of sequences with several rows
// (prefill chunks).
//
//   out           [T, H, D] float32          only rows of the chunk sequences are written; meanwhile they hold the merged sections
//   q             [T, H, D] float32
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; includes this step's. If WORLD > 1 cache0, cache1, ...: the blocks
//                                            of each rank (own_keys.cuh), under the numbers that they have in its pool
//   block_tables  [B, M] int32
//   context_lens  [B] int32                  tokens in the cache, including this step's
//   query_starts  [B + 1] int32              sequence b has rows query_starts[b] to query_starts[b + 1] - 1; its last row has position
//                                            context_lens[b] - 1
//   sinks         [H] float32, if SINKS      attention.cuh
//   step_rows     [1] int32, if WORLD > 1    rows of the step; only those of this rank are computed (rank_rows.cuh), and neighbours of them
//   chunks        [2] int32                  first chunk sequence, number of chunk sequences
//
// Constants: those of attention.cuh; WARPS; STAGES, 1 or 2, of STAGE_KEYS: 128 or 64 keys, with their values; or, for D > 128 where shared
// memory does not suffice for those, 32 or 16 keys or values. H / K is at most WARPS * 16.
// Launch: block WARPS * 32; grid (ceil(T / SPAN) + chunk sequences, K * HALVES) or more, with SPAN = WARPS * 16 * K / H rounded down; shared
// memory STAGES * STAGE_KEYS * (2 * (D + VALUES) + 32), of 32 or 16 keys STAGES * STAGE_KEYS * (2 * D + 16), and, for D > 128,
// WARPS * (64 * VALUES + 32 * D - 512 * REGISTER_STEPS) bytes. tinyvllm/backends/cuda/attention_plan.py chooses; KiB of 16-bit caches:
//
//   D      WARPS, STAGES, STAGE_KEYS   KiB      where a block has less
//   128    8, 2, 128                   136      8, 1, 128   68
//   256    4, 2, 64                    220      4, 1, 64   154      3, 2, 32   99     2, 2, 16   61
//   512    2, 1, 64                    162      2, 2, 16   97
//
// Unit of work: a thread block takes (sequence, SPAN query positions, KV head); a warp takes sixteen of its SPAN * H / K rows. The last
// positions of a sequence see most keys and come first; heads come one after another, so that the keys of one or two heads fill the L2
// cache. While the warps work on one stage of keys and values, the next is being copied. There is one barrier per stage of several tiles,
// so that the softmax of one warp overlaps with the products of another. A warp skips tiles that its rows do not see, and masks only at the
// edge of the visible keys. The sums of a section are kept in registers (D > 128: in shared memory), those of the sections in `out`. Scores
// and sums are float32; the order of arithmetic is attention.cuh's.
#include "prefill_merge.cuh"
#if STAGE_KEYS < 64
#include "prefill_parts.cuh"
#else
#include "prefill_tiles.cuh"
#endif

#if STAGE_KEYS < 64
template <int PART>
DEVICE void attend_parts(RowState &state, float (&s)[TILE / 8][4], const Queries &queries, u8 *stages, const Work &work, const Pools &pools,
                         int start, const WarpRows &rows);
#else
DEVICE void attend_tile(RowState &state, const Queries &queries, const u8 *keys, const u8 *values, int start, const WarpRows &rows);
#endif

constexpr int ALIGNED = WORLD > 1 && STAGE_KEYS > TILE ? STAGE_KEYS : TILE;  // the keys of a stage are one rank's

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill(float *out, const float *q, POOL_ARGUMENTS const int *block_tables, const int *context_lens, const int *query_starts,
                      SINKS_ARGUMENT ROWS_ARGUMENT const int *chunks) {
  await_previous();
  const Pools pools = POOLS;
  DYNAMIC_SHARED(shared);
  Work work;
  if (!find_work(work, block_tables, context_lens, query_starts, chunks) || !is_own(work, ROWS_POINTER)) return;
  if (HALVES == 2) out += blockIdx.y % HALVES * VALUES;
  const int first = first_key(work), end = end_key(work), first_tile = first & -ALIGNED;
#if STAGE_KEYS < 64
  request_part<0>(shared, work, pools, first_tile);
#else
  copy_stage(shared, work, pools, first_tile, first, end);
#endif
  const WarpRows rows = rows_of_warp(work);
  Queries queries;
  u8 *after_stages = shared + STAGES * STAGE_BYTES;
  load_queries<QUERY_UNROLL>(queries, row_pointer(q, work, 0), row_pointer(q, work, 1), after_stages + SECTION_BYTES, threadIdx.x, THREADS);

  RowState state;
  SectionState section;
#if D > 128
  section.shared = (float *)after_stages + threadIdx.x;
#endif
  reset(state);
  reset_section(section);
  float max[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0.0f, 0.0f};  // of the sections in `out`
  bool any_section = false;

#if STAGE_KEYS < 64
  for (int start = first_tile; start < end; start += TILE) {
    float s[TILE / 8][4];
    attend_parts<0>(state, s, queries, shared, work, pools, start, rows);
    if (sees_tile(rows, start)) end_tile(section, state, max, sum, any_section, work, out, SINKS_POINTER, start, rows);
  }
#else
  int stage = 0;
  for (int base = first_tile; base < end; base += STAGE_KEYS) {
    const bool more = base + STAGE_KEYS < end;
    copy_wait<0>();
    __syncthreads();
    if (STAGES > 1 && more) copy_stage(shared + (stage ^ 1) * STAGE_BYTES, work, pools, base + STAGE_KEYS, first, end);
    const u8 *current = shared + stage * STAGE_BYTES;
#pragma unroll 1
    for (int start = base; start < base + STAGE_KEYS; start += TILE) {
      if (start + TILE <= first_visible(rows.low) || start > rows.high) continue;
      const u8 *tile = current + (start - base) / TILE * TILE_BYTES;
      attend_tile(state, queries, tile + key_lane_offset(), tile + SIDE_BYTES + value_lane_offset(), start, rows);
      end_tile(section, state, max, sum, any_section, work, out, SINKS_POINTER, start, rows);
    }
    if (STAGES == 1) {
      __syncthreads();
      if (more) copy_stage(shared, work, pools, base + STAGE_KEYS, first, end);
    } else {
      stage ^= 1;
    }
  }
#endif
}

// --- a tile

#if STAGE_KEYS < 64
// The tile at `start` from its part PART on, by all warps together; one whose rows do not see the tile only copies. `s`: scores so far.
template <int PART>
DEVICE void attend_parts(RowState &state, float (&s)[TILE / 8][4], const Queries &queries, u8 *stages, const Work &work, const Pools &pools,
                         int start, const WarpRows &rows) {
  constexpr int FIRST = PART % SIDE_PARTS * STAGE_KEYS;
  const u8 *part = begin_part<PART>(stages, work, pools, start);
  if (sees_tile(rows, start)) {
    if constexpr (PART < SIDE_PARTS) score<FIRST, STAGE_KEYS>(s, queries, part + key_lane_offset());
    else add_values<FIRST, STAGE_KEYS>(state, s, part + value_lane_offset());
    if (PART == SIDE_PARTS - 1) weigh(s, state, start, rows);
  }
  end_part<PART>(stages, work, pools, start);
  if constexpr (PART + 1 < TILE_PARTS) attend_parts<PART + 1>(state, s, queries, stages, work, pools, start, rows);
}
#else
DEVICE void attend_tile(RowState &state, const Queries &queries, const u8 *keys, const u8 *values, int start, const WarpRows &rows) {
  float s[TILE / 8][4];
#if PACKED
  score<0, 32>(s, queries, keys);
  score<32, 32>(s, queries, keys + PACKED_STAGE);
#else
  score<0, TILE>(s, queries, keys);
#endif
  weigh(s, state, start, rows);
#if PACKED
  add_values<0, 32>(state, s, values);
  add_values<32, 32>(state, s, values + PACKED_STAGE);
#else
  add_values<0, TILE>(state, s, values);
#endif
}
#endif
