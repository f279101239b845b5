// out = the logits of all ranks side by side: the end of a head whose rows are divided among WORLD ranks
//
//   out     [N, V] float32     written by rank 0 alone: no other rank draws
//   turns   [2] uint32         meeting.cuh
//   site0...                   meeting.cuh: the sites of all ranks; this one writes its logits into its own
//   shared  [1] uint32         meeting.cuh
//   part    [N, COLUMNS] float32   this rank's logits
//   count   [1] int32          how many n there are, 0 to N; further rows of out are unchanged. The same in all ranks
//
// Rank r has the sixteens of the vocabulary from r S / WORLD to (r + 1) S / WORLD, rounded down, of S = ceil(V / 16); COLUMNS are this rank's.
// No more than PLACE. A round takes as many rows as fit a place. The text does not depend on N.
//
// Launch: grid (BLOCKS, 1, 1), 256 threads, no dynamic shared memory. BLOCKS = ceil(N V / (1024 WORLD)), at most 64; the same in all ranks.
// Unit of work: block b has the same columns of all ranks, 256 in turn with the other blocks: shares would need a division, which is a call.
#include "meeting.cuh"

constexpr int SIXTEENS = (V + 15) / 16;

DEVICE int first_of(int rank) { return rank == WORLD ? V : rank * SIXTEENS / WORLD * 16; }
DEVICE int columns_of(int rank) { return min(first_of(rank + 1), V) - first_of(rank); }

constexpr int MOST_COLUMNS = (SIXTEENS + WORLD - 1) / WORLD * 16;  // of a rank
constexpr int ROWS = PLACE / MOST_COLUMNS;                         // of a round
static_assert(ROWS > 0, "gather_logits: a row does not fit PLACE");

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_logits(float *out, u32 *turns, SITE_ARGUMENTS const u32 *shared, const float *part, const int *count) {
  await_previous();
  u8 *const sites[WORLD] = SITES;
  const u32 turn = turns[0];
  const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  const int all = count[0], rounds = (all + ROWS - 1) / ROWS;
  for (int round = 0; round < rounds; round++) {
    const int start = round * ROWS, end = min(all, start + ROWS);
    float *own = (float *)place_of(sites[RANK], turn + round);
    for (int n = start; RANK > 0 && n < end; n++)
      for (int i = first; i < COLUMNS; i += step) own[(u64)(n - start) * COLUMNS + i] = part[(u64)n * COLUMNS + i];
    meet(sites, shared, turn + round);
#pragma unroll
    for (int r = 0; r < WORLD; r++) {
      if (RANK > 0) break;
      const int columns = columns_of(r);
      const float *place = (const float *)place_of(sites[r], turn + round);
      for (int n = start; n < end; n++)
        for (int i = first; i < columns; i += step) {
          out[(u64)n * V + first_of(r) + i] = r == 0 ? part[(u64)n * COLUMNS + i] : load_fresh(place + (u64)(n - start) * columns + i);
        }
    }
  }
  end_rounds(turns, turn, rounds);
}
