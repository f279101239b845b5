// How the KV cache stores numbers. CACHE_TYPE F32, F16 or BF16: [P, 2, K, S, D], rounded to nearest, ties to even. KV_FP8, KV_INT8, KV_INT4:
// packed blocks of BLOCK_BYTES, as KVLayout of tinyvllm/batch.py has them. Constants: K, S, D, CACHE_TYPE. With LATENT, a number of features,
// F32, F16 or BF16 [P, S, D]: one key for all heads, whose first LATENT features are the value. Where WORLD ranks divide contexts, of which this is
// RANK, a block of tables and slots is S tokens of each rank, in order; each rank has its own S in its pool.
#pragma once
#ifndef WORLD
#define WORLD 1
#define RANK 0
#endif
#define TABLE_TOKENS (S * WORLD)  // of a block of tables and slots
#ifndef LATENT
#define LATENT 0
#endif
#define SIDES (LATENT ? 1 : 2)
#define VALUE_D (LATENT ? LATENT : D)  // features of a value

#include "kv_cache.h"
#include "lanes.h"

#if CACHE_TYPE == F32
typedef float cached;
#define load_cached v16_load
#define store_cached v16_store
#elif CACHE_TYPE == F16
typedef uint16_t cached;
#define load_cached v16_load_f16
#define store_cached v16_store_f16
#elif CACHE_TYPE == BF16
typedef uint16_t cached;
#define load_cached v16_load_bf16
#define store_cached v16_store_bf16
#elif CACHE_TYPE == KV_FP8 || CACHE_TYPE == KV_INT8 || CACHE_TYPE == KV_INT4
typedef uint8_t cached;
#define PACKED_CACHE 1
#else
#error "cache.h: CACHE_TYPE is F32, F16, BF16, KV_FP8, KV_INT8 or KV_INT4"
#endif

#ifndef PACKED_CACHE
#define PACKED_CACHE 0
#endif

// The place in this rank's pool of a slot; negative where there is none.
static inline int32_t own_slot(int32_t slot) {
  if (WORLD == 1 || slot < 0) return slot;
  const int32_t at = slot % TABLE_TOKENS;
  return at / S == RANK ? slot / TABLE_TOKENS * S + at % S : -1;
}

#if !PACKED_CACHE
#define ROW_BYTES (D * (int)sizeof(cached))

// Where a key (side 0) or value (side 1) of one slot and head is.
static inline long place_of(int block, int side, int head, int s) {
  return LATENT ? ((long)block * S + s) * D : (((long)block * 2 + side) * K + head) * (S * D) + s * D;
}

// A key (side 0) or value (side 1) of one slot and head, from float32 [D]. Nothing is stored where the slot is negative, or another rank's.
static inline void store_row(cached *pool, int32_t of_all, int side, int head, const float *x) {
  const int32_t slot = own_slot(of_all);
  if (slot < 0) return;
  cached *to = pool + place_of(slot / S, side, head, slot % S);
  for (int d = 0; d < D; d += 16) store_cached(to + d, v16_load(x + d));
}
#else
#define ROW_BYTES (CACHE_TYPE == KV_INT4 ? D / 2 : D)
#define SCALES (2 * K * S * ROW_BYTES)
#define BLOCK_BYTES (SCALES + 2 * K * S * 2)

static inline const uint8_t *quants_of(const uint8_t *pool, int block, int side, int head) {
  return pool + (long)block * BLOCK_BYTES + (side * K + head) * (S * ROW_BYTES);
}

static inline const uint16_t *scales_of(const uint8_t *pool, int block, int side, int head) {
  return (const uint16_t *)(pool + (long)block * BLOCK_BYTES + SCALES) + (side * K + head) * S;
}

#if CACHE_TYPE == KV_INT4
#define ROTATION ((D & -D) < 256 ? (D & -D) : 256)
#define ROTATION_FACTOR                     \
  (ROTATION == 16    ? 0.25f                \
   : ROTATION == 32  ? 0.17677669529663687f \
   : ROTATION == 64  ? 0.125f               \
   : ROTATION == 128 ? 0.08838834764831845f \
                     : 0.0625f)

// A row times a symmetric Hadamard matrix, ROTATION numbers at a time.
static inline void hadamard(float *y) {
  for (int distance = 1; distance < ROTATION; distance *= 2)
    for (int i = 0; i < D; i += 2 * distance)
      for (int j = i; j < i + distance; j++) {
        const float a = y[j], b = y[j + distance];
        y[j] = a + b, y[j + distance] = a - b;
      }
  for (int d = 0; d < D; d++) y[d] *= ROTATION_FACTOR;
}
#endif

static inline void quantize_row(uint8_t *quants, const float *x, float inverse) {
#if CACHE_TYPE == KV_INT8
  for (int d = 0; d < D; d++) quants[d] = (uint8_t)kv_int8(x[d] * inverse);
#elif CACHE_TYPE == KV_FP8
  for (int d = 0; d < D; d++) quants[d] = (uint8_t)kv_fp8(x[d] * inverse);
#else
  for (int d = 0; d < D / 2; d++) quants[d] = (uint8_t)(kv_int4(x[d] * inverse) | kv_int4(x[d + D / 2] * inverse) << 4);
#endif
}

static inline void store_row(uint8_t *pool, int32_t of_all, int side, int head, const float *x) {
  const int32_t slot = own_slot(of_all);
  if (slot < 0) return;
  const int block = slot / S, s = slot % S;
  float y[D];
  uint8_t quants[ROW_BYTES];
  uint32_t top = 0;
  for (int d = 0; d < D; d++) y[d] = x[d];
#if CACHE_TYPE == KV_INT4
  if (side == 0) hadamard(y);
  const float step = side == 0 ? KV_STEP_INT4_KEY : KV_STEP_INT4;
#else
  const float step = CACHE_TYPE == KV_FP8 ? KV_STEP_FP8 : KV_STEP_INT8;
#endif
  for (int d = 0; d < D; d++) {
    const uint32_t size = bits_of_float(y[d]) & 0x7FFFFFFFu;
    top = size > top ? size : top;
  }
  const uint32_t scale = kv_scale(top, step);
  if (scale == KV_NAN_SCALE)
    for (int d = 0; d < D; d++) y[d] = 0.0f;
  quantize_row(quants, y, kv_inverse(scale));
  uint8_t *to = (uint8_t *)quants_of(pool, block, side, head);
  if (side == 0)
    for (int j = 0; j < ROW_BYTES / 4; j++)
      for (int i = 0; i < 4; i++) to[(j * S + s) * 4 + i] = quants[4 * j + i];
  else
    for (int i = 0; i < ROW_BYTES; i++) to[(s / 4 * ROW_BYTES + i) * 4 + s % 4] = quants[i];
  ((uint16_t *)scales_of(pool, block, side, head))[s] = (uint16_t)scale;
}
#endif
