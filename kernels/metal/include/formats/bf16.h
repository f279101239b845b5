// BF16: [I] bfloat16. weights.h says what a format header defines.
#define ROW_BYTES (2 * (I))
#define COLUMNS_DIVISOR 32
#define STEP 256
#define SUBS 1
#define LANE_SHARES_IN_ORDER 1
#define QUANTIZED 0
#define RUNS 1
#define HAS_MINIMUM 0
typedef float operand_number;
typedef float2 operand_pair;

INLINE float4 four_values(device const uchar *row, uint column) {
  const ushort4 bits = *(device const ushort4 *)(row + 2 * column);
  return as_type<float4>(uint4(bits) << 16u);
}

struct Raw {  // eight columns
  uint4 words;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  Raw raw;
  raw.words = uint4(*(device const packed_uint4 *)(row + (step * STEP + lane * 8) * 2));
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int second) {
  const uint low = second ? raw.words.z : raw.words.x, high = second ? raw.words.w : raw.words.y;
  return float4(bf16_pair_to_float(low), bf16_pair_to_float(high));
}
INLINE int column_of(int lane, int, int second) { return lane * 8 + second * 4; }

// Operand i has numbers 2 i and 2 i + 1 of the lane's eight.
INLINE operand_pair plain_pair(thread const Raw &raw, int i) { return bf16_pair_to_float(raw.words[i]); }
