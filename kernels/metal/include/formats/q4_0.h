// Q4_0: blocks of 32 columns, 18 bytes: half scale, 16 bytes of which low nibbles are columns 0 .. 15 and high nibbles columns 16 .. 31;
// w = scale * (q - 8). weights.h says what a format header defines.
#define ROW_BYTES ((I) / Q4_0_BLOCK * Q4_0_BLOCK_BYTES)
#define COLUMNS_DIVISOR 32
#define STEP 512
#define SUBS 2
#define LANE_SHARES_IN_ORDER 0
#define QUANTIZED 1
#define RUNS 1
#define HAS_MINIMUM 0
// High nibbles are of the same block as the low ones, so x's columns there are divided by 16, exactly.
#define X_FACTOR(second_half) ((second_half) ? 0.0625f : 1.0f)
#define START(second_half) ((second_half) ? -72.0f : -1032.0f)  // 1024 / 16 + 8, 1024 + 8: of x itself
typedef half operand_number;
typedef half2 operand_pair;

INLINE float4 four_values(device const uchar *row, uint column) {
  device const uchar *block = row + column / 32 * Q4_0_BLOCK_BYTES;
  const float scale = float(*(device const half *)block);
  device const ushort *pairs = (device const ushort *)(block + 2 + column % 16);
  const uint4 bytes = uint4(pairs[0], pairs[0] >> 8, pairs[1], pairs[1] >> 8) >> (column % 32 / 16 * 4);
  return scale * (float4(bytes & 15u) - 8.0f);
}

// (q - 8) * scale of the low or high nibbles of a word: fma(1024 + q, scale, -1032 scale), fma(1024 + 16 q, scale / 16, -72 scale).
INLINE float4 four_nibbles(uint word, bool high, float scale) {
  const half4 q = four_raised(word, high ? HIGH_NIBBLES : LOW_NIBBLES);
  return fma(float4(q), float4(high ? scale * 0.0625f : scale), float4(scale * (high ? -72.0f : -1032.0f)));
}

struct Raw {  // half the bytes of a block; four of them in each round, low nibbles first
  uint words[2];
  half scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = row + (step * 16 + lane / 2) * Q4_0_BLOCK_BYTES;
  const ushort4 quants = ushort4(*(device const packed_ushort4 *)(block + 2 + lane % 2 * 8));
  Raw raw;
  raw.words[0] = word_of(quants.x, quants.y), raw.words[1] = word_of(quants.z, quants.w);
  raw.scale = *(device const half *)block;
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int sub, int second) { return four_nibbles(raw.words[sub], second, (float)raw.scale); }
INLINE int column_of(int lane, int sub, int second) { return lane / 2 * 32 + lane % 2 * 8 + sub * 4 + second * 16; }

// One half of each of a block's sixteen bytes.
INLINE Sixteen sixteen_at(device const uchar *row, int column) {
  device const uchar *block = row + column / 32 * Q4_0_BLOCK_BYTES;
  const float scale = (float)*(device const half *)block;
  Sixteen w;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const ushort4 quants = ushort4(*(device const packed_ushort4 *)(block + 2 + 8 * i));
    w.of[2 * i] = four_nibbles(word_of(quants.x, quants.y), column % 32 != 0, scale);
    w.of[2 * i + 1] = four_nibbles(word_of(quants.z, quants.w), column % 32 != 0, scale);
  }
  return w;
}

struct Slice {  // four bytes of a block's sixteen
  uint word;
  half scale;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  device const uchar *block = row + column / 32 * Q4_0_BLOCK_BYTES;
  const ushort2 quants = ushort2(*(device const packed_ushort2 *)(block + 2 + 4 * quarter));
  Slice slice;
  slice.word = word_of(quants.x, quants.y), slice.scale = *(device const half *)block;
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int, int i) {
  return raised(i & 1 ? slice.word >> 8 : slice.word, i < 2 ? LOW_NIBBLES : HIGH_NIBBLES);
}
INLINE float scale_of(thread const Slice &slice, int) { return (float)slice.scale; }
INLINE float minimum_of(thread const Slice &, int) { return 0.0f; }
INLINE int column_place(int second_half, int four, int i) { return 16 * second_half + 2 * four + i / 2 + i % 2 * 8; }
