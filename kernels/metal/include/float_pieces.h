// attention_decode: how a lane loads keys and values of a cache of floats. packed_pieces.h is the other one; decode_tile.h includes one of them.
//
// A unit is what is loaded at a time: a piece of four numbers of one key. A lane has LOADS units of a step.
#pragma once

constant constexpr int GROUP = 1;           // steps that a load serves
constant constexpr int LOADS = EACH;        // units of a lane
constant constexpr int ROW_UNITS = PIECES;  // units of GROUP keys
constant constexpr int PIECE_REGISTERS = sizeof(cache_number4) / 4;
typedef cache_number4 cache_unit;

// The key of a tile that a side has in a step.
INLINE int key_in_tile(int step, int side) { return step * SIDES + side; }
INLINE int key_of_unit(int unit) { return unit / ROW_UNITS; }  // the first one

// A key of a KV head: its first piece in the cache.
struct KeyPlace {
  uint at;
};
INLINE KeyPlace key_place(device const int *table, int head, int key) {
  KeyPlace place;
  place.at = row_at(table[key / S], head, key) * PIECES;
  return place;
}
INLINE uint key_unit(KeyPlace place, int unit) { return place.at + (uint)unit; }
INLINE uint value_unit(KeyPlace place, int unit) { return place.at + VALUES * PIECES + (uint)unit; }

// This lane's units of a group of steps, from the cache (lane i has the place of the tile's key i), or from a tile in threadgroup memory.
INLINE void load_units(thread cache_unit (&units)[LOADS], device const cache_unit *row, thread const Lane &lane) {
#pragma unroll
  for (int e = 0; e < LOADS; e++) units[e] = row[piece_of(lane, e)];
}
INLINE void load_keys(thread cache_unit (&units)[LOADS], device const cache_unit *cache, KeyPlace place, int group,
                      thread const Lane &lane) {
  load_units(units, cache + simd_shuffle(place.at, (ushort)key_in_tile(group, lane.side)), lane);
}
INLINE void load_values(thread cache_unit (&units)[LOADS], device const cache_unit *cache, KeyPlace place, int group,
                        thread const Lane &lane) {
  load_units(units, cache + VALUES * PIECES + simd_shuffle(place.at, (ushort)key_in_tile(group, lane.side)), lane);
}
INLINE void load_from_tile(thread cache_unit (&units)[LOADS], threadgroup const cache_unit *tile, int group, thread const Lane &lane) {
#pragma unroll
  for (int e = 0; e < LOADS; e++) units[e] = tile[key_in_tile(group, lane.side) * ROW_UNITS + piece_of(lane, e)];
}

INLINE float4 key_at(thread const cache_unit (&units)[LOADS], int, int each, thread const Lane &) { return to_float4(units[each]); }
INLINE float4 value_at(thread const cache_unit (&units)[LOADS], int, int each, thread const Lane &) { return to_float4(units[each]); }

// Numbers have no scale: the factors of scores and of weights are 1, which no compiler multiplies by.
struct Scales {};
INLINE Scales load_scales(device const cache_unit *, KeyPlace, int, thread const Lane &) { return Scales(); }
INLINE float2 scales_of(thread const Scales &, int) { return float2(1.0f); }
