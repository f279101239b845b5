// Packed keys and values (KV_INT8, KV_INT4, KV_FP8): what a stage of 32 keys or values is in shared memory, how it is copied there, its
// numbers as B operands of mma, and the store of a row. Where the bytes are in a block: KVLayout of tinyvllm/batch.py.
//
// Quants are multiplied as bfloat16, which holds all of them. The scale of a key is applied to its scores, that of a value to its weights,
// before they are rounded. Columns and keys are permuted within sixteen, so that a word in memory is a lane's part of an operand: of a key,
// four columns; of a column, four keys. Stages keep the words as they are:
//
//   keys    word j of key i at (j * KEY_PITCH + i) * 4            values  of four keys g, word i at (g * VALUE_PITCH + i) * 4
//   scales  bfloat16 [32] at STAGE_SCALES
//
// Of two HALVES of the values (attention.cuh) a thread block copies its own bytes, and in KV_INT4, where a byte has a column of each half, all.
#pragma once
#include "formats.cuh"
#include "kv_cache.h"
#include "portable.h"

constexpr int ROW_BYTES = CACHE_TYPE == KV_INT4 ? D / 2 : D;   // quants of a key
constexpr u32 BLOCK_UNITS = K * S * (ROW_BYTES + 2) / 8;       // of 16 bytes
constexpr u32 HEAD_UNITS = S * ROW_BYTES / 16;                 // of one side and head
constexpr u32 SCALE_UNITS = 2 * K * HEAD_UNITS;                // where the scales begin
constexpr int KEY_PITCH = 40;                                  // words; a multiple of 4 for copies, of 8 but not of 32 for banks
constexpr int VALUE_BYTES = HALVES == 1 ? ROW_BYTES : VALUES;  // of a value, in a stage
constexpr int VALUE_PITCH = VALUE_BYTES + 8;
constexpr int STAGE_QUANTS = 4 * KEY_PITCH * ROW_BYTES / 4 > 32 * VALUE_PITCH ? KEY_PITCH * ROW_BYTES : 32 * VALUE_PITCH;
constexpr int STAGE_SCALES = STAGE_QUANTS;
constexpr int PACKED_STAGE = STAGE_QUANTS + 64;

static_assert(CACHE_TYPE != KV_INT4 || D % 16 == 0, "packed caches: D must be a multiple of 16");

// Copies a piece of a stage: pieces 0 to 2 * ROW_BYTES - 1, of values 2 * VALUE_BYTES - 1, are quants, of which piece p belongs to keys 4 (p % 8) to 4 (p % 8) + 3; the
// last four are scales, of eight keys each. `block` and `slot`: those of the piece's first key. Zeros if not `valid`.
DEVICE void copy_quants(u8 *stage, const uint4 *cache, int side, int head, int piece, u32 block, int slot, bool valid) {
  const int four = piece % 8, part = piece / 8;
  const uint4 *from = cache + block * (u64)BLOCK_UNITS + (side * K + head) * HEAD_UNITS;
  from += side == 0 ? part * (S / 4) + slot / 4 : slot / 4 * (ROW_BYTES / 4) + part;
  if (VALUE_BYTES < ROW_BYTES && side) from += blockIdx.y % HALVES * (VALUE_BYTES / 4);
  copy_16_or_zero(stage + (side == 0 ? part * KEY_PITCH * 4 + four * 16 : four * VALUE_PITCH * 4 + part * 16), valid ? from : cache, valid);
}
DEVICE void copy_scales(u8 *stage, const uint4 *cache, int side, int head, int eight, u32 block, int slot, bool valid) {
  const uint4 *from = cache + block * (u64)BLOCK_UNITS + SCALE_UNITS + (side * K + head) * (S / 8) + slot / 8;
  copy_16_or_zero(stage + STAGE_SCALES + eight * 16, valid ? from : cache, valid);
}

// --- operands

// Four bytes, or four nibbles at bits 8 i + 4 * HIGH, as the B operand of an mma.
DEVICE float quant_number(u32 word, int i, int high) {
  const u32 byte = word >> 8 * i & 255u;
  if constexpr (CACHE_TYPE == KV_INT8) return __uint_as_float(0x4B000000u | byte) - 8388736.0f;
  if constexpr (CACHE_TYPE == KV_INT4) return __uint_as_float(0x43000000u | (byte >> 4 * high & 15u) << 16) - 135.5f;
  return e4m3_to_float(byte);
}
DEVICE void quant_operand(u32 &b0, u32 &b1, u32 word, int high) {
  if constexpr (CACHE_TYPE == KV_FP8) {
    u32 even, odd;
    e4m3_pairs(even, odd, word);
    b0 = __byte_perm(even, odd, 0x5410), b1 = __byte_perm(even, odd, 0x7632);
    return;
  }
  b0 = pack_bf16(quant_number(word, 0, high), quant_number(word, 1, high));
  b1 = pack_bf16(quant_number(word, 2, high), quant_number(word, 3, high));
}

// The scales of the lane's four keys of sixteen.
DEVICE void lane_scales(float (&scale)[4], const u8 *stage, int sixteen) {
  const uint2 pairs = *(const uint2 *)(stage + STAGE_SCALES + sixteen * 32 + threadIdx.x % 4 * 8);
  scale[0] = __uint_as_float(pairs.x << 16), scale[1] = __uint_as_float(pairs.x & 0xFFFF0000u);
  scale[2] = __uint_as_float(pairs.y << 16), scale[3] = __uint_as_float(pairs.y & 0xFFFF0000u);
}
