// Which experts of a mixture each row has, with what shares: logits = rmsnorm(x) . weight^T; then route.cuh's choice
//
//   shares    [T, C] float32
//   chosen    [T, C] int32
//   gates     [T] float32          the sigmoid of one more logit, if SHARED_GATE
//   logits    [T, X + SHARED_GATE] float32   scratch
//   counters  [ceil(T / 4)] uint32           zero between launches: the last thread block of four rows resets theirs
//   x         [T, E] float32
//   norm      [E] float32          RMS norm's weights; EPS inside the root; not if NORM is 0
//   weight    [X, E] float32, in rows
//   gate      [1, E] float32, in a row, if SHARED_GATE
//   bias      [X] float32, if LOGIT_BIAS or CHOICE_BIAS
//   rows      [1] int32            how many rows of x there are, 0 to T; further rows of the results are unchanged
//
// E % 4 == 0, C <= X <= 1024. The norm in the order of norm.cuh. A logit: lane l of a warp has the float4s number l, l + 32, ... of the columns and adds
// their products by fma, ascending, x y z w within one; then lanes are added by a butterfly (16, 8, 4, 2, 1). The router is float32, and is multiplied
// without tensor cores: with a rounding another expert may be chosen. The text does not depend on T.
//
// Launch: grid (ceil((X + SHARED_GATE) / (8 EACH)), ceil(T / 4), 1), 256 threads, no dynamic shared memory. Unit of work: a warp has EACH experts (1, 2 or
// 4) with four rows; the last thread block of four rows to arrive chooses for them, a warp a row.
#include "input_rows.cuh"
#include "norm.cuh"
#include "route.cuh"

constexpr int ROWS = 4, WARPS = NORM_WARPS, THREADS = 32 * WARPS;  // of a thread block
static_assert(E % 4 == 0, "norm_route: E must be a multiple of 4");

#if SHARED_GATE
#define GATES_ARGUMENT float *gates,
#define GATE_ARGUMENT const float *gate,
#else
#define GATES_ARGUMENT
#define GATE_ARGUMENT
#endif
#if LOGIT_BIAS || CHOICE_BIAS
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#endif

// Rows of x of a thread block; of one that does not exist the last one's.
struct Rows {
  const float *x[ROWS], *norm;
  float inverse[ROWS];
};

DEVICE Rows rows_of_block(const float *x, const float *norm, int count);
DEVICE void write_logits(float *logits, const Rows &rows, const float *weight, const float *gate, int count);
DEVICE bool is_last(u32 *counter);

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    norm_route(float *shares, int *chosen, GATES_ARGUMENT float *logits, u32 *counters, const float *x, NORM_ARGUMENT const float *weight,
               GATE_ARGUMENT BIAS_ARGUMENT const int *rows) {
  await_previous();
#if !NORM
  const float *norm = nullptr;
#endif
#if !SHARED_GATE
  const float *gate = nullptr;
#endif
#if !(LOGIT_BIAS || CHOICE_BIAS)
  const float *bias = nullptr;
#endif
  static __shared__ Choice choices[ROWS];
  const int count = rows[0], first = blockIdx.y * ROWS;
  if (first >= count) return;
  write_logits(logits, rows_of_block(x, norm, count), weight, gate, count);
  if (!is_last(counters + blockIdx.y)) return;
  const int row = threadIdx.x / 32, t = first + row, lane = threadIdx.x % 32;
  if (row >= ROWS || t >= count) return;
  const float *own = logits + (u64)t * LOGITS;
#if SHARED_GATE
  if (lane == 0) gates[t] = sigmoid(own[X]);
#endif
  choose(choices[row], shares + (u64)t * C, chosen + (u64)t * C, own, bias, lane);
}

DEVICE Rows rows_of_block(const float *x, const float *norm, int count) {
  static __shared__ float sums[ROWS][NORM_WARPS];
  Rows rows;
  rows.norm = norm;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    rows.x[r] = x + (u64)min((int)blockIdx.y * ROWS + r, count - 1) * E;
    rows.inverse[r] = 1.0f;
  }
#if NORM
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float sum = square_sum(rows.x[r], E, warp, lane);
    if (lane == 0) sums[r][warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROWS; r++) rows.inverse[r] = inverse_root(sums[r], E, EPS);
#endif
  return rows;
}

DEVICE float add_four(float sum, float4 w, float4 x) { return fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, fmaf(w.x, x.x, sum)))); }

// Four numbers of a row from float4 number i on, normed.
DEVICE float4 four_of(const Rows &rows, int r, int i) {
  float4 x = ((const float4 *)rows.x[r])[i];
#if NORM
  const float4 w = ((const float4 *)rows.norm)[i];
  const float inverse = rows.inverse[r];
  x = make_float4(normed(x.x, inverse, w.x), normed(x.y, inverse, w.y), normed(x.z, inverse, w.z), normed(x.w, inverse, w.w));
#endif
  return x;
}

// The logits of a warp's experts for the block's rows.
DEVICE void write_logits(float *logits, const Rows &rows, const float *weight, const float *gate, int count) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * EACH;
  if (first >= LOGITS) return;
  const float *own[EACH];
  float sums[ROWS][EACH] = {};
#pragma unroll
  for (int e = 0; e < EACH; e++) own[e] = SHARED_GATE && first + e >= X ? gate : weight + (u64)min(first + e, X - 1) * E;
#pragma unroll 2
  for (int i = lane; i < E / 4; i += 32) {
    float4 w[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) w[e] = ((const float4 *)own[e])[i];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float4 four = four_of(rows, r, i);
#pragma unroll
      for (int e = 0; e < EACH; e++) sums[r][e] = add_four(sums[r][e], w[e], four);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS * EACH; i++) {
    const int r = i / EACH, e = i % EACH, t = blockIdx.y * ROWS + r;
    const float sum = sum_of_warp(sums[r][e]);
    if (lane == i && t < count && first + e < LOGITS) logits[(u64)t * LOGITS + first + e] = sum;
  }
}

// Whether this thread block is the last of its rows to arrive, and so sees all of their logits.
DEVICE bool is_last(u32 *counter) {
  static __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = arrive(counter) == gridDim.x - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}
