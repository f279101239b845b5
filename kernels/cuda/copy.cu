// copied = words: measures how fast memory can be copied, WORDS * 32 bytes a launch.
//
//   copied  [WORDS, 4] uint32   16-byte aligned, does not overlap words
//   words   [WORDS, 4] uint32   16-byte aligned
//
// Launch: grid (BLOCKS), 512 threads: two blocks a multiprocessor (264 on an H200), each thread with 8 loads of 16 bytes in flight: 128 KiB
// a multiprocessor. WORDS below 2^31.
#include "gpu.cuh"

constexpr int THREADS = 512, LOADS = 8;

extern "C" __global__ void __launch_bounds__(THREADS, 2) copy(uint4 *copied, const uint4 *words) {
  await_previous();
  constexpr s64 UNIT = LOADS * THREADS, UNITS = WORDS / UNIT;
  for (s64 unit = blockIdx.x; unit < UNITS; unit += BLOCKS) {
    const s64 first = unit * UNIT + threadIdx.x;
    uint4 loaded[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; k++) loaded[k] = load_once(words + first + k * THREADS);
#pragma unroll
    for (int k = 0; k < LOADS; k++) copied[first + k * THREADS] = loaded[k];
  }
  for (s64 i = UNITS * UNIT + blockIdx.x * THREADS + threadIdx.x; i < WORDS; i += BLOCKS * THREADS) copied[i] = load_once(words + i);
}
