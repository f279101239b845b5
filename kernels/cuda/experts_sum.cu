// out = residual + the sum over a row's C experts of share * (outputs + bias), c ascending: the end of a mixture of experts
//
//   out       [T, E] float32     does not alias outputs or residual
//   outputs   [T C, E] float32   of pair t C + c
//   bias      [X E] float32, if BIAS: where ranks divide the product, which otherwise adds it (matmul.cu)
//   shares    [T, C] float32
//   chosen    [T, C] int32       the expert of each pair, if BIAS
//   residual  [T, E] float32, if RESIDUAL
//   rows      [1] int32          how many rows there are, 0 to T; further rows of out are unchanged
//
// E % 4 == 0. The first share times its output, then fma for each of the others, then + residual. The text does not depend on T.
//
// Launch: grid (T, ceil(E / 1024), 1), 256 threads, no dynamic shared memory. Unit of work: a thread has four columns of a row.
#include "addends.cuh"
#include "gpu.cuh"

constexpr int THREADS = 256;
static_assert(E % 4 == 0, "experts_sum: E must be a multiple of 4");

#if BIAS
#define CHOSEN_ARGUMENT const int *chosen,
#else
#define CHOSEN_ARGUMENT
#endif

DEVICE float4 load_4(const float *at) { return *(const float4 *)at; }
DEVICE float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

extern "C" __global__ void __launch_bounds__(THREADS)
    experts_sum(float *out, const float *outputs, BIAS_ARGUMENT const float *shares, CHOSEN_ARGUMENT RESIDUAL_ARGUMENT const int *rows) {
  await_previous();
  const int t = blockIdx.x, column = (blockIdx.y * THREADS + threadIdx.x) * 4;
  if (t >= rows[0] || column >= E) return;
  const float *own = outputs + (u64)t * C * E + column;
  const auto output = [&](int c) {
    float4 y = load_4(own + (u64)c * E);
#if BIAS
    y = plus(y, load_4(bias + (u64)chosen[(u64)t * C + c] * E + column));
#endif
    return y;
  };
  float share = shares[(u64)t * C];
  const float4 first = output(0);
  float4 sum = make_float4(share * first.x, share * first.y, share * first.z, share * first.w);
#pragma unroll 8
  for (int c = 1; c < C; c++) {
    const float4 next = output(c);
    share = shares[(u64)t * C + c];
    sum = make_float4(fmaf(share, next.x, sum.x), fmaf(share, next.y, sum.y), fmaf(share, next.z, sum.z), fmaf(share, next.w, sum.w));
  }
#if RESIDUAL
  sum = plus(sum, load_4(residual + (u64)t * E + column));
#endif
  *(float4 *)(out + (u64)t * E + column) = sum;
}
