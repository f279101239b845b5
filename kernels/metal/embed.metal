// x[t] = table[tokens[t]] as float32: the exact value of every weight.
//
//   x       [T, E] float32   rows from rows[0] on are not touched
//   table   [V, E] WEIGHT    rows as in files (tinyvllm/quant/formats.py): F32, F16, BF16; Q8_0, Q4_0 in blocks of 32, Q4_K of 256
//   tokens  [T] int32        a number outside 0..V-1 gives a row of NaN: never memory outside the table
//   rows    [1] int32        rows that are meant, at most T
//
// Grid (T), THREADS threads, 32 to 1024: the host takes E / 4, at most 256. A thread reads and writes 4 numbers at a time. E is a multiple
// of 32 (Q4_K: of 256); x on a border of 16 bytes, table of 16 (Q8_0, Q4_0: of 2). Block formats are those of GGUF.
#include "gpu.h"

static_assert(E % (WEIGHT == Q4_K ? 256 : 32) == 0, "embed: E must be a multiple of 32, of 256 for Q4_K");

#if WEIGHT == F32
INLINE float4 numbers_at(device const uchar *table, uint token, uint c) {
  return *(device const float4 *)(table + 4 * (ulong(token) * E + c));
}

#elif WEIGHT == F16
INLINE float4 numbers_at(device const uchar *table, uint token, uint c) {
  return float4(*(device const half4 *)(table + 2 * (ulong(token) * E + c)));
}

#elif WEIGHT == BF16
INLINE float4 numbers_at(device const uchar *table, uint token, uint c) {
  const ushort4 bits = *(device const ushort4 *)(table + 2 * (ulong(token) * E + c));
  return as_type<float4>(uint4(bits) << 16u);
}

#elif WEIGHT == Q8_0
INLINE float4 numbers_at(device const uchar *table, uint token, uint c) {
  device const uchar *block = table + (ulong(token) * (E / 32) + c / 32) * 34;
  const float scale = float(*(device const half *)block);
  device const ushort *pairs = (device const ushort *)(block + 2 + c % 32);
  return scale * float4(char4(as_type<char2>(pairs[0]), as_type<char2>(pairs[1])));
}

#elif WEIGHT == Q4_0
INLINE float4 numbers_at(device const uchar *table, uint token, uint c) {
  device const uchar *block = table + (ulong(token) * (E / 32) + c / 32) * 18;
  const float scale = float(*(device const half *)block);
  device const ushort *pairs = (device const ushort *)(block + 2 + c % 16);
  const uint4 bytes = uint4(pairs[0], pairs[0] >> 8, pairs[1], pairs[1] >> 8) >> (c % 32 / 16 * 4);
  return scale * (float4(bytes & 15u) - 8.0f);
}

#else  // Q4_K: half d, half dmin, 12 bytes of eight scales and minimums of 6 bits, 128 bytes: low halves are of even runs of 32
INLINE float4 numbers_at(device const uchar *table, uint token, uint c) {
  device const uchar *block = table + (ulong(token) * (E / 256) + c / 256) * 144, *packed = block + 4;
  const float2 steps = float2(*(device const half2 *)block);
  const uint run = c % 256 / 32, at = run % 4, low = packed[at], middle = packed[at + 4], high = packed[at + 8];
  const uint scale = run < 4 ? low & 63 : (high & 15) | (low >> 6) << 4;
  const uint least = run < 4 ? middle & 63 : (high >> 4) | (middle >> 6) << 4;
  const uint word = *(device const uint *)(block + 16 + run / 2 * 32 + c % 32);
  const uint4 bytes = (uint4(word) >> uint4(0, 8, 16, 24)) >> (run % 2 * 4);
  return steps.x * float(scale) * float4(bytes & 15u) - steps.y * float(least);
}
#endif

kernel void embed(device float *x, device const uchar *table, device const int *tokens, device const int *rows,
                  uint3 group [[threadgroup_position_in_grid]], uint at [[thread_index_in_threadgroup]]) {
  const uint t = group.x;
  if (t >= uint(rows[0])) return;
  const int token = tokens[t];
  const bool known = token >= 0 && token < V;
  for (uint c = at * 4; c < E; c += THREADS * 4)
    *(device float4 *)(x + ulong(t) * E + c) = known ? numbers_at(table, uint(token), c) : as_type<float4>(uint4(0x7FC00000u));
}
