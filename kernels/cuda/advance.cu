// Advances the state of a decode step after its tokens were sampled: the next step starts from it without a host round trip.
//
//   tokens        [B] int32          becomes max(sampled, 0): -1 means that a row's logits were unusable, which the host reads in `history`
//   positions     [B] int32          + 1
//   slots         [B] int32          where the token's keys and values are stored: NO_SLOT (negative: nowhere) when all blocks of the sequence are full
//   context_lens  [B] int32          + 1
//   history       [ROUNDS, B] int32  row round[0] becomes sampled
//   round         [1] int32          + 1; from ROUNDS on nothing is recorded
//   sampled       [B] int32
//   block_tables  [B, M] int32
//   count         [1] int32          number of sequences; the state of later ones is not touched
//   B             integer            rows of the batch; the text does not depend on it
//
// Launch: one thread block of 32 to 1024 threads: the host takes B rounded up to a multiple of 32, at most 1024. Unit of work: a thread
// advances a sequence.
#include "gpu.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    advance(int *tokens, int *positions, int *slots, int *context_lens, int *history, int *round, const int *sampled,
            const int *block_tables, const int *count, int B) {
  await_previous();
  const int row = round[0];
  for (int b = threadIdx.x; b < count[0]; b += blockDim.x) {
    const int position = positions[b] + 1, block = position / S, token = sampled[b];
    if (row < ROUNDS) history[row * B + b] = token;
    tokens[b] = token < 0 ? 0 : token;
    positions[b] = position;
    context_lens[b] += 1;
    slots[b] = block < M ? block_tables[b * M + block] * S + position % S : NO_SLOT;
  }
  __syncthreads();  // all have read `round`
  if (threadIdx.x == 0) round[0] = row + 1;
}
