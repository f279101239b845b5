// Q4_0 of GGUF: blocks of 32 of {half scale; uint8 q[16]}, each number plus 8; the low nibbles are numbers 0 to 15.
//
// Tiles [O/16][I/32][32 lanes][8] bytes: bytes 4t..4t+3 of row g's block in a file, then those of row g + 8. Low nibbles are columns
// 4t..4t+3, high nibbles columns 4t+16..4t+19. Then block_scales.cuh.
#pragma once
#define QUANTIZED 1

constexpr int STEP_BYTES = 256, LANE_BYTES = 8, ZERO_POINT = 8;
constexpr int STEPS_AHEAD = 16;  // 4 KiB a warp
typedef BlockScales Scales;
constexpr bool SUMS = true;

typedef uint2 LaneWords;
DEVICE LaneWords load_words(const u8 *lane_bytes) { return load_once((const uint2 *)lane_bytes); }
DEVICE LaneWords shared_words(const u8 *lane_bytes) { return *(const uint2 *)lane_bytes; }
DEVICE void quants_of(u32 (&a)[4], const LaneWords &w) {  // 0 to 15 are the same numbers with and without a sign
  const u32 low = 0x0F0F0F0Fu;
  a[0] = w.x & low, a[1] = w.y & low, a[2] = w.x >> 4 & low, a[3] = w.y >> 4 & low;
}

DEVICE float4 floats_of(float scale, u32 word, bool high) {
  if (high) word >>= 4;
  return scaled(scale, (int)(word & 15) - 8, (int)(word >> 8 & 15) - 8, (int)(word >> 16 & 15) - 8, (int)(word >> 24 & 15) - 8);
}
DEVICE float4 read_row(const u8 *table, int width, int row, int column) {
  const u16 *block = (const u16 *)table + ((s64)row * (width / 32) + column / 32) * 9;
  return floats_of(f16_to_float(block[0]), word_at(block + 1 + column % 16 / 2), column % 32 >= 16);
}
DEVICE float4 read_tile(const u8 *table, int rows, int width, int row, int column) {
  const s64 step = (s64)(row / 16) * (width / 32) + column / 32, steps = (s64)((rows + 15) / 16) * (width / 32);
  const u32 *words = (const u32 *)(table + step * STEP_BYTES + (row % 8 * 4 + column % 16 / 4) * LANE_BYTES);
  return floats_of(tile_scale(table + steps * STEP_BYTES, width, row, column), words[row % 16 / 8], column % 32 >= 16);
}
