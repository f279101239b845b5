// x[t] = table[tokens[t]] as float32: the exact value of every weight.
//
//   x       [T, E] float32   rows from rows[0] on are not written
//   table   [V, E] WEIGHT    rows as stored in files, in a format of weights.h
//   tokens  [T] int32        a number outside 0 .. V - 1 gives a row of NaN: never a read outside the table
//   rows    [1] int32        number of valid rows, at most T
//
// E is a multiple of 32 and of the format's blocks; x on a border of 16 bytes, table as weights.h says.
// Grid (T), THREADS threads, 32 to 1024: the host takes E / 4, at most 256. A thread reads and writes 4 numbers at a time.
#define I E
#include "weights.h"

[[max_total_threads_per_threadgroup(THREADS)]] kernel void embed(device float *x, device const uchar *table, device const int *tokens,
                                                                 device const int *rows, uint3 group [[threadgroup_position_in_grid]],
                                                                 uint index [[thread_index_in_threadgroup]]) {
  const uint t = group.x;
  if (t >= uint(rows[0])) return;
  const int token = tokens[t];
  const bool known = token >= 0 && token < V;
  for (uint c = index * 4; c < E; c += THREADS * 4)
    *(device float4 *)(x + ulong(t) * E + c) =
        known ? four_values(table + ulong(uint(token)) * ROW_BYTES, c) : as_type<float4>(uint4(0x7FC00000u));
}
