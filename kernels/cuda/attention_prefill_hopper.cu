// attention_prefill.cu by Hopper's products of warpgroups (sm_90a), with the same bits.
//
//   out, q        [T, H, D] float32          only rows of the chunk sequences are written
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; includes this step's
//   block_tables [B, M] int32, context_lens [B] int32, query_starts [B + 1] int32, sinks [H] float32, chunks [2] int32: as there
//
// Constants: those of attention.cuh; STAGE_KEYS; WARPS, a multiple of 4: a warpgroup has sixty-four of the thread block's rows. CACHE_TYPE is
// F16 or BF16, D is 64 or 128.
// Launch: block WARPS * 32; grid as there; shared memory 2 * STAGE_KEYS * 4 * D bytes, for two stages of STAGE_KEYS (64 or 128) keys with their
// values.
//
// Unit of work: as there. There, every warp reads each key and value from shared memory for its sixteen rows, which takes longer than the
// products; here a warpgroup's products read them once for sixty-four. Keys and values lie in core matrices of eight tokens by eight numbers
// (hopper.cuh): in the product with q a token is a column, in that with the weights it is summed over. Queries and weights are registers.
// While one warpgroup has the tensor cores, another computes its weights. A warpgroup takes the tiles that any of its rows sees; for a row
// that sees nothing of a tile all weights are zeros, which change no bit of its state.
#include "hopper.cuh"
#include "prefill_merge.cuh"

static_assert(!PACKED && (D == 64 || D == 128), "attention_prefill_hopper: F16 or BF16, D 64 or 128");
static_assert(WARPS % 4 == 0 && STAGE_KEYS % TILE == 0, "attention_prefill_hopper: whole warpgroups and tiles");

constexpr int CORE = 128, COLUMN_PITCH = STAGE_KEYS / 8 * CORE;  // bytes from eight numbers of all keys of a stage to the next eight
constexpr int SIDE_BYTES = PIECES * COLUMN_PITCH, STAGE_BYTES = 2 * SIDE_BYTES;

#if CACHE_TYPE == F16
#define KEYS_MMA warpgroup_mma_f16
#define VALUES_MMA warpgroup_mma_rows_f16
#else
#define KEYS_MMA warpgroup_mma_bf16
#define VALUES_MMA warpgroup_mma_rows_bf16
#endif

DEVICE void copy_stage(u8 *stage, const Work &work, const uint4 *cache, int start, int first, int end);
DEVICE WarpRows rows_of_group(const Work &work);
DEVICE void score_tile(float (&s)[TILE / 8][4], const Queries &queries, const u8 *keys);
DEVICE void add_tile(RowState &state, const float (&s)[TILE / 8][4], const u8 *values);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill_hopper(float *out, const float *q, const uint4 *cache, const int *block_tables, const int *context_lens,
                             const int *query_starts, SINKS_ARGUMENT const int *chunks) {
  await_previous();
  DYNAMIC_SHARED(shared);
  Work work;
  if (!find_work(work, block_tables, context_lens, query_starts, chunks)) return;
  const int first = first_key(work), end = end_key(work), first_tile = first & -TILE;
  copy_stage(shared, work, cache, first_tile, first, end);
  const WarpRows rows = rows_of_warp(work), group = rows_of_group(work);
  Queries queries;
  load_queries(queries, row_pointer(q, work, 0), row_pointer(q, work, 1), nullptr, threadIdx.x, THREADS);

  RowState state;
  SectionState section;
  reset(state);
  reset_section(section);
  float max[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0.0f, 0.0f};  // of the sections in `out`
  bool any_section = false;
  int stage = 0;
  for (int base = first_tile; base < end; base += STAGE_KEYS, stage ^= 1) {
    copy_wait<0>();
    copies_ready();
    __syncthreads();
    if (base + STAGE_KEYS < end) copy_stage(shared + (stage ^ 1) * STAGE_BYTES, work, cache, base + STAGE_KEYS, first, end);
    const u8 *keys = shared + stage * STAGE_BYTES;
#pragma unroll 1
    for (int start = base; start < base + STAGE_KEYS; start += TILE, keys += TILE / 8 * CORE) {
      if (start + TILE <= first_visible(group.low) || start > group.high) continue;
      float s[TILE / 8][4];
      score_tile(s, queries, keys);
      weigh(s, state, start, rows);
      add_tile(state, s, keys + SIDE_BYTES);
      const bool seen = start + TILE > first_visible(rows.low) && start <= rows.high;
      if (seen) end_tile(section, state, max, sum, any_section, work, out, SINKS_POINTER, start, rows);
    }
  }
}

// Copies keys and values from `start` on to a stage; zeros for keys outside of first to end - 1, whose blocks are not looked up. Eight lanes
// write a core matrix, four times sixteen bytes of a token are read together.
DEVICE void copy_stage(u8 *stage, const Work &work, const uint4 *cache, int start, int first, int end) {
#pragma unroll 4
  for (int piece = threadIdx.x; piece < STAGE_KEYS * PIECES; piece += THREADS) {
    const int column = piece / 8 % PIECES, row = piece / (8 * PIECES) * 8 + piece % 8, key = start + row;
    const bool valid = key >= first && key < end;
    const uint4 *from = valid ? cache + key_offset(work.table[key / S], work.head, key) + column : cache;
    u8 *to = stage + column * COLUMN_PITCH + row * 16;
    copy_16_or_zero(to, from, valid);
    copy_16_or_zero(to + SIDE_BYTES, valid ? from + VALUES_OFFSET : cache, valid);
  }
  copy_commit();
}

// The first and last position of the warpgroup's rows; `high` is -1 where it has none.
DEVICE WarpRows rows_of_group(const Work &work) {
  const int first = threadIdx.x / 128 * 64, rows = work.count * G;
  return {{}, work.position + first / G, first < rows ? work.position + (min(first + 64, rows) - 1) / G : -1};
}

// The scores of a tile, whose first key is at `keys`.
DEVICE void score_tile(float (&s)[TILE / 8][4], const Queries &queries, const u8 *keys) {
#pragma unroll
  for (int i = 0; i < TILE / 8 * 4; i++) s[i / 4][i % 4] = 0.0f;
  warpgroup_begin();
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    KEYS_MMA(s, queries.registers[step], matrix_descriptor(keys + step * 2 * COLUMN_PITCH, COLUMN_PITCH, CORE));
  warpgroup_end();
}

DEVICE void add_tile(RowState &state, const float (&s)[TILE / 8][4], const u8 *values) {
  u32 p[TILE / 16][4];
#pragma unroll
  for (int step = 0; step < TILE / 16; step++) {
    const float (&a)[4] = s[2 * step], (&b)[4] = s[2 * step + 1];
    p[step][0] = pack_pair<COMPUTE>(a[0], a[1]), p[step][1] = pack_pair<COMPUTE>(a[2], a[3]);
    p[step][2] = pack_pair<COMPUTE>(b[0], b[1]), p[step][3] = pack_pair<COMPUTE>(b[2], b[3]);
  }
  warpgroup_begin();
#pragma unroll
  for (int step = 0; step < TILE / 16; step++)
    VALUES_MMA(state.o, p[step], matrix_descriptor(values + step * 2 * CORE, CORE, COLUMN_PITCH));
  warpgroup_end();
}
