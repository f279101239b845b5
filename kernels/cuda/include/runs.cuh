// What the headers of formats share whose quants are runs of 32 bytes, which the steps of a block read in turn. RUNS_AT, if a format's are: the
// byte of a block at which they begin.
#pragma once
#include "step_weights.cuh"

#ifdef RUNS_AT
typedef uint4 Chunk;
DEVICE constexpr int last_step(int chunk) { return (chunk + 1) * (BLOCK / 32 / CHUNKS) - 1; }
DEVICE constexpr int file_chunk(int i) { return RUNS_AT + 32 * i; }
#endif
