// Sixteen columns of a row of weights as float32, with the values of product.h: for products that rearrange weights in threadgroup memory.
#pragma once
#include "product.h"

#if !OWN_SIXTEEN
// Columns `column` to column + 15 of a row, column % 16 == 0: twice eight columns of a plane.
INLINE Sixteen sixteen_at(device const uchar *row, int column) {
  Sixteen w;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Place place = place_of(column + 8 * i);
    const Raw raw = load_raw(row, 0, place.lane);
    w.of[2 * i] = four_weights(raw, place.plane, 0), w.of[2 * i + 1] = four_weights(raw, place.plane, 1);
  }
  return w;
}
#endif
