// Packed keys and values (CACHE_TYPE KV_INT8, KV_INT4, KV_FP8) as attention reads them: where they are, and their numbers. The definition is
// tinyvllm/quant/kv.py, the layout KVLayout's of tinyvllm/batch.py.
//
// Constants: K, S, D, CACHE_TYPE. Addresses count quads, sixteen bytes of quants. A quad is four words: of keys, the same four columns of four
// keys, a word a key; of values, four columns of four keys, a word a column. In KV_INT4 a byte has two columns: its low nibble column i, the
// high one column i + D / 2. A layer's cache is below 64 GiB.
//
// Numbers are exact in half precision: the bits of a quant are or-ed into the mantissa of 1024 or of 64, which is subtracted with the quants'
// centre. They come without their scale, which multiplies a key's scores and a value's weights. All bytes are finite numbers, in fp8 too, so
// unused slots do no harm where their weight is 0.
#pragma once
#include "cache_number.h"
#include "e4m3.h"

constant constexpr int NIBBLES = CACHE_TYPE == KV_INT4 ? 2 : 1;             // columns of a byte
constant constexpr int WORDS = D / NIBBLES / 4;                             // of a key
constant constexpr uint HEAD_QUADS = S / 4 * WORDS;                         // of one side and head
constant constexpr uint SIDE_QUADS = K * HEAD_QUADS;                        // from a head's keys to its values
constant constexpr uint BLOCK_QUADS = 2 * SIDE_QUADS + 2 * K * S * 2 / 16;  // the last are the scales
static_assert(D % 16 == 0 && S % 8 == 0, "packed caches: D must be a multiple of 16 and S of 8");

// A key of a KV head: the quad at which the head's keys in its block begin, and its slot.
struct KeyPlace {
  uint at;
  int slot;
};
INLINE KeyPlace key_place(device const int *table, int head, int key) {
  KeyPlace place;
  place.at = (uint)table[key / S] * BLOCK_QUADS + (uint)head * HEAD_QUADS, place.slot = key % S;
  return place;
}
// The first quads of the four keys that a key is one of; the next words are KEY_STRIDE, or VALUE_STRIDE, further on.
constant constexpr uint KEY_STRIDE = S / 4, VALUE_STRIDE = 1;
INLINE uint key_quad(KeyPlace place) { return place.at + (uint)(place.slot / 4); }
INLINE uint value_quad(KeyPlace place) { return place.at + SIDE_QUADS + (uint)(place.slot / 4 * WORDS); }

// The scales of a key and of its value, bfloat16, the key's in the lower half.
INLINE uint load_scale_pair(device const uint4 *cache, KeyPlace place, int head) {
  device const ushort *scales = (device const ushort *)(cache + (place.at - (uint)head * HEAD_QUADS + 2 * SIDE_QUADS));
  device const ushort *own = scales + head * S + place.slot;
  return (uint)own[0] | (uint)own[K * S] << 16;
}

// The numbers of a word's bytes or, of KV_INT4, of their nibbles: the low ones or the high ones.
INLINE half4 numbers_of(uint word, int high) {
#if CACHE_TYPE == KV_FP8
  return halves_of_e4m3(word);
#else
#if CACHE_TYPE == KV_INT8
  const uint even = (word & 0x00FF00FFu) | 0x64006400u, odd = (word >> 8 & 0x00FF00FFu) | 0x64006400u;  // 1024 + byte
  const half4 centre = half4(1152.0h);
#else
  const uint even = ((high ? word : word << 4) & 0x00F000F0u) | 0x54005400u;  // 64 + nibble
  const uint odd = ((high ? word >> 8 : word >> 4) & 0x00F000F0u) | 0x54005400u;
  const half4 centre = half4(71.5h);
#endif
  const half2 first = as_type<half2>(even), second = as_type<half2>(odd);
  return half4(first.x, second.x, first.y, second.y) - centre;
#endif
}
// Four columns of key, or value, `key` % 4 of a quad.
INLINE half4 key_numbers(uint4 quad, int key, int high) { return numbers_of(quad[key % 4], high); }
INLINE half4 value_numbers(uint4 quad, int key, int high) {
  return half4(numbers_of(quad.x, high)[key % 4], numbers_of(quad.y, high)[key % 4], numbers_of(quad.z, high)[key % 4],
               numbers_of(quad.w, high)[key % 4]);
}
