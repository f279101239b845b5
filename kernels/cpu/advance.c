// position += 1, slot = block_tables[position / S] * S + position % S: the decode state moves to the sampled tokens without a host round trip
//
//   tokens        [B] int32     becomes max(sampled, 0): -1 says that a row's logits were unusable, which the host reads in `history`
//   positions     [B] int32     incremented
//   slots         [B] int32     where the token's keys and values go: NO_SLOT (negative: nowhere) when the sequence's blocks are all full
//   context_lens  [B] int32     incremented
//   history       [N, B] int32  row round[0] becomes sampled
//   round         [1] int32     incremented; from N on nothing is recorded
//   sampled       [B] int32
//   block_tables  [B, M] int32
//   count         [1] int32     sequences that count, the first ones; the others are unchanged
//
// Thread 0 does all of it: it is a few hundred bytes.
#include "thread_team.h"

static void advance(int32_t *tokens, int32_t *positions, int32_t *slots, int32_t *context_lens, int32_t *history, int32_t *round,
                    const int32_t *sampled, const int32_t *block_tables, const int32_t *count, const struct thread_team *team) {
  if (team->thread > 0) return;
  for (int b = 0; b < count[0]; b++) {
    const int position = positions[b] + 1, block = position / S;
    if (round[0] < N) history[round[0] * B + b] = sampled[b];
    tokens[b] = sampled[b] < 0 ? 0 : sampled[b];
    positions[b] = position;
    context_lens[b] += 1;
    slots[b] = block < M ? block_tables[b * M + block] * S + position % S : NO_SLOT;
  }
  __atomic_store_n(round, round[0] + 1, __ATOMIC_RELEASE);  // the host may be polling: what `round` counts is written
}
