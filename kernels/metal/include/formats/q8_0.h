// Q8_0: blocks of 32 columns, 34 bytes: half scale, 32 int8 quants; w = scale * q. weights.h says what a format header defines.
#define ROW_BYTES ((I) / Q8_0_BLOCK * Q8_0_BLOCK_BYTES)
#define COLUMNS_DIVISOR 32
#define STEP 256
#define SUBS 1
#define LANE_SHARES_IN_ORDER 1
#define QUANTIZED 1
#define RUNS 1
#define HAS_MINIMUM 0
#define X_FACTOR(second_half) 1.0f
#define START(second_half) -1152.0f  // 1024 + 128
typedef half operand_number;
typedef half2 operand_pair;

INLINE float4 four_values(device const uchar *row, uint column) {
  device const uchar *block = row + column / 32 * Q8_0_BLOCK_BYTES;
  const float scale = float(*(device const half *)block);
  device const ushort *pairs = (device const ushort *)(block + 2 + column % 32);
  return scale * float4(char4(as_type<char2>(pairs[0]), as_type<char2>(pairs[1])));
}

struct Raw {  // a quarter of a block: eight columns
  uint words[2];
  half scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = row + (step * 8 + lane / 4) * Q8_0_BLOCK_BYTES;
  const ushort4 quants = ushort4(*(device const packed_ushort4 *)(block + 2 + lane % 4 * 8));
  Raw raw;
  raw.words[0] = word_of(quants.x, quants.y), raw.words[1] = word_of(quants.z, quants.w);
  raw.scale = *(device const half *)block;
  return raw;
}
// With its sign bit flipped, a byte is q + 128: fma(1152 + q, scale, -1152 scale).
INLINE float4 four_weights(thread const Raw &raw, int, int second) {
  const float scale = (float)raw.scale;
  return fma(float4(four_raised(raw.words[second] ^ 0x80808080u, BYTES)), float4(scale), float4(scale * -1152.0f));
}
INLINE int column_of(int lane, int, int second) { return lane * 8 + second * 4; }

struct Slice {  // eight bytes of a block's 32, sign bits flipped: q + 128
  uint words[2];
  half scale;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  const Raw raw = load_raw(row, 0, column / 8 + quarter);
  Slice slice;
  slice.words[0] = raw.words[0] ^ 0x80808080u, slice.words[1] = raw.words[1] ^ 0x80808080u, slice.scale = raw.scale;
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int, int i) {
  return raised(i & 1 ? slice.words[i / 2] >> 8 : slice.words[i / 2], BYTES);
}
INLINE float scale_of(thread const Slice &slice, int) { return (float)slice.scale; }
INLINE float minimum_of(thread const Slice &, int) { return 0.0f; }
INLINE int column_place(int second_half, int four, int i) { return four % 2 * 16 + 2 * (2 * second_half + four / 2) + i / 2 + i % 2 * 8; }
