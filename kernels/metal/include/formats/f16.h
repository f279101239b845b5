// F16: [I] float16. weights.h says what a format header defines.
#define BLOCK 1
#define BLOCK_BYTES 2
#define PLANES 1
#define RUN 8
#define OPERAND half
#define OPERAND_PAIR half2

struct Raw {  // eight columns
  uint4 words;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  Raw raw;
  raw.words = uint4(*(device const packed_uint4 *)(row + (step * 256 + lane * 8) * 2));
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int four) {
  const uint low = four ? raw.words.z : raw.words.x, high = four ? raw.words.w : raw.words.y;
  return float4(half4(as_type<half2>(low), as_type<half2>(high)));
}
