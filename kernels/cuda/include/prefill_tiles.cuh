// The stages of attention_prefill where shared memory has room for whole tiles: a stage is STAGE_KEYS keys, one or two tiles, and their values
// after them.
#pragma once
#include "prefill_work.cuh"

#if PACKED
constexpr int TILE_BYTES = TILE / 32 * PACKED_STAGE;  // of the keys, and of the values, of a tile
#else
constexpr int TILE_BYTES = TILE * PITCH;
#endif
constexpr int SAVED_BYTES = HALVES == 2 && !PACKED ? STAGE_KEYS * (PITCH - VALUES_PITCH) : 0;  // by half the values
constexpr int SIDE_BYTES = STAGE_KEYS / TILE * TILE_BYTES;                                     // of those of a stage
constexpr int STAGE_BYTES = 2 * SIDE_BYTES - SAVED_BYTES;
constexpr int QUERY_UNROLL = STEPS;
constexpr int COPY_UNROLL = D <= 128 ? 4 : 2;
constexpr int SIDE_UNROLL = CACHE_TYPE == KV_FP8 && HALVES == 2 ? 1 : 2;  // of packed caches; sm_90 would spill 12 bytes

#if PACKED
// Copies keys and values from `start` on to a stage; zeros for pieces without a key from first to end - 1, whose blocks are not looked up.
DEVICE void copy_stage(u8 *stage, const Work &work, const Pools &pools, int start, int first, int end) {
  constexpr int QUANTS = 2 * ROW_BYTES, PIECES_OF_32 = QUANTS + 4;
  const uint4 *pool = pool_of(pools, start);
  for (int i = threadIdx.x; i < STAGE_KEYS / 32 * PIECES_OF_32; i += THREADS) {
    const int part = i / PIECES_OF_32, piece = i % PIECES_OF_32, width = piece < QUANTS ? 4 : 8;
    const int key = start + part * 32 + (piece < QUANTS ? piece % 8 * 4 : (piece - QUANTS) * 8);
    const bool valid = key + width > first && key < end;
    const u32 block = valid ? (u32)work.table[key / TABLE_TOKENS] : 0;
#pragma unroll(SIDE_UNROLL)
    for (int side = 0; side < 2; side++) {
      u8 *to = stage + side * SIDE_BYTES + part * PACKED_STAGE;
      if (VALUE_BYTES < ROW_BYTES && side && piece >= 2 * VALUE_BYTES && piece < QUANTS) continue;  // of the other half
      if (piece < QUANTS) copy_quants(to, pool, side, work.head, piece, block, key % S, valid);
      else copy_scales(to, pool, side, work.head, piece - QUANTS, block, key % S, valid);
    }
  }
  copy_commit();
}
#else
// The thread block's half of the values of a stage.
DEVICE void copy_half_values(u8 *values, const Work &work, const uint4 *pool, int start, int first, int end) {
  constexpr int OWN = PIECES / 2;
#pragma unroll 1
  for (int piece = threadIdx.x; piece < STAGE_KEYS * OWN; piece += THREADS) {
    const int row = piece / OWN, column = piece % OWN, key = start + row;
    const bool valid = key >= first && key < end;
    const uint4 *from = pool + blockIdx.y % HALVES * OWN + column + VALUES_OFFSET;
    copy_16_or_zero(values + row * VALUES_PITCH + column * 16,
                    valid ? from + key_offset(work.table[key / TABLE_TOKENS], work.head, key) : pool, valid);
  }
}

// Copies keys and values from `start` on to a stage; zeros for keys outside of first to end - 1, whose blocks are not looked up.
DEVICE void copy_stage(u8 *stage, const Work &work, const Pools &pools, int start, int first, int end) {
  const uint4 *pool = pool_of(pools, start);
#pragma unroll COPY_UNROLL
  for (int i = 0; i < STAGE_KEYS * PIECES / THREADS; i++) {
    const int piece = i * THREADS + threadIdx.x, row = piece / PIECES, column = piece % PIECES, key = start + row;
    const bool valid = key >= first && key < end;
    const uint4 *from = valid ? pool + key_offset(work.table[key / TABLE_TOKENS], work.head, key) + column : pool;
    u8 *to = stage + row * PITCH + column * 16;
    copy_16_or_zero(to, from, valid);
    if (HALVES == 1) copy_16_or_zero(to + SIDE_BYTES, valid ? from + VALUES_OFFSET : pool, valid);
  }
  if (HALVES == 2) copy_half_values(stage + SIDE_BYTES, work, pool, start, first, end);
  copy_commit();
}
#endif
