// attention_decode: one SIMD group and one tile of keys. How a tile is divided among lanes, its scores, the softmax, the weighted values.
//
// Constants in addition to attention.h's: SIMDS and CASCADE, as attention_decode.metal says.
//
// In a tile, KEY_LANES lanes go along D, four numbers each, or twice four; a step is 32 / KEY_LANES keys, one for each side of the SIMD
// group, and a tile is STEPS steps, all of which are loaded before they are used. So each lane has the parts of STEPS *
// ROWS scores. They are summed by halving: a lane hands over one half of its parts and keeps the other, so that 31 shuffles give 32
// scores, and each lane ends with SCORES of them, all of one row, whose exponentials no other lane computes (where rows are few, several
// lanes compute the same). A score's weight goes back to the lanes of D by one more shuffle.
#pragma once
#include "attention.h"

#define POWER_ABOVE(n) ((n) <= 1 ? 1 : (n) <= 2 ? 2 : (n) <= 4 ? 4 : (n) <= 8 ? 8 : (n) <= 16 ? 16 : 32)

constant constexpr int MOST_ROWS = D <= 128 ? 8 : D <= 256 ? 4 : 2;  // wide heads leave few registers
constant constexpr int PARTS = (G + MOST_ROWS - 1) / MOST_ROWS;      // of a KV head's query heads
constant constexpr int ROWS = (G + PARTS - 1) / PARTS;               // query heads of a part
constant constexpr int PADDED_ROWS = POWER_ABOVE(ROWS);
constant constexpr int PIECES = D / 4;                                             // of four numbers
constant constexpr int HALVES = CACHE_TYPE == KV_INT4 && ROWS <= 4 ? 2 : 1;        // pieces of a lane that are in the same bytes
constant constexpr int OWN_PIECES = PIECES / HALVES;                               // that lanes have alternately
constant constexpr int KEY_LANES = OWN_PIECES <= 8 ? 8 : POWER_ABOVE(OWN_PIECES);  // of a key
constant constexpr int EACH = (OWN_PIECES + KEY_LANES - 1) / KEY_LANES * HALVES;   // pieces of a lane
constant constexpr int SIDES = 32 / KEY_LANES;                                     // keys at the same time
constant constexpr int MAX_STEPS = EACH > 2 && !PACKED_CACHE ? 4 / PADDED_ROWS : EACH > 1 ? 4 : 8;  // a packed load serves four
constant constexpr int STEPS = 32 / PADDED_ROWS < MAX_STEPS ? 32 / PADDED_ROWS : MAX_STEPS;
constant constexpr int KEYS = STEPS * SIDES;                                       // of a tile, at most 32
constant constexpr int PARTIALS = STEPS * PADDED_ROWS;                             // a lane's parts of scores: at most 32
constant constexpr int HALF = PARTIALS / 2;                                        // at least 2
constant constexpr int SCORES = PARTIALS <= KEY_LANES ? 1 : PARTIALS / KEY_LANES;  // a lane's scores
constant constexpr int SHARE = KEY_LANES / PADDED_ROWS;                            // lanes of a side that share a row's scores
constant constexpr int DUPLICATES = SHARE <= STEPS ? 1 : SHARE / STEPS;            // lanes that hold the same score
constant constexpr int THREADS = 32 * SIMDS;

// The state of a SIMD group: weighted values of all rows, a lane has its pieces and its side; maximum and sum of the lane's own row, the
// sum only of the lane's own scores.
struct Sums {
  float4 o[ROWS][EACH];
  float max_score, sum;
};
INLINE void clear(thread Sums &sums) {
  sums.max_score = NO_SCORE, sums.sum = 0.0f;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int e = 0; e < EACH; e++) sums.o[r][e] = float4(0.0f);
}

// A lane's position: its side, its number on it, and its row.
struct Lane {
  int number, side, along, row;
};
INLINE Lane lane_of(uint number) {
  Lane lane;
  lane.number = (int)number, lane.side = lane.number / KEY_LANES, lane.along = lane.number % KEY_LANES, lane.row = lane.along / SHARE;
  return lane;
}
// The step of a tile that the lane's score j belongs to.
INLINE int step_of(thread const Lane &lane, int j) {
  return DUPLICATES > 1 ? lane.along % SHARE / DUPLICATES : lane.along % SHARE * SCORES + j;
}
// The lane of its side that has the score of a row and step; it is that lane's score step % SCORES.
INLINE int holder_of(int row, int step) { return row * SHARE + (DUPLICATES > 1 ? step * DUPLICATES : step / SCORES); }

// Piece `each` of a lane. Lanes after the last piece read the last one, and multiply it by zero.
INLINE int piece_of(thread const Lane &lane, int each) {
  return min(lane.along + each / HALVES * KEY_LANES, OWN_PIECES - 1) + each % HALVES * OWN_PIECES;
}
INLINE bool has_piece(thread const Lane &lane, int each) { return lane.along + each / HALVES * KEY_LANES < OWN_PIECES; }

