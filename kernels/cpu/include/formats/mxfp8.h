// MXFP8 (OCP Microscaling Formats 1.0): weight = 2^(e - 127) * e4m3, NaN where e is 255. File: { uint8 e, q[32] }. Panel: { uint8 e[16],
// q[8][16][4] }.
#define BLOCK 32
#define FILE_BLOCK_BYTES 33
#define FIELDS(FIELD) FIELD(1, 1, 0) FIELD(32, 4, 0)

// 2^(e - 127), also where that is subnormal.
INLINE float float_from_e8m0(uint8_t e) { return float_from_bits(e == 255 ? 0x7FC00000u : e == 0 ? 0x400000u : (uint32_t)e << 23); }

INLINE void unpack_block(float *x, const uint8_t *block) {
  for (int i = 0; i < 32; i++) x[i] = float_from_e8m0(block[0]) * float_from_e4m3(block[1 + i]);
}

// --- products with x rounded to bfloat16

#define E4M3_QUANTS 1  // e4m3.h
#define CHAINS 2
#define QUANTS 16

INLINE v16 group_scale(const uint8_t *block) {
  float scales[16];
  for (int r = 0; r < 16; r++) scales[r] = float_from_e8m0(block[r]);
  return v16_load(scales);
}
