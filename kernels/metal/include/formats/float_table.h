// NF4, BNB_FP4: blocks of 64 columns, 36 bytes: float scale, 32 bytes of nibbles, the low one of a byte first: indices of sixteen float32
// numbers; w = scale * number. weights.h says what a format header defines.
//
// A lane's eight bytes hold sixteen columns one after another, so its planes are the first and the second half of its words. The numbers have
// 24 bits each, so neither a polynomial (four_values_iq4) nor bits of a half give them exactly; fifteen selects would be 19 instructions a
// number where memory leaves time for 7. One load from 64 bytes of constant memory, which the processor's cache holds, is the shortest way.
// A shuffle from the lane that keeps an entry, as on CUDA, would need all lanes, and a short last step has fewer.
#define BLOCK 64
#define BLOCK_BYTES 36
#define PLANES 2
#define RUN 8

#if WEIGHT == NF4
constant constexpr float NUMBERS[16] = NF4_VALUES;
#else
constant constexpr float NUMBERS[16] = BNB_FP4_VALUES;
#endif

struct Raw {
  uint2 words;
  float scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  Raw raw;
  raw.words = words_at_4(block + 4 + lane % BLOCK_LANES * 8);
  raw.scale = *(device const float *)block;
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  const uint q = raw.words[plane] >> (uint)(16 * four);
  return float4(NUMBERS[q & 15], NUMBERS[q >> 4 & 15], NUMBERS[q >> 8 & 15], NUMBERS[q >> 12 & 15]) * float4(raw.scale);
}
