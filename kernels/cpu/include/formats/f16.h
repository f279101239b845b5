// F16: IEEE half precision. File: [32] half. Row of x: [32] float. Panel: [32][16] half.
#define BLOCK 32
#define FILE_BLOCK_BYTES 64
#define FIELDS(FIELD) FIELD(64, 2, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  for (int i = 0; i < 32; i += 16) v16_store(x + i, v16_load_f16((const uint16_t *)block + i));
}

// --- products with float32 x

#define STEP_COLUMNS 1
typedef v16 StepWeights, StepX;

INLINE void store_x(uint8_t *row, int i, v16 x) { v16_store((float *)row + i, x); }
INLINE StepX load_x(const uint8_t *x, int half) { return v16_set(((const float *)x)[half]); }
INLINE StepWeights load_weights(const uint8_t *panel, int half) { return v16_load_f16((const uint16_t *)panel + 16 * half); }
INLINE v16 multiply(v16 acc, StepWeights w, StepX x) { return v16_fma(w, x, acc); }
