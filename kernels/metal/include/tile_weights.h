// Sixteen columns of a row of weights as float32, with the values of product.h: for products that rearrange weights in threadgroup memory.
#pragma once
#include "product.h"

#if LANE_SHARES_IN_ORDER
// Columns `column` to column + 15 of a row, column % 16 == 0: the shares of two lanes.
INLINE Sixteen sixteen_at(device const uchar *row, int column) {
  Sixteen w;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Raw raw = load_raw(row, 0, column / 8 + i);
    w.of[2 * i] = four_weights(raw, 0, 0), w.of[2 * i + 1] = four_weights(raw, 0, 1);
  }
  return w;
}
#endif
