// The state of a decode step after its tokens were sampled: what the next step starts from, with no way back through Python.
//
//   tokens        [B] int32          becomes max(sampled, 0): -1 says that a row's logits were of no use, which the host reads in `history`
//   positions     [B] int32          one further
//   slots         [B] int32          where the token's keys and values go: SCRATCH_SLOT when the sequence's blocks are all full
//   context_lens  [B] int32          one longer
//   history       [ROUNDS, B] int32  row round[0] becomes sampled
//   round         [1] int32          one further; from ROUNDS on nothing is recorded
//   sampled       [B] int32
//   block_tables  [B, M] int32
//   count         [1] int32          sequences that are meant, the first ones; the others stay as they are
//
// One block of threads, 32 to 1024: the host takes B counted up to a multiple of 32, at most 1024. A thread moves a sequence on.
#include "gpu.cuh"

extern "C" __global__ void __launch_bounds__(1024)
advance(int *tokens, int *positions, int *slots, int *context_lens, int *history, int *round, const int *sampled, const int *block_tables,
        const int *count) {
  const int turn = round[0];
  for (int b = threadIdx.x; b < count[0]; b += blockDim.x) {
    const int position = positions[b] + 1, block = position / S, token = sampled[b];
    if (turn < ROUNDS) history[turn * B + b] = token;
    tokens[b] = token < 0 ? 0 : token;
    positions[b] = position;
    context_lens[b] += 1;
    slots[b] = block < M ? block_tables[b * M + block] * S + position % S : SCRATCH_SLOT;
  }
  __syncthreads();  // all have read `round`
  if (threadIdx.x == 0) round[0] = turn + 1;
}
