// pool[to] = pool[from] for pairs of blocks: forks of a sequence that write into a block they share.
//
//   pool   [P, BLOCK_BYTES]   one layer's blocks, keys and values, of any dtype; written in place
//   pairs  [N, 2] int32       from, to; no block is in two pairs
//   count  [1] int32          pairs that count, at most N
//
// One pair is one unit of work.
#include "thread_team.h"

static void kv_copy(uint64_t *pool, const int32_t *pairs, const int32_t *count, const struct thread_team *team) {
  const int words = BLOCK_BYTES / 8;
  for (int n = next_unit(team); n < count[0]; n = next_unit(team)) {
    const uint64_t *from = pool + (long)pairs[2 * n] * words;
    uint64_t *to = pool + (long)pairs[2 * n + 1] * words;
    for (int i = 0; i < words; i++) to[i] = from[i];
  }
}
