// What LDTILECFG of AMX reads: the rows and the bytes of a row of each of eight tiles.
#pragma once
#include <stdint.h>

struct tile_shapes {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// A tile has both, or neither.
static inline void set_shape(struct tile_shapes *shapes, int tile, int rows, int bytes) {
  shapes->rows[tile] = (uint8_t)rows, shapes->bytes[tile] = (uint16_t)(rows == 0 ? 0 : bytes);
}
