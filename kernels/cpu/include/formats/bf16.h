// BF16: bfloat16, multiplied in pairs. File and row of x: [32] bfloat16. Panel: [16][16][2] bfloat16.
#define BLOCK 32
#define FILE_BLOCK_BYTES 64
#define FIELDS(FIELD) FIELD(64, 4, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  for (int i = 0; i < 32; i += 16) v16_store(x + i, v16_load_bf16((const uint16_t *)block + i));
}

// --- products with x rounded to bfloat16

#define STEP_COLUMNS 2
#ifdef BF16_AS_FLOATS  // the pair's second number first, as v16_dot_bf16 does; x is float32
#define HALVES 2
#define STEP_X_BYTES 8
typedef v16 StepWeights, StepX;

INLINE void store_x(uint8_t *row, int i, v16 x) { v16_store((float *)row + i, v16_round_bf16(x)); }
INLINE StepX load_x(const uint8_t *x, int half) { return v16_set(((const float *)x)[1 - half]); }
INLINE StepWeights load_weights(const uint8_t *panel, int half) {
  return half == 0 ? v16_from_high_bf16(w16_load(panel)) : v16_from_low_bf16(w16_load(panel));
}
INLINE v16 multiply(v16 acc, StepWeights w, StepX x) { return v16_fma(w, x, acc); }
#else
typedef w16 StepWeights;
typedef uint32_t StepX;

INLINE void store_x(uint8_t *row, int i, v16 x) { v16_store_bf16((uint16_t *)row + i, x); }
INLINE StepX load_x(const uint8_t *x, int half) { return *(const uint32_t *)x + 0 * half; }
INLINE StepWeights load_weights(const uint8_t *panel, int half) { return w16_load(panel + 0 * half); }
INLINE v16 multiply(v16 acc, StepWeights w, StepX x) { return v16_dot_bf16(acc, w, x); }
#endif
