// attention_prefill: a tile of keys and values of a cache of floats, in threadgroup memory. packed_tile.h is the other one.
#pragma once
#include "attention.h"

typedef cache_number tile_number;

// Numbers have no scale: the factors of scores and of weights are 1, which no compiler multiplies by.
struct TileScales {};
INLINE float key_scale(TileScales, int) { return 1.0f; }
INLINE float value_scale(TileScales, int) { return 1.0f; }

// Keys and values `start` to start + KEYS - 1, rows of PITCH numbers, of values one of HALVES of their columns; for those outside of first to
// end - 1 some that are inside.
template <int KEYS, int PITCH, int THREADS>
INLINE void load_tile(threadgroup tile_number *keys, threadgroup tile_number *values, TileScales, device const uint4 *cache,
                      device const int *table, int head, int half_index, int start, int first, int end, int thread_index) {
  constexpr int PIECES = D * (int)sizeof(tile_number) / 16;  // of 16 bytes in a row of the cache
  constexpr int OWN = PIECES / HALVES, VALUE_PITCH = PITCH - D + D / HALVES;
  for (int i = thread_index; i < KEYS * PIECES; i += THREADS) {
    const int row = i / PIECES, piece = i % PIECES, key = clamp(start + row, first, end - 1);
    device const uint4 *from = cache + (row_at(table[key / S], head, key) * PIECES + piece);
    ((threadgroup uint4 *)(keys + row * PITCH))[piece] = from[0];
    if (piece / OWN == half_index) ((threadgroup uint4 *)(values + row * VALUE_PITCH))[piece % OWN] = from[VALUES * PIECES];
  }
}
