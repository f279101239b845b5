// F32: [I] float32. weights.h says what a format header defines.
#define ROW_BYTES (4 * (I))
#define COLUMNS_DIVISOR 32
#define STEP 256
#define SUBS 1
#define LANE_SHARES_IN_ORDER 1
#define QUANTIZED 0
#define RUNS 1
#define HAS_MINIMUM 0
typedef float operand_number;
typedef float2 operand_pair;

INLINE float4 four_values(device const uchar *row, uint column) { return *(device const float4 *)(row + 4 * column); }

struct Raw {  // eight columns
  float4 fours[2];
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const packed_float4 *at = (device const packed_float4 *)(row + (step * STEP + lane * 8) * 4);
  Raw raw;
  raw.fours[0] = float4(at[0]), raw.fours[1] = float4(at[1]);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int second) { return raw.fours[second]; }
INLINE int column_of(int lane, int, int second) { return lane * 8 + second * 4; }

// Operand i has numbers 2 i and 2 i + 1 of the lane's eight.
INLINE operand_pair plain_pair(thread const Raw &raw, int i) {
  const float4 four = raw.fours[i / 2];
  return i & 1 ? float2(four.z, four.w) : float2(four.x, four.y);
}
