// The stages of attention_prefill where shared memory does not suffice for a tile: a stage has STAGE_KEYS, 32 or 16, of a tile's keys or of
// its values. Parts of tiles pass through STAGES of them in the order of use, all keys of a tile and then all its values, so a tile is
// multiplied as a whole one is: key by key, in the same order.
#pragma once
#include "prefill_work.cuh"

constexpr int SIDE_PARTS = TILE / STAGE_KEYS;  // of the keys of a tile, and of its values
constexpr int TILE_PARTS = 2 * SIDE_PARTS;
constexpr int QUERY_UNROLL = REGISTER_STEPS ? STEPS : 2;  // all would spill
#if PACKED
constexpr int STAGE_BYTES = PACKED_STAGE;
#else
constexpr int STAGE_BYTES = STAGE_KEYS * PITCH;
#endif

static_assert(STAGE_KEYS == 32 || (STAGE_KEYS == 16 && !PACKED), "attention_prefill: a part has 32 keys, or 16 that are not packed");
static_assert(TILE_PARTS % STAGES == 0, "attention_prefill: a part's stage must be the same in every tile");

#if PACKED
// Copies 32 keys, or what the thread block needs of 32 values, from `start` on; zeros for pieces without a key that the block's rows see,
// whose blocks are not looked up.
template <int SIDE> DEVICE void copy_part(u8 *stage, const Work &work, const Pools &pools, int start) {
  constexpr int QUANTS = 2 * (SIDE ? VALUE_BYTES : ROW_BYTES);
  const uint4 *pool = pool_of(pools, start);
#pragma unroll 1
  for (int piece = threadIdx.x; piece < QUANTS + 4; piece += THREADS) {
    const int width = piece < QUANTS ? 4 : 8, key = start + (piece < QUANTS ? piece % 8 * 4 : (piece - QUANTS) * 8);
    const bool valid = key + width > first_key(work) && key < end_key(work);
    const u32 block = valid ? (u32)work.table[key / TABLE_TOKENS] : 0;
    if (piece < QUANTS) copy_quants(stage, pool, SIDE, work.head, piece, block, key % S, valid);
    else copy_scales(stage, pool, SIDE, work.head, piece - QUANTS, block, key % S, valid);
  }
}
#else
// Copies STAGE_KEYS keys, or the thread block's columns of as many values, from `start` on, each warp a row at a time; zeros for keys that
// none of the block's rows sees, whose blocks are not looked up.
template <int SIDE> DEVICE void copy_part(u8 *stage, const Work &work, const Pools &pools, int start) {
  constexpr int OWN = SIDE ? PIECES / HALVES : PIECES, OWN_PITCH = SIDE ? VALUES_PITCH : PITCH;
  const uint4 *pool = pool_of(pools, start), *side = SIDE ? pool + VALUES_OFFSET + blockIdx.y % HALVES * OWN : pool;
#pragma unroll(HALVES)
  for (int row = threadIdx.x / 32; row < STAGE_KEYS; row += WARPS) {
    const int key = start + row;
    const bool valid = key >= first_key(work) && key < end_key(work);
    const uint4 *from = valid ? side + key_offset(work.table[key / TABLE_TOKENS], work.head, key) : pool;
#pragma unroll
    for (int column = threadIdx.x % 32; column < OWN; column += 32)
      copy_16_or_zero(stage + row * OWN_PITCH + column * 16, from + column, valid);
  }
}
#endif

// Requests part PART of the tile at `start`, or part PART - TILE_PARTS of the next one, if there is one. All warps are done with its stage.
template <int PART> DEVICE void request_part(u8 *stages, const Work &work, const Pools &pools, int start) {
  constexpr int OWN = PART % TILE_PARTS, SIDE = OWN / SIDE_PARTS;
  if (PART >= TILE_PARTS) start += TILE;
  if (start < end_key(work)) copy_part<SIDE>(stages + OWN % STAGES * STAGE_BYTES, work, pools, start + OWN % SIDE_PARTS * STAGE_KEYS);
  copy_commit();
}

// Part PART of the tile at `start`, once it is there; with two stages the next part is requested. Called by all warps together.
template <int PART> DEVICE const u8 *begin_part(u8 *stages, const Work &work, const Pools &pools, int start) {
  copy_wait<0>();
  __syncthreads();
  if (STAGES > 1) request_part<PART + 1>(stages, work, pools, start);
  return stages + PART % STAGES * STAGE_BYTES;
}
template <int PART> DEVICE void end_part(u8 *stages, const Work &work, const Pools &pools, int start) {
  if (STAGES > 1) return;
  __syncthreads();
  request_part<PART + 1>(stages, work, pools, start);
}

// Whether rows of the warp see keys of the tile at `start`.
DEVICE bool sees_tile(const WarpRows &rows, int start) { return start + TILE > first_visible(rows.low) && start <= rows.high; }
