// out = bias + B . hidden, B that of the row's adapter: the bias that low-rank adapters make of a product's input, from its ranks
//
//   out       [T, O] float32         a bias of each row; of a row without adapter `bias`, or -0 without BIAS: y + -0 has the bits of y
//   hidden    [T, PARTS R] float32   A . norm(x) of each projection (lora_shrink.cu)
//   b         [N, R, O] float32      of each adapter, with its scale in it
//   ranks     [N] int32              of each adapter in this product, up to R; 0 if it does not change it
//   bias      [O] float32, if BIAS
//   adapters  [T] int32              n for adapter n - 1, 0 for none
//   rows      [1] int32              how many rows of x there are, 0 to T; further rows of out are unchanged
//
// O % 16 == 0. The outputs of the second of the PARTS projections begin at SECOND, of the third at THIRD, of the fourth at FOURTH, multiples
// of 16. All in float32, a row's sums in one order whatever the other rows are: over ranks ascending with fma, then + bias. ROWS is the host's
// choice.
//
// Launch: grid (ceil(T / ROWS), ceil(O / 512), 1), 128 threads, no dynamic shared memory. Unit of work: a thread has four outputs of ROWS
// rows; it reads B once for neighbours with one adapter.
#include "adapters.cuh"

constexpr int THREADS = 128, HIDDEN = PARTS * R;
static_assert(O % 16 == 0, "lora_bias: O must be a multiple of 16");

#ifndef SECOND
#define SECOND O
#endif
#ifndef THIRD
#define THIRD O
#endif
#ifndef FOURTH
#define FOURTH O
#endif
#if BIAS
#define BIAS_ARGUMENT const float *bias,
#define BIAS_AT(o) (*(const float4 *)(bias + (o)))
#else
#define BIAS_ARGUMENT
#define BIAS_AT(o) make_float4(-0.0f, -0.0f, -0.0f, -0.0f)
#endif

DEVICE void multiply(float4 (&sums)[ROWS], const float *b, const float *hidden, const Run &run);

extern "C" __global__ void __launch_bounds__(THREADS)
    lora_bias(float *out, const float *hidden, const float *b, const int *ranks, BIAS_ARGUMENT const int *adapters, const int *rows) {
  await_previous();
  const int first = blockIdx.x * ROWS, count = min(rows[0] - first, ROWS), o = (blockIdx.y * THREADS + threadIdx.x) * 4;
  if (count <= 0 || o >= O) return;
  const float4 start = BIAS_AT(o);
  adapters += first, out += (u64)first * O + o;
  hidden += (u64)first * HIDDEN + ((o >= SECOND) + (o >= THIRD) + (o >= FOURTH)) * R;
  for (int row = 0; row < count;) {
    const Run run = run_at(adapters, ranks, row, count);
    row = run.end;
    float4 sums[ROWS];
    multiply(sums, b + (u64)max(run.adapter, 0) * R * O + o, hidden, run);
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      if (!contains(run, j)) continue;
      const float4 s = sums[j];
      *(float4 *)(out + (u64)j * O) = run.rank > 0 ? make_float4(s.x + start.x, s.y + start.y, s.z + start.z, s.w + start.w) : start;
    }
  }
}

// Four columns of B times the ranks of the run's rows.
DEVICE void multiply(float4 (&sums)[ROWS], const float *b, const float *hidden, const Run &run) {
#pragma unroll
  for (int j = 0; j < ROWS; j++) sums[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int r = 0; r < run.rank; r++) {
    const float4 w = *(const float4 *)(b + (u64)r * O);
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      if (!contains(run, j)) continue;
      const float h = hidden[(u64)j * HIDDEN + r];
      sums[j] = make_float4(fmaf(h, w.x, sums[j].x), fmaf(h, w.y, sums[j].y), fmaf(h, w.z, sums[j].z), fmaf(h, w.w, sums[j].w));
    }
  }
}
