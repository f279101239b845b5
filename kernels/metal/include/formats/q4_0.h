// Q4_0: blocks of 32 columns, 18 bytes: half scale, 16 bytes of which low nibbles are columns 0 .. 15 and high nibbles columns 16 .. 31;
// w = scale * (q - 8). weights.h says what a format header defines.
#define BLOCK 32
#define BLOCK_BYTES 18
#define PLANES 2
#define RUN 16

struct Raw {  // half the bytes of a block
  uint2 words;
  half scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  Raw raw;
  raw.words = words_at_2(block + 2 + lane % BLOCK_LANES * 8);
  raw.scale = *(device const half *)block;
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  return scaled_bits(raw.words[four], 4, 4 * plane, (float)raw.scale, 8.0f);
}

// --- operands of quants: four bytes of a block's sixteen

#define QUANTIZED 1
#define RUNS 1
#define HAS_MINIMUM 0
// High nibbles are of the same block as the low ones, so x's columns there are divided by 16, exactly.
#define X_FACTOR(second_half) ((second_half) ? 0.0625f : 1.0f)
#define START(second_half) ((second_half) ? -72.0f : -1032.0f)  // 1024 / 16 + 8, 1024 + 8: of x itself
typedef half operand_number;
typedef half2 operand_pair;

struct Slice {
  uint word;
  half scale;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  device const uchar *block = row + column / 32 * BLOCK_BYTES;
  Slice slice;
  slice.word = word_at_2(block + 2 + 4 * quarter), slice.scale = *(device const half *)block;
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int, int i) {
  return raised(i & 1 ? slice.word >> 8 : slice.word, i < 2 ? LOW_NIBBLES : HIGH_NIBBLES);
}
INLINE float scale_of(thread const Slice &slice, int) { return (float)slice.scale; }
INLINE float minimum_of(thread const Slice &, int) { return 0.0f; }
INLINE int column_place(int second_half, int four, int i) { return 16 * second_half + 2 * four + i / 2 + i % 2 * 8; }
