// hidden = A . norm(x), A that of the row's adapter: the first half of what low-rank adapters add to a product (lora_bias.cu has the second)
//
//   hidden    [T, PARTS R] float32     of a row and projection as many numbers as its adapter has ranks; the others are not written
//   x         [T, E] float32
//   norm      [E] float32, if NORM     RMS norm's weights; EPS is inside the root
//   a         [N, PARTS, R, E] float32 of each adapter and projection
//   ranks     [N] int32                of each adapter in this product, up to R; 0 if it does not change it
//   adapters  [T] int32                n for adapter n - 1, 0 for none
//   rows      [1] int32                how many rows of x there are, 0 to T
//
// E % 4 == 0. All in float32, a row's sums in one order whatever the other rows are: the norm in that of norm.cuh; lane l of a warp has the
// fours number l, l + 32, ... of the columns and adds with fma, ascending, then a butterfly (16, 8, 4, 2, 1). ROWS is the host's choice.
//
// Launch: grid (ceil(T / ROWS), ceil(PARTS R / 8), 1), 256 threads, no dynamic shared memory. Unit of work: a warp has one rank of ROWS rows;
// it reads it once for neighbours with one adapter, as the rows of a prompt are. LoRA (Hu et al., 2021, arXiv:2106.09685); many adapters in
// one batch as in Punica (Chen et al., 2023, arXiv:2310.18547).
#include "adapters.cuh"
#include "input_rows.cuh"
#include "norm.cuh"

constexpr int THREADS = 32 * NORM_WARPS, HIDDEN = PARTS * R;
static_assert(E % 4 == 0, "lora_shrink: E must be a multiple of 4");

// Rows of a thread block from its first on, and what they are normed with.
struct Rows {
  const float *x, *norm;
  float inverse[ROWS];
};

DEVICE void sum_squares(float (&squares)[ROWS][NORM_WARPS], const float *x, const int *ranks, const int *adapters, int count);
DEVICE void multiply(float *hidden, const float *a, const Rows &all, const Run &run, int lane);

extern "C" __global__ void __launch_bounds__(THREADS)
    lora_shrink(float *hidden, const float *x, NORM_ARGUMENT const float *a, const int *ranks, const int *adapters, const int *rows) {
  await_previous();
  const int first = blockIdx.x * ROWS, count = min(rows[0] - first, ROWS), lane = threadIdx.x % 32;
  const int number = blockIdx.y * NORM_WARPS + threadIdx.x / 32;  // of a row's HIDDEN
  if (count <= 0) return;
  Rows all = {x + (u64)first * E, nullptr, {}};
  adapters += first;
#if NORM
  static __shared__ float squares[ROWS][NORM_WARPS];
  sum_squares(squares, all.x, ranks, adapters, count);
  __syncthreads();
  all.norm = norm;
#endif
  if (number >= HIDDEN) return;
  for (int row = 0; row < count;) {
    const Run run = run_at(adapters, ranks, row, count);
    row = run.end;
    if (number % R >= run.rank) continue;
#if NORM
#pragma unroll
    for (int j = 0; j < ROWS; j++) all.inverse[j] = contains(run, j) ? inverse_root(squares[j], E, EPS) : 0.0f;
#endif
    multiply(hidden + (u64)first * HIDDEN + number, a + ((u64)run.adapter * HIDDEN + number) * E, all, run, lane);
  }
}

// Each warp has a part of every row that has an adapter.
DEVICE void sum_squares(float (&squares)[ROWS][NORM_WARPS], const float *x, const int *ranks, const int *adapters, int count) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int j = 0; j < count; j++) {
    if (run_at(adapters, ranks, j, j + 1).rank == 0) continue;
    const float sum = square_sum(x + (u64)j * E, E, warp, lane);
    if (lane == 0) squares[j][warp] = sum;
  }
}

DEVICE float4 four_of(const float *row, int i) { return ((const float4 *)row)[i]; }

// A row of A, `a` [E], times the run's rows; `hidden` is that of the first row and this number.
DEVICE void multiply(float *hidden, const float *a, const Rows &all, const Run &run, int lane) {
  float sums[ROWS];
#pragma unroll
  for (int j = 0; j < ROWS; j++) sums[j] = 0.0f;
#pragma unroll 2
  for (int i = lane; i < E / 4; i += 32) {
    const float4 w = four_of(a, i);
#if NORM
    const float4 n = four_of(all.norm, i);
#endif
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      if (!contains(run, j)) continue;
      float4 v = four_of(all.x + (u64)j * E, i);
#if NORM
      const float inverse = all.inverse[j];
      v = make_float4(normed(v.x, inverse, n.x), normed(v.y, inverse, n.y), normed(v.z, inverse, n.z), normed(v.w, inverse, n.w));
#endif
      sums[j] = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, fmaf(w.x, v.x, sums[j]))));
    }
  }
#pragma unroll
  for (int j = 0; j < ROWS; j++) {
    if (!contains(run, j)) continue;
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sums[j] += __shfl_xor_sync(ALL_LANES, sums[j], distance);
    if (lane == 0) hidden[(u64)j * HIDDEN] = sums[j];
  }
}
