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
// Grid (1), THREADS threads, 32 to 1024: the host takes B counted up to a multiple of 32, at most 1024. A thread moves a sequence on. The
// host may read all this once the command buffer is done, not before.
#include "gpu.h"

kernel void advance(device int *tokens, device int *positions, device int *slots, device int *context_lens, device int *history,
                    device int *round, device const int *sampled, device const int *block_tables, device const int *count,
                    uint at [[thread_index_in_threadgroup]]) {
  const int turn = round[0];
  for (int b = int(at); b < count[0]; b += THREADS) {
    const int position = positions[b] + 1, block = position / S, token = sampled[b];
    if (turn < ROUNDS) history[turn * B + b] = token;
    tokens[b] = max(token, 0);
    positions[b] = position;
    context_lens[b] += 1;
    slots[b] = block < M ? block_tables[b * M + block] * S + position % S : SCRATCH_SLOT;
  }
  threadgroup_barrier(mem_flags::mem_device);  // all have read `round`
  if (at == 0) round[0] = turn + 1;
}
