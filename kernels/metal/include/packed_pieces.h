// attention_decode: how a lane loads keys and values of a packed cache. float_pieces.h is the other one; decode_tile.h includes one of them.
//
// A unit is a quad (packed_read.h): four keys' numbers of one piece, or in KV_INT4 of two pieces. So a lane has four steps of a load: the
// steps of four keys next to each other. In KV_INT4 a lane has both pieces of a quad (HALVES 2), next to each other in its order; where a part has more than four heads,
// there are no registers for that, and two lanes read the same quad, each for one piece.
#pragma once
#include "packed_read.h"

constant constexpr int GROUP = 4;              // steps that a load serves
constant constexpr int LOADS = EACH / HALVES;  // units of a lane
constant constexpr int ROW_UNITS = WORDS;      // units of GROUP keys
constant constexpr int PIECE_REGISTERS = 2;    // fewer are loaded; a packed cache may have those of a cache of 16-bit numbers
typedef uint4 cache_unit;

// The key of a tile that a side has in a step.
INLINE int key_in_tile(int step, int side) { return (step / GROUP * SIDES + side) * GROUP + step % GROUP; }
INLINE int key_of_unit(int unit) { return unit / ROW_UNITS * GROUP; }  // the first one

INLINE uint key_unit(KeyPlace place, int unit) { return key_quad(place) + (uint)unit * KEY_STRIDE; }
INLINE uint value_unit(KeyPlace place, int unit) { return value_quad(place) + (uint)unit * VALUE_STRIDE; }

// The word of a lane's load, and which nibbles of its bytes are piece `each`.
INLINE int word_of(thread const Lane &lane, int load) { return piece_of(lane, load * HALVES) % WORDS; }
INLINE int high_of(thread const Lane &lane, int each) { return HALVES == 2 ? each % 2 : piece_of(lane, each) / WORDS; }

// This lane's units of a group of steps, from the cache (lane i has the place of the tile's key i), or from a tile in threadgroup memory.
INLINE void load_keys(thread cache_unit (&units)[LOADS], device const cache_unit *cache, KeyPlace place, int group,
                      thread const Lane &lane) {
  device const cache_unit *row = cache + simd_shuffle(key_quad(place), (ushort)key_in_tile(group * GROUP, lane.side));
#pragma unroll
  for (int i = 0; i < LOADS; i++) units[i] = row[(uint)word_of(lane, i) * KEY_STRIDE];
}
INLINE void load_values(thread cache_unit (&units)[LOADS], device const cache_unit *cache, KeyPlace place, int group,
                        thread const Lane &lane) {
  device const cache_unit *row = cache + simd_shuffle(value_quad(place), (ushort)key_in_tile(group * GROUP, lane.side));
#pragma unroll
  for (int i = 0; i < LOADS; i++) units[i] = row[(uint)word_of(lane, i) * VALUE_STRIDE];
}
INLINE void load_from_tile(thread cache_unit (&units)[LOADS], threadgroup const cache_unit *tile, int group, thread const Lane &lane) {
#pragma unroll
  for (int i = 0; i < LOADS; i++) units[i] = tile[(group * SIDES + lane.side) * ROW_UNITS + word_of(lane, i)];
}

// Piece `each` of the lane's key, or value, in a step.
INLINE float4 key_at(thread const cache_unit (&units)[LOADS], int step, int each, thread const Lane &lane) {
  return float4(key_numbers(units[each / HALVES], step, high_of(lane, each)));
}
INLINE float4 value_at(thread const cache_unit (&units)[LOADS], int step, int each, thread const Lane &lane) {
  return float4(value_numbers(units[each / HALVES], step, high_of(lane, each)));
}

// Lane i has the scales of the tile's key i.
struct Scales {
  uint both;
};
INLINE Scales load_scales(device const cache_unit *cache, KeyPlace place, int head, thread const Lane &lane) {
  Scales scales;
  scales.both = lane.number < KEYS ? load_scale_pair(cache, place, head) : 0;
  return scales;
}
// The factors of a key's scores and of its value's weights.
INLINE float2 scales_of(thread const Scales &scales, int key) { return bf16_pair_to_float(simd_shuffle(scales.both, (ushort)key)); }