#if PACKED_CACHE
#include "packed_pieces.h"
#else
#include "float_pieces.h"
#endif

constant constexpr int GROUPS = STEPS / GROUP;                     // of steps in a tile
constant constexpr int TILE = KEYS / GROUP * ROW_UNITS;            // units
constant constexpr int UNIT_REGISTERS = sizeof(cache_unit) / 4;    // of a unit
constant constexpr int HALF_GROUPS = GROUPS > 1 ? GROUPS / 2 : 1;  // of half a tile

// --- loads

INLINE void load_queries(thread float4 (&queries)[PADDED_ROWS][EACH], device const float *q, thread const Lane &lane, int heads) {
#pragma unroll
  for (int r = 0; r < PADDED_ROWS; r++)
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const bool exists = r < heads && has_piece(lane, e);
      queries[r][e] = exists ? ((device const float4 *)(q + r * D))[piece_of(lane, e)] * SCALE_2 : float4(0.0f);
    }
}

// The place of key start + i for lane i; of some visible key where that one is not seen.
INLINE KeyPlace place_in_tile(device const int *table, int head, int start, thread const Lane &lane, int first, int end) {
  return key_place(table, head, clamp(start + lane.number, first, end - 1));
}

// --- scores

// This lane's part of a score.
INLINE float partial_score(thread const float4 (&query)[EACH], thread const cache_unit (&keys)[LOADS], int step, thread const Lane &lane) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const float4 q = query[e], k = key_at(keys, step, e, lane);
    sum = fma(q.w, k.w, fma(q.z, k.z, fma(q.y, k.y, fma(q.x, k.x, sum))));
  }
  return sum;
}

// The half of two parts that the lane keeps, plus the other lane's part of it.
INLINE float exchange_halves(float low, float high, bool upper, int apart) {
  return (upper ? high : low) + simd_shuffle_xor(upper ? low : high, (ushort)apart);
}

// Parts of a step's scores, already halved once. Part i is of row i / STEPS and step i % STEPS, and is paired with part i + HALF: of
// another row, or, where there is one row, of another step.
INLINE void add_partial_scores(thread float (&parts)[HALF], thread const float4 (&queries)[PADDED_ROWS][EACH],
                               thread const cache_unit (&keys)[LOADS], int step, thread const Lane &lane) {
  const bool upper = lane.along & KEY_LANES / 2;
  if (PADDED_ROWS == 1) {
    const float part = partial_score(queries[0], keys, step, lane);
    parts[step % HALF] = step < HALF ? part : exchange_halves(parts[step % HALF], part, upper, KEY_LANES / 2);
    return;
  }
#pragma unroll
  for (int r = 0; r < PADDED_ROWS / 2; r++)
    parts[r * STEPS + step] = exchange_halves(partial_score(queries[r], keys, step, lane),
                                              partial_score(queries[r + PADDED_ROWS / 2], keys, step, lane), upper, KEY_LANES / 2);
}

INLINE void reduce_scores(thread float (&scores)[SCORES], thread float (&parts)[HALF], thread const Lane &lane) {
  int remaining = HALF;
#pragma unroll
  for (int apart = KEY_LANES / 4; apart >= 1; apart /= 2) {
    if (remaining > 1) {
      remaining /= 2;
#pragma unroll
      for (int i = 0; i < remaining; i++) parts[i] = exchange_halves(parts[i], parts[i + remaining], lane.along & apart, apart);
    } else {
      parts[0] += simd_shuffle_xor(parts[0], (ushort)apart);
    }
  }
#pragma unroll
  for (int j = 0; j < SCORES; j++) scores[j] = parts[j];
}

// --- softmax and values

// The maximum over the lanes that share a row.
INLINE float row_max(float x) {
#pragma unroll
  for (int apart = SHARE / 2; apart >= 1; apart /= 2) x = max(x, simd_shuffle_xor(x, (ushort)apart));
#pragma unroll
  for (int apart = KEY_LANES; apart < 32; apart *= 2) x = max(x, simd_shuffle_xor(x, (ushort)apart));
  return x;
}

// Turns scores into weights under the row's new maximum, times the scales of their values, hidden ones into 0, and rescales the sums.
INLINE void update_softmax(thread float (&scores)[SCORES], thread Sums &sums, thread const Scales &scales, thread const Lane &lane,
                           int start, int first, int end) {
  float tile_max = NO_SCORE;
  bool visible[SCORES];
  float value_scales[SCORES];
#pragma unroll
  for (int j = 0; j < SCORES; j++) {
    const int own = key_in_tile(step_of(lane, j), lane.side), key = start + own;
    const float2 factors = scales_of(scales, own);
    visible[j] = key >= first && key < end;
    scores[j] = capped(scores[j] * factors.x), value_scales[j] = factors.y;
    tile_max = max(tile_max, visible[j] ? scores[j] : NO_SCORE);
  }
  const float max_score = max(sums.max_score, row_max(tile_max)), rescale = rescale_of(sums.max_score, max_score);
  sums.sum *= rescale;
#pragma unroll
  for (int j = 0; j < SCORES; j++) {
    const float weight = visible[j] ? fast_exp2(scores[j] - max_score) : 0.0f;
    sums.sum += weight;
    scores[j] = weight * value_scales[j];  // that of some visible key where this one is hidden
  }
  const bool rises = simd_any(max_score != sums.max_score);
  sums.max_score = max_score;
  if (!rises) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float by = simd_shuffle(rescale, (ushort)(r * SHARE));
#pragma unroll
    for (int e = 0; e < EACH; e++) sums.o[r][e] *= by;
  }
}

