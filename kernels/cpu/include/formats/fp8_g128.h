// FP8_G128: weight = scale * e4m3. File: { float scale; uint8 q[128] }. Panel: { float scale[16]; uint8 q[32][16][4] }.
#define BLOCK 128
#define FILE_BLOCK_BYTES 132
#define FIELDS(FIELD) FIELD(4, 4, 0) FIELD(128, 4, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float scale = float_from_bits(((const struct any_word *)block)->word);
  for (int i = 0; i < 128; i++) x[i] = scale * float_from_e4m3(block[4 + i]);
}

// --- products with x rounded to bfloat16

#define E4M3_QUANTS 1  // e4m3.h
#define CHAINS 4
#define QUANTS 64

INLINE v16 group_scale(const uint8_t *block) { return v16_from_w16(w16_load(block)); }
