// Q8_0: blocks of 32 columns, 34 bytes: half scale, 32 int8 quants; w = scale * q. weights.h says what a format header defines.
#define BLOCK 32
#define BLOCK_BYTES 34
#define PLANES 1
#define RUN 8

struct Raw {  // eight bytes of a block's 32, sign bits flipped: q + 128
  uint2 words;
  half scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  Raw raw;
  raw.words = words_at_2(block + 2 + lane % BLOCK_LANES * 8) ^ 0x80808080u;
  raw.scale = *(device const half *)block;
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int four) { return scaled_bytes(raw.words[four], (float)raw.scale, 128.0f); }

// --- operands of quants

#define QUANTIZED 1
#define RUNS 1
#define HAS_MINIMUM 0
#define X_FACTOR(second_half) 1.0f
#define START(second_half) -1152.0f  // 1024 + 128
typedef half operand_number;
typedef half2 operand_pair;

struct Slice {
  Raw raw;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  Slice slice;
  slice.raw = load_raw(row, 0, column / 8 + quarter);
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int, int i) {
  return raised(i & 1 ? slice.raw.words[i / 2] >> 8 : slice.raw.words[i / 2], BYTES);
}
INLINE float scale_of(thread const Slice &slice, int) { return (float)slice.raw.scale; }
INLINE float minimum_of(thread const Slice &, int) { return 0.0f; }
INLINE int column_place(int second_half, int four, int i) { return four % 2 * 16 + 2 * (2 * second_half + four / 2) + i / 2 + i % 2 * 8; }
