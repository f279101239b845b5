// Where the lanes of a SIMD group hold the numbers of a matrix: gpu.h relies on a layout that Apple does not promise.
//
//   out      [3, 64] float32  the two numbers of each lane of a matrix that was loaded from `numbers`; what is stored of a matrix whose
//                             lanes hold numbers 2 * lane and 2 * lane + 1; and the first again, of half precision
//   numbers  [64] float32     read as an 8 by 8 matrix
//   halves   [64] float16     the same numbers
//
// Launch: one threadgroup of 32 threads.
#include "gpu.h"

[[max_total_threads_per_threadgroup(32)]] kernel void matrix_probe(device float *out [[buffer(0)]],
                                                                   device const float *numbers [[buffer(1)]],
                                                                   device const half *halves [[buffer(2)]],
                                                                   uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 loaded, written;
  simdgroup_half8x8 loaded_half;
  simdgroup_load(loaded, numbers, 8);
  simdgroup_load(loaded_half, halves, 8);
#pragma unroll
  for (uint i = 0; i < 2; i++) {
    out[2 * lane + i] = loaded.thread_elements()[i];
    out[128 + 2 * lane + i] = float(loaded_half.thread_elements()[i]);
    written.thread_elements()[i] = numbers[2 * lane + i];
  }
  simdgroup_store(written, out + 64, 8);
}
