// A warp stores a key or value in a packed cache, with the bytes of the CPU's kernels. tinyvllm/quant/kv.py is the definition.
#pragma once
#include "formats.cuh"
#include "kv_cache.h"
#include "own_keys.cuh"
#include "portable.h"

#define PACKED_CACHE (CACHE_TYPE == KV_INT8 || CACHE_TYPE == KV_INT4 || CACHE_TYPE == KV_FP8)

constexpr bool ROTATED_KEYS = CACHE_TYPE == KV_INT4;
constexpr int ROTATION = (D & -D) < 256 ? (D & -D) : 256;
constexpr float ROTATION_FACTOR = ROTATION == 8     ? 0.35355339059327373f
                                  : ROTATION == 16  ? 0.25f
                                  : ROTATION == 32  ? 0.17677669529663687f
                                  : ROTATION == 64  ? 0.125f
                                  : ROTATION == 128 ? 0.08838834764831845f
                                                    : 0.0625f;

// y [D] in shared memory times a symmetric Hadamard matrix, ROTATION numbers at a time.
DEVICE void hadamard(float *y, int lane) {
  for (int distance = 1; distance < ROTATION; distance *= 2) {
    __syncwarp();
    for (int i = lane; i < D / 2; i += 32) {
      const int at = i / distance * 2 * distance + i % distance;
      const float a = y[at], b = y[at + distance];
      y[at] = a + b, y[at + distance] = a - b;
    }
  }
  __syncwarp();
  for (int d = lane; d < D; d += 32) y[d] *= ROTATION_FACTOR;
  __syncwarp();
}

// y [D] in shared memory, visible to all lanes; it is changed. `side`: 0 for a key, 1 for a value. All lanes have the same slot; where it is
// negative, nothing is stored.
DEVICE void store_packed_row(u8 *pool, int slot, int side, int head, float *y, int lane) {
  if (slot < 0) return;
  constexpr int ROW = CACHE_TYPE == KV_INT4 ? D / 2 : D;
  constexpr s64 SCALES = 2ll * K * S * ROW;
  const int s = slot % S;
  u8 *block = pool + (s64)(slot / S) * (SCALES + 4 * K * S), *to = block + (s64)(side * K + head) * S * ROW;
  if (ROTATED_KEYS && side == 0) hadamard(y, lane);
  u32 top = 0;
  for (int d = lane; d < D; d += 32) top = max(top, bits_of_float(y[d]) & 0x7FFFFFFFu);
#pragma unroll
  for (int distance = 16; distance; distance /= 2) top = max(top, __shfl_xor_sync(ALL_LANES, top, distance));
  const float step = CACHE_TYPE == KV_FP8    ? KV_STEP_FP8
                     : CACHE_TYPE == KV_INT8 ? KV_STEP_INT8
                     : side == 0             ? KV_STEP_INT4_KEY
                                             : KV_STEP_INT4;
  const u32 scale = kv_scale(top, step);
  const float inverse = kv_inverse(scale);
  const bool finite = scale != KV_NAN_SCALE;
  for (int i = lane; i < ROW; i += 32) {
    const float x = (finite ? y[i] : 0.0f) * inverse;
    u32 byte = CACHE_TYPE == KV_INT8 ? kv_int8(x) : CACHE_TYPE == KV_FP8 ? kv_fp8(x) : kv_int4(x);
    if (CACHE_TYPE == KV_INT4) byte |= kv_int4((finite ? y[i + D / 2] : 0.0f) * inverse) << 4;
    to[side == 0 ? (i / 4 * S + s) * 4 + i % 4 : (s / 4 * ROW + i) * 4 + s % 4] = (u8)byte;
  }
  if (lane == 0) ((u16 *)(block + SCALES))[(side * K + head) * S + s] = (u16)scale;
}
