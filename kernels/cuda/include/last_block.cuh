// The last of several thread blocks to arrive, which continues with what the others have left in memory.
#pragma once
#include "gpu.cuh"

// Adds `more` to a counter; true, in all threads, for the block that completes `expected`: it sees everything that the others wrote before
// theirs, and the counter is zero again. Called by all threads of a block.
DEVICE bool is_last_block(u32 *counter, u32 more, u32 expected) {
  static __shared__ u32 before;
  __syncthreads();
  if (threadIdx.x == 0) {
    before = arrive(counter, more);
    if (before == expected - more) *counter = 0;
  }
  __syncthreads();
  return before == expected - more;
}
