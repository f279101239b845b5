// F32: float32. File and row of x: [32] float. Panel: [32][16] float.
#define BLOCK 32
#define FILE_BLOCK_BYTES 128
#define FIELDS(FIELD) FIELD(128, 4, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  for (int i = 0; i < 32; i += 16) v16_store(x + i, v16_load((const float *)block + i));
}

// --- products with float32 x

#define STEP_COLUMNS 1
typedef v16 StepWeights, StepX;

INLINE void store_x(uint8_t *row, int i, v16 x) { v16_store((float *)row + i, x); }
INLINE StepX load_x(const uint8_t *x, int half) { return v16_set(((const float *)x)[half]); }
INLINE StepWeights load_weights(const uint8_t *panel, int half) { return v16_load((const float *)panel + 16 * half); }
INLINE v16 multiply(v16 acc, StepWeights w, StepX x) { return v16_fma(w, x, acc); }
