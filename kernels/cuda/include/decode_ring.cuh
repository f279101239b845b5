// The ring of stages through which a warp of attention_decode reads keys and values.
//
// A stage is 32 rows of keys or of values. Stages are requested in the order of the tiles; within a tile first keys 0 to 31, then keys 32
// to 63, then their values. Lane l looks up the blocks of keys l and l + 32 of a tile, one tile ahead: their blocks are read from the table
// when the tile before is requested, so the copies need not wait for the table.
#pragma once
#include "decode_split.cuh"

constexpr int RING = D >= 256 ? 2 : D <= 64 ? 8 : 512 / D;  // stages
constexpr int STAGE_KEYS = 32;
#if PACKED
constexpr int STAGE_BYTES = PACKED_STAGE + (PASSES == 2 ? 512 : 0);
constexpr int SECOND_QUERIES = PACKED_STAGE, SECOND_PITCH = 16;  // of the queries of a second pass, one step a stage
#else
constexpr int STAGE_BYTES = STAGE_KEYS * PITCH;
constexpr int SECOND_QUERIES = D * 2, SECOND_PITCH = PITCH;  // in the padding of the rows
#endif
constexpr int COPY_UNROLL = D <= 160 ? 32 : 4;             // wide heads leave few registers
constexpr int RUN_KEYS = S < STAGE_KEYS ? S : STAGE_KEYS;  // keys that are contiguous in a block and in a stage

static_assert(PASSES == 1 || (RING >= 4 && RING >= STEPS), "attention_decode: a tile of two passes must fit in the ring");

struct Stream {
  Cursor next;   // the tile after the one that is being requested
  int block[2];  // of its keys; -1 where the whole contiguous run of them is hidden
#if PACKED
  int present[2];  // blocks of the present tile's keys
  int head, start;
#else
  u32 offset[2];  // key_offset of the present tile's keys
#endif
  int first, end;  // visible keys of the present tile
  bool valid;      // whether there is a present tile
  int slot;        // of the ring
};

// The key of a stage whose block the lane looks up: of packed stages the first of the four that it copies.
DEVICE int lane_key() { return PACKED ? lane_of() % 8 * 4 : lane_of(); }

DEVICE void look_up_blocks(Stream &stream, const Batch &batch, const Run &run) {
  const Cursor &at = stream.next;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = at.start + half * STAGE_KEYS + lane_key(), low = key & -RUN_KEYS;
    const bool visible = low < at.context && low + RUN_KEYS > first_seen(at);
    stream.block[half] = at.unit < run.end && visible ? batch.tables[(s64)at.b * M + key / S] : -1;
  }
}

DEVICE void begin_tile(Stream &stream, const Batch &batch, const Run &run) {
  const Cursor &at = stream.next;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#if PACKED
    stream.present[half] = stream.block[half];
#else
    const int key = at.start + half * STAGE_KEYS + lane_of();
    stream.offset[half] = key_offset(max(stream.block[half], 0), at.head / PARTS, key);
#endif
  }
#if PACKED
  stream.head = at.head / PARTS, stream.start = at.start;
#endif
  stream.first = first_seen(at) - at.start, stream.end = at.context - at.start;
  stream.valid = at.unit < run.end;
  if (!stream.valid) return;
  advance(stream.next, batch, run);
  look_up_blocks(stream, batch, run);
}

