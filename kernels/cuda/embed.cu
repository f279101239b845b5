// x[t] = table[tokens[t]] as float32: the exact value of every weight.
//
//   x       [T, E] float32   rows from rows[0] on are not touched
//   table   [V, E] WEIGHT    TILES 0: rows as in files. Q8_0: blocks of 32 as {half scale; int8 q[32]}, Q4_0: {half scale;
//                            uint8 q[16]}, the low nibbles are elements 0 to 15
//                            TILES 1: fragments of sixteen rows, as the products read them (include/product.cuh); not F32
//   tokens  [T] int32        a number outside 0..V-1 gives a row of NaN: never memory outside the table
//   rows    [1] int32        rows that are meant, at most T
//
// Grid (T), block 32 to 1024 threads: the host takes E / 4, at most 256. A thread reads and writes 4 numbers at a time. E is a multiple of
// 32; table and x lie on a border of 16 bytes. Block formats are those of GGUF.
#include "formats.cuh"

constexpr int ELEMENTS = 4;

template <int FORMAT> DEVICE float4 floats_of(uint2 words) {
  const float2 low = unpack_pair<FORMAT>(words.x), high = unpack_pair<FORMAT>(words.y);
  return make_float4(low.x, low.y, high.x, high.y);
}

DEVICE float4 scaled(float scale, int a, int b, int c, int d) {
  return make_float4(scale * (float)a, scale * (float)b, scale * (float)c, scale * (float)d);
}
DEVICE float4 of_bytes(float scale, u32 word) { return scaled(scale, (s8)word, (s8)(word >> 8), (s8)(word >> 16), (s8)(word >> 24)); }
DEVICE float4 of_nibbles(float scale, u32 word, bool high) {
  if (high) word >>= 4;
  return scaled(scale, (int)(word & 15) - 8, (int)(word >> 8 & 15) - 8, (int)(word >> 16 & 15) - 8, (int)(word >> 24 & 15) - 8);
}

// Columns c to c + 3 of a row.
#if TILES
DEVICE float4 read(const u8 *table, int token, int c) {
  constexpr s64 PADDED = (V + 15) / 16;  // tiles above each other
  const int tile = token / 16, g = token % 8, upper = token % 16 / 8;
#if WEIGHT == F16 || WEIGHT == BF16
  const int lane = g * 4 + c % 8 / 2, word = c % 16 / 8 * 2 + upper;
  const u32 *words = (const u32 *)table + ((s64)tile * (E / 16) + c / 16) * 128 + lane * 4 + word;
  return floats_of<WEIGHT>(make_uint2(words[0], words[4]));
#else
  constexpr int WORDS = WEIGHT == Q8_0 ? 4 : 2;  // of a lane
  const s64 block = (s64)tile * (E / 32) + c / 32;
  const u16 *scales = (const u16 *)(table + PADDED * (E / 32) * 128 * WORDS);
  const float scale = f16_to_float(scales[block * 16 + g * 2 + upper]);
  const u32 *words = (const u32 *)table + block * 32 * WORDS + (g * 4 + c % 16 / 4) * WORDS;
#if WEIGHT == Q8_0
  return of_bytes(scale, words[c % 32 / 16 * 2 + upper]);
#else
  return of_nibbles(scale, words[upper], c % 32 >= 16);
#endif
#endif
}
#else
DEVICE float4 read(const u8 *table, int token, int c) {
#if WEIGHT == F32
  return ((const float4 *)table)[((s64)token * E + c) / ELEMENTS];
#elif WEIGHT == F16 || WEIGHT == BF16
  return floats_of<WEIGHT>(((const uint2 *)table)[((s64)token * E + c) / ELEMENTS]);
#else
  constexpr int HALVES = WEIGHT == Q8_0 ? 17 : 9;  // of a block; blocks stand at even addresses only
  const u16 *block = (const u16 *)table + ((s64)token * (E / 32) + c / 32) * HALVES;
  const u16 *q = block + 1 + (WEIGHT == Q8_0 ? c % 32 : c % 16) / 2;
  const float scale = f16_to_float(block[0]);
  const u32 word = q[0] | (u32)q[1] << 16;
  return WEIGHT == Q8_0 ? of_bytes(scale, word) : of_nibbles(scale, word, c % 32 >= 16);
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(1024) embed(float *x, const u8 *table, const int *tokens, const int *rows) {
  const int t = blockIdx.x;
  if (t >= rows[0]) return;
  const int token = tokens[t];
  const bool known = token >= 0 && token < V;
  const float nan = __uint_as_float(0x7FC00000u);
  for (int c = threadIdx.x * ELEMENTS; c < E; c += blockDim.x * ELEMENTS)
    *(float4 *)(x + (s64)t * E + c) = known ? read(table, token, c) : make_float4(nan, nan, nan, nan);
}
