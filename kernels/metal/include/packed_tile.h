// attention_prefill: a tile of keys and values of a packed cache, in threadgroup memory: quants as halves, which hold them exactly, and scales.
// float_tile.h is the other one.
#pragma once
#include "packed_read.h"

typedef half tile_number;
INLINE float to_float(half x) { return (float)x; }

// Of each key of the tile: its scale and its value's, bfloat16.
struct TileScales {
  threadgroup uint *of;
};
INLINE float key_scale(TileScales scales, int key) { return bf16_pair_to_float(scales.of[key]).x; }
INLINE float value_scale(TileScales scales, int key) { return bf16_pair_to_float(scales.of[key]).y; }

// Keys and values `start` to start + KEYS - 1, rows of PITCH numbers; for those outside of first to end - 1, which have some finite numbers,
// scales of some that are inside; of values one of HALVES of their columns. A thread takes a quad of each side.
template <int KEYS, int PITCH, int THREADS>
INLINE void load_tile(threadgroup tile_number *keys, threadgroup tile_number *values, TileScales scales, device const uint4 *cache,
                      device const int *table, int head, int half_index, int start, int first, int end, int thread_index) {
  constexpr int OWN = D / HALVES, VALUE_PITCH = PITCH - D + OWN;
  for (int i = thread_index; i < KEYS / 4 * WORDS; i += THREADS) {
    const int row = i / WORDS * 4, word = i % WORDS;
    const KeyPlace place = key_place(table, head, clamp(start + row, first, end - 1));
    const uint4 key_words = cache[key_quad(place) + (uint)word * KEY_STRIDE],
                value_words = cache[value_quad(place) + (uint)word * VALUE_STRIDE];
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int high = 0; high < NIBBLES; high++) {
        const int column = high * (D / 2) + word * 4;
        *(threadgroup half4 *)(keys + (row + k) * PITCH + column) = key_numbers(key_words, k, high);
        if (column / OWN == half_index)
          *(threadgroup half4 *)(values + (row + k) * VALUE_PITCH + column % OWN) = value_numbers(value_words, k, high);
      }
  }
  for (int i = thread_index; i < KEYS; i += THREADS)
    scales.of[i] = load_scale_pair(cache, key_place(table, head, clamp(start + i, first, end - 1)), head);
}