INLINE void add_values(thread Sums &sums, thread const float (&weights)[SCORES], thread const cache_unit (&values)[LOADS], int step,
                       thread const Lane &lane) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float weight = simd_shuffle(weights[step % SCORES], (ushort)(lane.side * KEY_LANES + holder_of(r, step)));
#pragma unroll
    for (int e = 0; e < EACH; e++) sums.o[r][e] = fma(float4(weight), value_at(values, step, e, lane), sums.o[r][e]);
  }
}

// --- all tiles of a stripe

// A stripe's first tile from `tile` on.
INLINE int first_tile(int stripe, int tile) { return tile + (stripe + SIMDS - tile % SIMDS) % SIMDS; }

// All tiles of keys first to end - 1 that are in a stripe. Keys and values of a tile are in flight together.
INLINE void attend(thread Sums &sums, thread const float4 (&queries)[PADDED_ROWS][EACH], device const cache_unit *cache,
                   device const int *table, int head, int first, int end, int stripe, thread const Lane &lane) {
  const int tile = first_tile(stripe, first / KEYS);
  if (tile * KEYS >= end) return;
  KeyPlace place = place_in_tile(table, head, tile * KEYS, lane, first, end);
  for (int start = tile * KEYS; start < end; start += SIMDS * KEYS) {
    cache_unit keys[GROUPS][LOADS], values[GROUPS][LOADS];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) load_keys(keys[group], cache, place, group, lane);
    const Scales scales = load_scales(cache, place, head, lane);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) load_values(values[group], cache, place, group, lane);
    place = place_in_tile(table, head, start + SIMDS * KEYS, lane, first, end);
    float parts[HALF], scores[SCORES];
#pragma unroll
    for (int step = 0; step < STEPS; step++) add_partial_scores(parts, queries, keys[step / GROUP], step, lane);
    reduce_scores(scores, parts, lane);
    update_softmax(scores, sums, scales, lane, start, first, end);
#pragma unroll
    for (int step = 0; step < STEPS; step++) add_values(sums, scores, values[step / GROUP], step, lane);
  }
}

// As attend, with half a tile's keys or values at a time: a unit of several sequences has no registers for more.
INLINE void attend_in_halves(thread Sums &sums, thread const float4 (&queries)[PADDED_ROWS][EACH], device const cache_unit *cache,
                             device const int *table, int head, int first, int end, int stripe, thread const Lane &lane) {
  for (int start = first_tile(stripe, first / KEYS) * KEYS; start < end; start += SIMDS * KEYS) {
    const KeyPlace place = place_in_tile(table, head, start, lane, first, end);
    const Scales scales = load_scales(cache, place, head, lane);
    float parts[HALF], scores[SCORES];
    cache_unit units[HALF_GROUPS][LOADS];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int group = step / GROUP;
      if (step % (HALF_GROUPS * GROUP) == 0)
#pragma unroll
        for (int i = 0; i < HALF_GROUPS; i++) load_keys(units[i], cache, place, group + i, lane);
      add_partial_scores(parts, queries, units[group % HALF_GROUPS], step, lane);
    }
    reduce_scores(scores, parts, lane);
    update_softmax(scores, sums, scales, lane, start, first, end);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int group = step / GROUP;
      if (step % (HALF_GROUPS * GROUP) == 0)
#pragma unroll
        for (int i = 0; i < HALF_GROUPS; i++) load_values(units[i], cache, place, group + i, lane);
      add_values(sums, scores, units[group % HALF_GROUPS], step, lane);
    }
  }
}

// Sums over the sides; and the sum of weights over the lanes that share a row and hold different scores.
INLINE void sum_sides(thread Sums &sums) {
#pragma unroll
  for (int apart = SHARE / 2; apart >= DUPLICATES; apart /= 2) sums.sum += simd_shuffle_xor(sums.sum, (ushort)apart);
#pragma unroll
  for (int apart = 16; apart >= KEY_LANES; apart /= 2) {
    sums.sum += simd_shuffle_xor(sums.sum, (ushort)apart);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums.o[r][e][i] += simd_shuffle_xor(sums.o[r][e][i], (ushort)apart);
  }
}
