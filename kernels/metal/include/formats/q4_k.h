// Q4_K: blocks of 256 columns, 144 bytes: half d, half dmin, 12 bytes of eight scales and eight minimums of 6 bits, 128 bytes of nibbles;
// low nibbles are of even runs of 32 columns, high nibbles of odd ones. w = d * scale * q - dmin * minimum. weights.h says what a format
// header defines.
#define ROW_BYTES ((I) / Q4_K_BLOCK * Q4_K_BLOCK_BYTES)
#define COLUMNS_DIVISOR 256
#define STEP 512
#define SUBS 2
#define LANE_SHARES_IN_ORDER 0
#define QUANTIZED 1
#define RUNS 2
#define HAS_MINIMUM 1
#define X_FACTOR(second_half) 1.0f
#define START(second_half) -RAISE
typedef half operand_number;
typedef half2 operand_pair;

INLINE float4 four_values(device const uchar *row, uint column) {
  device const uchar *block = row + column / 256 * Q4_K_BLOCK_BYTES, *packed = block + 4;
  const float2 steps = float2(*(device const half2 *)block);
  const uint run = column % 256 / 32, at = run % 4, low = packed[at], middle = packed[at + 4], high = packed[at + 8];
  const uint scale = run < 4 ? low & 63 : (high & 15) | (low >> 6) << 4;
  const uint minimum = run < 4 ? middle & 63 : (high >> 4) | (middle >> 6) << 4;
  const uint word = *(device const uint *)(block + 16 + run / 2 * 32 + column % 32);
  const uint4 bytes = (uint4(word) >> uint4(0, 8, 16, 24)) >> (run % 2 * 4);
  return steps.x * float(scale) * float4(bytes & 15u) - steps.y * float(minimum);
}

// q * scale - minimum of the low or high nibbles of a word.
INLINE float4 four_nibbles_less(uint word, bool high, float scale, float minimum) {
  const half4 q = four_raised(word, high ? HIGH_NIBBLES : LOW_NIBBLES) - half4(1024.0h);
  return fma(float4(q), float4(high ? scale * 0.0625f : scale), float4(-minimum));
}

struct RunPair {  // scales and minimums of two runs of 32 columns
  float scale[2], minimum[2];
};
// Runs 2 g and 2 g + 1 of a block: its first 16 bytes are d, dmin and eight pairs of 6 bits.
INLINE RunPair run_pair_of(uint4 head, int g) {
  const int down = 16 * (g & 1);
  const uint first = head.y >> down, second = head.z >> down, rest = head.w >> down;
  const uint scales = g < 2 ? first & 0x3F3Fu : (rest & 0x0F0Fu) | (first & 0xC0C0u) >> 2;
  const uint minimums = g < 2 ? second & 0x3F3Fu : (rest >> 4 & 0x0F0Fu) | (second & 0xC0C0u) >> 2;
  const float2 d = f16_pair_to_float(head.x);
  RunPair runs;
  runs.scale[0] = d.x * (float)(scales & 0xFFu), runs.scale[1] = d.x * (float)(scales >> 8 & 0xFFu);
  runs.minimum[0] = d.y * (float)(minimums & 0xFFu), runs.minimum[1] = d.y * (float)(minimums >> 8 & 0xFFu);
  return runs;
}

struct Raw {  // eight bytes of a block's 128: low nibbles are one round's, high nibbles the next round's, 32 columns apart
  uint words[2];
  RunPair runs;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = row + (step * 2 + lane / 16) * Q4_K_BLOCK_BYTES;
  const uint2 words = uint2(*(device const packed_uint2 *)(block + 16 + lane % 16 * 8));
  Raw raw;
  raw.words[0] = words.x, raw.words[1] = words.y;
  raw.runs = run_pair_of(uint4(*(device const packed_uint4 *)block), lane % 16 / 4);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int sub, int second) {
  return four_nibbles_less(raw.words[second], sub, raw.runs.scale[sub], raw.runs.minimum[sub]);
}
INLINE int column_of(int lane, int sub, int second) { return lane / 4 * 64 + sub * 32 + lane % 4 * 8 + second * 4; }

// Two runs of 32 columns share 32 bytes.
INLINE Sixteen sixteen_at(device const uchar *row, int column) {
  device const uchar *block = row + column / 256 * Q4_K_BLOCK_BYTES;
  const int run = column % 256 / 32;
  const bool high = run % 2 != 0;
  const RunPair runs = run_pair_of(uint4(*(device const packed_uint4 *)block), run / 2);
  const float scale = high ? runs.scale[1] : runs.scale[0], minimum = high ? runs.minimum[1] : runs.minimum[0];
  const uint4 words = uint4(*(device const packed_uint4 *)(block + 16 + run / 2 * 32 + column % 32));
  Sixteen w;
  w.of[0] = four_nibbles_less(words.x, high, scale, minimum), w.of[1] = four_nibbles_less(words.y, high, scale, minimum);
  w.of[2] = four_nibbles_less(words.z, high, scale, minimum), w.of[3] = four_nibbles_less(words.w, high, scale, minimum);
  return w;
}

struct Slice {  // eight of the 32 bytes that two runs share
  uint words[2];
  RunPair runs;
};
INLINE Slice load_slice(device const uchar *row, int column, int quarter) {
  device const uchar *block = row + column / 256 * Q4_K_BLOCK_BYTES;
  const int g = column % 256 / 64;
  const uint2 words = uint2(*(device const packed_uint2 *)(block + 16 + 32 * g + 8 * quarter));
  Slice slice;
  slice.words[0] = words.x, slice.words[1] = words.y;
  slice.runs = run_pair_of(uint4(*(device const packed_uint4 *)block), g);
  return slice;
}
INLINE operand_pair operand_at(thread const Slice &slice, int run, int i) {
  return raised(i & 1 ? slice.words[i / 2] >> 8 : slice.words[i / 2], run ? HIGH_NIBBLES : LOW_NIBBLES);
}
INLINE float scale_of(thread const Slice &slice, int run) { return run ? slice.runs.scale[1] * 0.0625f : slice.runs.scale[0]; }
INLINE float minimum_of(thread const Slice &slice, int run) { return slice.runs.minimum[run]; }
INLINE int column_place(int second_half, int four, int i) { return four % 2 * 16 + 2 * (2 * second_half + four / 2) + i / 2 + i % 2 * 8; }
