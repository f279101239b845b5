// One half-precision scale for each row and block of 32 columns: the scales of Q8_0 and Q4_0.
//
// After all quants of a matrix: [O/16][I/32][8 g][2] half, of rows g and g + 8.
#pragma once
#include "formats.cuh"

struct BlockScales {
  u32 pair;  // half: of rows g and g + 8
};
DEVICE void load_scales(BlockScales &scales, const u8 *lane_bytes) { scales.pair = load_once((const u32 *)lane_bytes); }
DEVICE BlockScales scales_of_lane(BlockScales scales, int lane) { return {__shfl_sync(ALL_LANES, scales.pair, lane)}; }

DEVICE float2 unpack_scales(BlockScales scales) { return unpack_f16(scales.pair); }

// c += dots * scales. `w`: unpacked scales. `x_scale`: of tokens 2t and 2t + 1. `x_sum`: of their 32 quants, for formats with minimums.
DEVICE void add_dots(float (&c)[4], const float (&dot)[4], float2 w, float2 x_scale, int2 x_sum) {
  c[0] = fmaf(dot[0], w.x * x_scale.x, c[0]);
  c[1] = fmaf(dot[1], w.x * x_scale.y, c[1]);
  c[2] = fmaf(dot[2], w.y * x_scale.x, c[2]);
  c[3] = fmaf(dot[3], w.y * x_scale.y, c[3]);
}

// The scale of a row's block in tiles; `scales`: where those of the matrix start.
DEVICE float tile_scale(const u8 *scales, int width, int row, int column) {
  const s64 block = (s64)(row / 16) * (width / 32) + column / 32;
  return f16_to_float(((const u16 *)scales)[block * 16 + row % 8 * 2 + row % 16 / 8]);
}
DEVICE float4 scaled(float scale, int a, int b, int c, int d) {
  return make_float4(scale * (float)a, scale * (float)b, scale * (float)c, scale * (float)d);
}
// Four bytes of a row's block in a file, which starts at an even address only.
DEVICE u32 word_at(const u16 *halves) { return halves[0] | (u32)halves[1] << 16; }
