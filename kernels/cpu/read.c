// sink[thread] = the OR of the words that a thread has read: how fast memory can be read, the roof of all kernels that stream weights.
//
//   sink   [64] uint64
//   words  [N] uint64    N a multiple of 1024, on a 64-byte boundary
//
// A unit is UNIT words, read as one stream with prefetch ahead, as the products read their panels.
#include "thread_team.h"

#define UNIT 131072L

typedef uint64_t words8 __attribute__((vector_size(64), aligned(64)));

static void read(uint64_t *sink, const uint64_t *words, const struct thread_team *team) {
  words8 a = {0}, b = a, c = a, d = a;
  for (long unit = next_unit(team); unit < (N + UNIT - 1) / UNIT; unit = next_unit(team)) {
    const uint64_t *from = words + unit * UNIT, *to = (unit + 1) * UNIT < N ? from + UNIT : words + N;
    for (; from < to; from += 32) {
      for (int i = 0; i < 4; i++) __builtin_prefetch(from + 512 + 8 * i);
      a |= *(const words8 *)from;
      b |= *(const words8 *)(from + 8);
      c |= *(const words8 *)(from + 16);
      d |= *(const words8 *)(from + 24);
    }
  }
  a |= b | c | d;
  sink[team->thread] = a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6] | a[7];
}
