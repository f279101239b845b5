// prepared = norm(x[row_index]), rounded to 16 bits and laid out as matmul_hopper.cu reads it; without norm and gather, x itself
//
//   prepared   [I/32][G][4][8 tokens][16 bytes]: of a block of 32 columns all tokens, so that a run of tokens is one copy; numbers
//              8i..8i+7 of the block are the token's in core matrix i (hopper.cuh). G is T / 8 rounded up to GROUPS_MULTIPLE, so that
//              there are whole tiles of 128 and of 192 tokens
//   x          [T, I] float32; [any, I] if GATHER
//   norm       [I] float32, if NORM: RMS norm with EPS
//   row_index  [T] int32, if GATHER: token t is row row_index[t] of x, or zeros if that is negative
//   rows       [1] int32     number of tokens, 0 to T
//
// Whole groups of eight tokens are written: tokens from rows[0] on are zeros. Groups that start at or after rows[0] are not touched. WEIGHT
// is BF16 or F16, the format of the weights. T % 8 == 0, I % 32 == 0. The text does not depend on T, which is the size of the grid.
//
// Launch: grid (T / 8, any, 1), 256 threads, no dynamic shared memory. Unit of work: a thread block has a group of eight tokens, and every
// gridDim.y-th run of eight blocks of columns, one for each warp: a warp reads 128 bytes of each token, and writes 512 bytes in a row. A
// token a block, as quantize_input.cu has it, would write pieces of sixteen bytes: it took 1.8 times as long (4096 x 4096, H100). The norm
// of token w is computed by warp w, in norm.cuh's order.
#include "input_rows.cuh"
#include "norm.cuh"
#include "product.cuh"

constexpr int BLOCKS = I / STEP, TOKENS_OF_GROUP = 8;
constexpr int AT_ONCE = 4;  // blocks that are read before they are written: after a write the compiler must wait before it reads
static_assert(I % STEP == 0, "quantize_cores: I must be a multiple of 32");
static_assert(!QUANTIZED, "quantize_cores: WEIGHT must be BF16 or F16");

struct Row {
  const float *x;
  float inverse;
  bool valid;
};

DEVICE float row_inverse(const float *x, int lane);
DEVICE void normed_eight(float (&v)[8], const Row &row, const float *norm, int column);

extern "C" __global__ void __launch_bounds__(256)
    quantize_cores(uint4 *prepared, const float *x, NORM_ARGUMENT INDEX_ARGUMENT const int *rows) {
  await_previous();
  const int group = blockIdx.x, first = group * TOKENS_OF_GROUP, warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = rows[0];
  if (first >= count) return;
  const int token = first + lane % TOKENS_OF_GROUP;
#if GATHER
  const int from = token < count ? row_index[token] : -1;
#else
  const int from = token < count ? token : -1;
#endif
  Row row = {x + (u64)max(from, 0) * I, 1.0f, from >= 0};
#if NORM
  static __shared__ float inverses[TOKENS_OF_GROUP];
  const int own = __shfl_sync(ALL_LANES, from, warp);
  if (own >= 0) {
    const float inverse = row_inverse(x + (u64)own * I, lane);
    if (lane == 0) inverses[warp] = inverse;
  }
  __syncthreads();
  if (row.valid) row.inverse = inverses[lane % TOKENS_OF_GROUP];
#else
  const float *norm = nullptr;
#endif
  const int groups = (gridDim.x + GROUPS_MULTIPLE - 1) / GROUPS_MULTIPLE * GROUPS_MULTIPLE, pitch = gridDim.y * 8;
  for (int block = blockIdx.y * 8 + warp; block < BLOCKS; block += AT_ONCE * pitch) {
    float v[AT_ONCE][8] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (row.valid && block + i * pitch < BLOCKS) normed_eight(v[i], row, norm, (block + i * pitch) * STEP + lane / TOKENS_OF_GROUP * 8);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (block + i * pitch < BLOCKS) prepared[((u64)(block + i * pitch) * groups + group) * 32 + lane] = round_cell(v[i]);
  }
}

// Of a row, by one warp.
DEVICE float row_inverse(const float *x, int lane) {
  float sums[NORM_WARPS];
#pragma unroll
  for (int part = 0; part < NORM_WARPS; part++) sums[part] = square_sum(x, I, part, lane);
  return inverse_root(sums, I, EPS);
}

DEVICE void read_eight(float (&v)[8], const float *from) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = *(const float4 *)(from + i);
    v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
  }
}

// Eight consecutive numbers of a row.
DEVICE void normed_eight(float (&v)[8], const Row &row, const float *norm, int column) {
  read_eight(v, row.x + column);
#if NORM
  float weight[8];
  read_eight(weight, norm + column);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = normed(v[i], row.inverse, weight[i]);
#endif
}
