// Q4_K: blocks of 256 columns, 144 bytes: half d, half dmin, 12 bytes of eight scales and eight minimums of 6 bits, 128 bytes of nibbles;
// low nibbles are of even runs of 32 columns, high nibbles of odd ones. w = d * scale * q - dmin * minimum. weights.h says what a format
// header defines.
#define BLOCK 256
#define BLOCK_BYTES 144
#define PLANES 2
#define RUN 32

struct Raw {
  uint2 words;
  RunPair runs;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const int at = lane % BLOCK_LANES;
  Raw raw;
  raw.words = words_at_4(block + 16 + at * 8);
  raw.runs = run_pair_of(uint4(*(device const packed_uint4 *)block), at / 4);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  return shifted_bits(raw.words[four], 4, 4 * plane, raw.runs.scale[plane], -raw.runs.minimum[plane]);
}

// Two runs of 32 columns share 32 bytes.
#define OWN_SIXTEEN 1
INLINE Sixteen sixteen_at(device const uchar *row, int column) {
  device const uchar *block = row + column / 256 * BLOCK_BYTES;
  const int run = column % 256 / 32, plane = run % 2;
  const RunPair runs = run_pair_of(uint4(*(device const packed_uint4 *)block), run / 2);
  const float scale = plane ? runs.scale[1] : runs.scale[0], minimum = plane ? runs.minimum[1] : runs.minimum[0];
  const uint4 words = uint4(*(device const packed_uint4 *)(block + 16 + run / 2 * 32 + column % 32));
  Sixteen w;
#pragma unroll
  for (int i = 0; i < 4; i++) w.of[i] = shifted_bits(words[i], 4, 4 * plane, scale, -minimum);
  return w;
}

// --- operands of quants: eight of the 32 bytes that two runs share

#define QUANTIZED 1
#define RUNS 2
#define HAS_MINIMUM 1
#define X_FACTOR(second_half) 1.0f
#define START(second_half) -RAISE
typedef half operand_number;
typedef half2 operand_pair;

struct Slice {
  Raw raw;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  Slice slice;
  slice.raw = load_raw(row, 0, column / 64 * 4 + quarter);
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int run, int i) {
  return raised(i & 1 ? slice.raw.words[i / 2] >> 8 : slice.raw.words[i / 2], run ? HIGH_NIBBLES : LOW_NIBBLES);
}
INLINE float scale_of(thread const Slice &slice, int run) { return run ? slice.raw.runs.scale[1] * 0.0625f : slice.raw.runs.scale[0]; }
INLINE float minimum_of(thread const Slice &slice, int run) { return slice.raw.runs.minimum[run]; }
INLINE int column_place(int second_half, int four, int i) { return four % 2 * 16 + 2 * (2 * second_half + four / 2) + i / 2 + i % 2 * 8; }
