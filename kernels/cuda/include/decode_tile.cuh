// The products of a warp of attention_decode with one tile from its ring: one pass, or two, each for the rows of an mma.
#pragma once
#include "decode_ring.cuh"

// Where row r of a head begins in q or out; null if there is no such row.
template <typename Number> DEVICE Number *row_pointer(Number *rows, int b, int head, int r) {
  const int row = head % PARTS * ROWS + r;
  return r < ROWS && row < G ? rows + ((s64)b * H + head / PARTS * G + row) * D : nullptr;
}

// The query head of row r of a head.
DEVICE int query_head(int head, int r) { return head / PARTS * G + head % PARTS * ROWS + r; }

// The lane's rows g and g + 8 of pass `pass` in q, for a unit of `sequences` sequences; null where there is no such row.
struct RowPair {
  const float *row, *row_plus_8;
};
DEVICE const float *row_of_pass(const float *q, const Cursor &at, int pass, int r, int sequences) {
  const int i = pass * TOGETHER + r / ROWS;
  return r / ROWS < TOGETHER && i < sequences ? row_pointer(q, at.b + i, at.head, r % ROWS) : nullptr;
}
DEVICE RowPair rows_of_pass(const float *q, const Cursor &at, int pass, int sequences) {
  const int g = lane_of() / 4;
  return {row_of_pass(q, at, pass, g, sequences), row_of_pass(q, at, pass, g + 8, sequences)};
}

// The queries of the second pass are stored in the padding of the ring's rows, which has room for one step per stage.
struct SecondQueries {
  u8 *ring;
};
DEVICE uint4 *step_pointer(const SecondQueries &second, int step) {
  return (uint4 *)(second.ring + step * STAGE_BYTES + lane_of() * SECOND_PITCH + SECOND_QUERIES);
}
DEVICE void query_step(u32 (&a)[4], const SecondQueries &second, int step) {
  const uint4 words = *step_pointer(second, step);
  a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
}
DEVICE void load_second(const SecondQueries &second, const RowPair &from) {
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 a[4];
    load_step(a, from.row, from.row_plus_8, step);
    *step_pointer(second, step) = make_uint4(a[0], a[1], a[2], a[3]);
  }
}

// Hides the keys of a tile that the sequence's row does not see.
DEVICE void mask_row(float (&s)[TILE / 8][4], const Cursor &at) {
  if (WORLD == 1) return mask(s, at.start, {at.context - 1, at.context - 1});
  const int first_key = at.start + threadIdx.x % 4 * LANE_KEYS;
#pragma unroll
  for (int n = 0; n < TILE / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = first_key + key_of(n, i);
      if (key >= at.context || key < at.hidden) s[n][i] = MINUS_INFINITY;
    }
}

// The only pass over a tile, or the last one. Each stage is replaced by the next request as soon as it has been used. WHOLE: all keys of
// the tile are visible.
template <bool WHOLE, typename Operand>
DEVICE void attend_tile(RowState &state, const Operand &queries, Stream &stream, u8 *ring, const uint4 *cache, const Cursor &at,
                        const Batch &batch, const Run &run) {
  float s[TILE / 8][4];
  score<0, 32>(s, queries, wait_for_stage(ring, stream.slot) + key_lane_offset());
  request_stage(stream, RING % 4, ring, cache, batch, run);
  score<32, 32>(s, queries, wait_for_stage(ring, stream.slot) + key_lane_offset());
  request_stage(stream, (RING + 1) % 4, ring, cache, batch, run);
  const bool partial = at.start < first_seen(at) || at.start + TILE > at.context;
  cap_scores(s);
  if (!WHOLE && partial) mask_row(s, at);
  softmax(s, state);
  add_values<0, 32>(state, s, wait_for_stage(ring, stream.slot) + value_lane_offset());
  request_stage(stream, (RING + 2) % 4, ring, cache, batch, run);
  add_values<32, 32>(state, s, wait_for_stage(ring, stream.slot) + value_lane_offset());
  request_stage(stream, (RING + 3) % 4, ring, cache, batch, run);
}

// The first of two passes: all keys are visible, and the tile stays in the ring.
DEVICE void attend_tile_first(RowState &state, const Queries &queries, const Stream &stream, const u8 *ring) {
  float s[TILE / 8][4];
  score<0, 32>(s, queries, wait_for_stage_of_tile<0>(ring, stream.slot) + key_lane_offset());
  score<32, 32>(s, queries, wait_for_stage_of_tile<1>(ring, stream.slot) + key_lane_offset());
  cap_scores(s);
  softmax(s, state);
  add_values<0, 32>(state, s, wait_for_stage_of_tile<2>(ring, stream.slot) + value_lane_offset());
  add_values<32, 32>(state, s, wait_for_stage_of_tile<3>(ring, stream.slot) + value_lane_offset());
}
