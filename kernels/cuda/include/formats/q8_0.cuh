// Q8_0 of GGUF: blocks of 32 of {half scale; int8 q[32]}.
//
// Tiles [O/16][I/32][32 lanes][16] int8: W[g][4t..4t+3], W[g+8][the same], W[g][4t+16..4t+19], W[g+8][the same]; then block_scales.cuh.
#pragma once
#define QUANTIZED 1

constexpr int STEP_BYTES = 512, LANE_BYTES = 16, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 8;  // 4 KiB a warp. Sixteen left the dots too few registers (spills).
typedef BlockScales Scales;
constexpr bool SUMS = false;

typedef uint4 LaneWords;
DEVICE LaneWords load_words(const u8 *lane_bytes) { return load_once((const uint4 *)lane_bytes); }
DEVICE LaneWords shared_words(const u8 *lane_bytes) { return *(const uint4 *)lane_bytes; }
DEVICE void quants_of(u32 (&a)[4], const LaneWords &w) { a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w; }

DEVICE float4 floats_of(float scale, u32 word) { return scaled(scale, (s8)word, (s8)(word >> 8), (s8)(word >> 16), (s8)(word >> 24)); }
DEVICE float4 read_row(const u8 *table, int width, int row, int column) {
  const u16 *block = (const u16 *)table + ((s64)row * (width / 32) + column / 32) * 17;
  return floats_of(f16_to_float(block[0]), word_at(block + 1 + column % 32 / 2));
}
DEVICE float4 read_tile(const u8 *table, int rows, int width, int row, int column) {
  const s64 step = (s64)(row / 16) * (width / 32) + column / 32, steps = (s64)((rows + 15) / 16) * (width / 32);
  const u32 *words = (const u32 *)(table + step * STEP_BYTES + (row % 8 * 4 + column % 16 / 4) * LANE_BYTES);
  return floats_of(tile_scale(table + steps * STEP_BYTES, width, row, column), words[column % 32 / 16 * 2 + row % 16 / 8]);
}
