// out = the rows of x that this rank computes alone (rank_rows.cuh)
//
//   out    [ceil(T / WORLD), E] float32
//   count  [1] int32     how many there are; further rows of out are unchanged
//   x      [T, E] float32
//   rows   [1] int32     how many rows of x there are, 0 to T
//
// E % 4 == 0. Launch: grid (ceil(T / WORLD), 1, 1), 256 threads, no dynamic shared memory. Unit of work: a thread block copies a row.
#include "rank_rows.cuh"

extern "C" __global__ void __launch_bounds__(256) own_rows(float4 *out, int *count, const float4 *x, const int *rows) {
  await_previous();
  const int own = rows_of(RANK, rows[0]), row = blockIdx.x;
  if (row == 0 && threadIdx.x == 0) count[0] = own;
  if (row >= own) return;
  const float4 *from = x + (s64)(first_row_of(RANK, rows[0]) + row) * (E / 4);
  for (int i = threadIdx.x; i < E / 4; i += 256) out[(s64)row * (E / 4) + i] = from[i];
}
