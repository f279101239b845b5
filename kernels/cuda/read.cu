// sums[block] = the sum, modulo 2^32, of the words that a thread block has read: measures how fast memory can be read, the roof of
// everything that streams weights.
//
//   sums   [BLOCKS] uint32
//   words  [WORDS, 4] uint32  16-byte aligned
//
// Launch: grid (BLOCKS), 512 threads: two blocks a multiprocessor (264 on an H200), each thread with 8 loads of 16 bytes in flight: 128 KiB
// a multiprocessor. WORDS below 2^31.
#include "gpu.cuh"

constexpr int THREADS = 512, LOADS = 8;

DEVICE u32 sum_of(uint4 words) { return words.x + words.y + words.z + words.w; }
DEVICE u32 sum_of_block(u32 sum);

extern "C" __global__ void __launch_bounds__(THREADS, 2) read(u32 *sums, const uint4 *words) {
  await_previous();
  constexpr s64 UNIT = LOADS * THREADS, UNITS = WORDS / UNIT;
  u32 sum = 0;
  for (s64 unit = blockIdx.x; unit < UNITS; unit += BLOCKS) {
    uint4 loaded[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; k++) loaded[k] = load_once(words + unit * UNIT + k * THREADS + threadIdx.x);
#pragma unroll
    for (int k = 0; k < LOADS; k++) sum += sum_of(loaded[k]);
  }
  for (s64 i = UNITS * UNIT + blockIdx.x * THREADS + threadIdx.x; i < WORDS; i += BLOCKS * THREADS) sum += sum_of(load_once(words + i));
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

DEVICE u32 sum_of_block(u32 sum) {
  static __shared__ u32 warps[THREADS / 32];
  sum = __reduce_add_sync(ALL_LANES, sum);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < THREADS / 32; warp++) sum += warps[warp];
  return sum;
}
