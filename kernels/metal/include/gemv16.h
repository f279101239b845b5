// Sixteen columns of a row of weights as float32, the values of product.h: for products that lay weights out anew.
#pragma once
#include "product.h"

struct Sixteen {
  float4 of[4];
};

// Columns `column` to column + 15 of a row, column % 16 == 0.
INLINE Sixteen sixteen_at(device const uchar *row, int column) {
  Sixteen w;
#if WEIGHT == Q4_0 // one half of each of a block's sixteen bytes
  device const uchar *block = row + column / 32 * 18;
  const float scale = (float)*(device const half *)block;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const ushort4 quants = ushort4(*(device const packed_ushort4 *)(block + 2 + 8 * i));
    w.of[2 * i] = four_nibbles(word_of(quants.x, quants.y), column % 32 != 0, scale);
    w.of[2 * i + 1] = four_nibbles(word_of(quants.z, quants.w), column % 32 != 0, scale);
  }
#elif WEIGHT == Q4_K // two runs of 32 share 32 bytes
  device const uchar *block = row + column / 256 * 144;
  const int run = column % 256 / 32;
  const bool high = run % 2 != 0;
  const Runs runs = runs_of(uint4(*(device const packed_uint4 *)block), run / 2);
  const float scale = high ? runs.scale[1] : runs.scale[0], least = high ? runs.least[1] : runs.least[0];
  const uint4 words = uint4(*(device const packed_uint4 *)(block + 16 + run / 2 * 32 + column % 32));
  w.of[0] = four_nibbles_above(words.x, high, scale, least), w.of[1] = four_nibbles_above(words.y, high, scale, least);
  w.of[2] = four_nibbles_above(words.z, high, scale, least), w.of[3] = four_nibbles_above(words.w, high, scale, least);
#else // two lanes' shares
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Raw raw = load_raw(row, 0, column / 8 + i);
    w.of[2 * i] = four_weights(raw, 0, 0), w.of[2 * i + 1] = four_weights(raw, 0, 1);
  }
#endif
  return w;
}