#if PACKED
// Copies a stage's pieces; zeros for keys whose block is not visible.
DEVICE void copy_packed_stage(u8 *slot, const uint4 *cache, int side, int half, const Stream &stream) {
  const int block = half ? stream.present[1] : stream.present[0], at = (stream.start + half * STAGE_KEYS + lane_key()) % S;
#pragma unroll(COPY_UNROLL / 4)
  for (int piece = lane_of(); piece < 2 * (side ? VALUE_BYTES : ROW_BYTES); piece += 32)
    copy_quants(slot, cache, side, stream.head, piece, (u32)max(block, 0), at, block >= 0);
  const int eight = lane_of() % 4, from = __shfl_sync(ALL_LANES, block, 2 * eight), first = __shfl_sync(ALL_LANES, at, 2 * eight);
  if (lane_of() < 4) copy_scales(slot, cache, side, stream.head, eight, (u32)max(from, 0), first, from >= 0);
}
#else
// Copies the contiguous runs of a stage, 16 bytes a lane; zeros for keys of the stage outside of first to end - 1, if there are any (not
// WHOLE).
template <bool WHOLE> DEVICE void copy_stage(u8 *slot, const uint4 *side, u32 offset, int first, int end) {
  constexpr int RUN_PIECES = RUN_KEYS * PIECES;
#pragma unroll(WHOLE ? 4 : 1)
  for (int base = 0; base < STAGE_KEYS; base += RUN_KEYS) {
    const uint4 *from = side + __shfl_sync(ALL_LANES, offset, base) + lane_of();
#pragma unroll(WHOLE ? COPY_UNROLL : 1)
    for (int i = 0; i < RUN_PIECES; i += 32) {
      const int piece = i + lane_of(), key = base + piece / PIECES;
      if (RUN_PIECES % 32 && piece >= RUN_PIECES) continue;
      u8 *to = slot + key * PITCH + piece % PIECES * 16;
      if (WHOLE) copy_16(to, from + i);
      else copy_16_or_zero(to, from + i, key >= first && key < end);
    }
  }
}

#endif

#if !PACKED
// As copy_stage, of the thread block's half of values: a run of keys is PIECES / 2 pieces of each row.
DEVICE void copy_half_values(u8 *slot, const uint4 *side, u32 offset, int first, int end) {
  constexpr int OWN = PIECES / 2;
#pragma unroll 1
  for (int base = 0; base < STAGE_KEYS; base += RUN_KEYS) {
    const uint4 *from = side + __shfl_sync(ALL_LANES, offset, base) + blockIdx.y * OWN;
#pragma unroll 4
    for (int piece = lane_of(); piece < RUN_KEYS * OWN; piece += 32) {
      const int row = piece / OWN, column = piece % OWN, key = base + row;
      copy_16_or_zero(slot + key * VALUES_PITCH + column * 16, from + row * PIECES + column, key >= first && key < end);
    }
  }
}
#endif

// Requests stage number `stage` of a tile, into the slot that all lanes have finished with. After the last tile it copies nothing but still
// commits an empty group, so that the counts of copy_wait hold.
DEVICE void request_stage(Stream &stream, int stage, u8 *ring, const uint4 *cache, const Batch &batch, const Run &run) {
  __syncwarp();
  if (stage == 0) begin_tile(stream, batch, run);
  if (stream.valid) {
    u8 *slot = ring + stream.slot * STAGE_BYTES;
#if PACKED
    copy_packed_stage(slot, cache, stage / 2, stage % 2, stream);
#else
    const int half = stage % 2, first = stream.first - half * STAGE_KEYS, end = stream.end - half * STAGE_KEYS;
    const uint4 *side = stage >= 2 ? cache + VALUES_OFFSET : cache;
    const u32 offset = half ? stream.offset[1] : stream.offset[0];
    if (HALVES == 2 && stage >= 2) copy_half_values(slot, side, offset, first, end);
    else if (first <= 0 && end >= STAGE_KEYS) copy_stage<true>(slot, side, offset, first, end);
    else copy_stage<false>(slot, side, offset, first, end);
#endif
  }
  copy_commit();
  stream.slot = stream.slot + 1 == RING ? 0 : stream.slot + 1;
}

// Waits for the stage in `slot`. The next stage that is requested replaces it.
DEVICE const u8 *wait_for_stage(const u8 *ring, int slot) {
  copy_wait<RING - 1>();
  __syncwarp();
  return ring + slot * STAGE_BYTES;
}
// Waits for stage STAGE of the tile whose first stage is in `slot`, while none of the tile's stages has been replaced.
template <int STAGE> DEVICE const u8 *wait_for_stage_of_tile(const u8 *ring, int slot) {
  copy_wait<(RING > STAGE ? RING - 1 - STAGE : 0)>();
  __syncwarp();
  return ring + (slot + STAGE < RING ? slot + STAGE : slot + STAGE - RING) * STAGE_BYTES;
}
