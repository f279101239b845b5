// out = the rows of all ranks in their order, of which each has computed its own (rank_rows.cuh)
//
//   out     [T, E] float32
//   turns, site0... meeting.cuh: the sites of all ranks; this one writes its rows into its own
//   shared  [1] uint32                     meeting.cuh
//   part    [ceil(T / WORLD), E] float32   this rank's rows
//   rows    [1] int32                      how many rows of out there are, 0 to T; further rows are unchanged. The same in all ranks
//
// E % 4 == 0, E <= PLACE. A round takes as many rows of each rank as fit a place. The text does not depend on T.
//
// Launch: grid (BLOCKS, 1, 1), 256 threads, no dynamic shared memory. BLOCKS = ceil(T E / (1024 WORLD)), at most 64; the same in all ranks.
// Unit of work: a thread has four numbers of a row of each rank at a time, the same of all of them.
#include "meeting.cuh"
#include "rank_rows.cuh"

constexpr int FOURS = E / 4, ROWS = PLACE / E;  // of a row; rows of a round
constexpr int LOADS = 4;                        // that a thread has under way: one takes a microsecond or two
static_assert(E % 4 == 0 && ROWS > 0, "gather_rows: a row does not fit PLACE");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gather_rows(float4 *out, u32 *turns, SITE_ARGUMENTS const u32 *shared, const float4 *part, const int *rows) {
  await_previous();
  u8 *const sites[WORLD] = SITES;
  const u32 turn = turns[0];
  const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  const int all = rows[0], most = (all + WORLD - 1) / WORLD, rounds = (most + ROWS - 1) / ROWS;
  for (int round = 0; round < rounds; round++) {
    const int start = round * ROWS;
    float4 *own = place_of(sites[RANK], turn + round);
    for (int i = first; i < min(ROWS, rows_of(RANK, all) - start) * FOURS; i += step) own[i] = part[(s64)start * FOURS + i];
    meet(sites, shared, turn + round);
#pragma unroll
    for (int r = 0; r < WORLD; r++) {
      const float4 *place = place_of(sites[r], turn + round);
      float4 *to = out + (s64)(first_row_of(r, all) + start) * FOURS;
      const int size = min(ROWS, rows_of(r, all) - start) * FOURS;
      for (int base = first; base < size; base += LOADS * step) {
        float4 y[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
          const int i = min(base + j * step, size - 1);
          y[j] = r == RANK ? part[(s64)start * FOURS + i] : load_fresh(place + i);
        }
#pragma unroll
        for (int j = 0; j < LOADS; j++)
          if (base + j * step < size) to[base + j * step] = y[j];
      }
    }
  }
  end_rounds(turns, turn, rounds);
}
