// Moves the decode state to the next position after tokens were sampled: the next step starts from it without a host round trip.
//
//   tokens        [B] int32          becomes max(sampled, 0): -1 means that a row's logits had no token to draw; the host reads that in
//                                    `history`
//   positions     [B] int32          incremented
//   slots         [B] int32          slot of the token's keys and values: NO_SLOT (negative: nowhere) when all of the sequence's blocks are full
//   context_lens  [B] int32          incremented
//   history       [ROUNDS, B] int32  row round[0] becomes sampled
//   round         [1] int32          incremented; from ROUNDS on nothing is recorded
//   sampled       [B] int32
//   block_tables  [B, M] int32
//   count         [1] int32          number of valid sequences, the first ones; the others are not changed
//
// Grid (1), THREADS threads, 32 to 1024: the host takes B rounded up to a multiple of 32, at most 1024. A thread takes a sequence. Integers
// only. The host may read all this once the command buffer has completed, not before.
#include "gpu.h"

[[max_total_threads_per_threadgroup(THREADS)]] kernel void advance(device int *tokens, device int *positions, device int *slots,
                                                                   device int *context_lens, device int *history, device int *round,
                                                                   device const int *sampled, device const int *block_tables,
                                                                   device const int *count, uint index [[thread_index_in_threadgroup]]) {
  const int turn = round[0];
  for (int b = int(index); b < count[0]; b += THREADS) {
    const int position = positions[b] + 1, block = position / S, token = sampled[b];
    if (turn < ROUNDS) history[turn * B + b] = token;
    tokens[b] = max(token, 0);
    positions[b] = position;
    context_lens[b] += 1;
    slots[b] = block < M ? block_tables[b * M + block] * S + position % S : NO_SLOT;
  }
  threadgroup_barrier(mem_flags::mem_device);  // all have read `round`
  if (index == 0) round[0] = turn + 1;
}
