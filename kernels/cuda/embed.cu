// x[t] = table[tokens[t]] as float32: the exact value of every weight.
//
//   x       [T, E] float32   rows from rows[0] on are not touched
//   table   [V, E] WEIGHT    TILES 0: rows as in files; blocks of Q8_0 and Q4_0 as in GGUF
//                            TILES 1: tiles of sixteen rows, as the products read them (product.cuh); not F32
//   tokens  [T] int32        a number outside of 0..V-1 gives a row of NaN, and no access outside of the table
//   rows    [1] int32        number of tokens, at most T
//
// Launch: grid (T), block 32 to 1024 threads; the host takes E / 4, at most 256. Unit of work: a thread block has a token, a thread reads
// and writes 4 numbers at a time. E is a multiple of 32; table and x are 16-byte aligned.
#include "weights.cuh"

extern "C" __global__ void __launch_bounds__(1024) embed(float *x, const u8 *table, const int *tokens, const int *rows) {
  await_previous();
  constexpr int NUMBERS = 4;
  const int t = blockIdx.x;
  if (t >= rows[0]) return;
  const int token = tokens[t];
  const bool known = token >= 0 && token < V;
  const float nan = __uint_as_float(0x7FC00000u);
  for (int c = threadIdx.x * NUMBERS; c < E; c += blockDim.x * NUMBERS) {
    float4 four = make_float4(nan, nan, nan, nan);
#if TILES
    if (known) four = read_tile(table, V, E, token, c);
#else
    if (known) four = read_row(table, E, token, c);
#endif
    *(float4 *)(x + (s64)t * E + c) = four;
  }
}
