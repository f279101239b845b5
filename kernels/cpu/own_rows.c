// out = the rows of x that this rank computes alone (rank_rows.h)
//
//   out    [ceil(T / WORLD), N] float32
//   count  [1] int32     how many there are; further rows of out are unchanged
//   x      [T, N] float32
//   rows   [1] int32     how many rows of x there are, 0 to T
//
// N % 16 == 0. A row is a unit of work.
#include "lanes.h"
#include "rank_rows.h"
#include "thread_team.h"

static void own_rows(float *out, int32_t *count, const float *x, const int32_t *rows, const struct thread_team *team) {
  const int first = first_row_of(RANK, rows[0]), own = rows_of(RANK, rows[0]);
  if (team->thread == 0) count[0] = own;
  for (int t = next_unit(team); t < own; t = next_unit(team))
    for (int n = 0; n < N; n += 16) v16_store(out + (long)t * N + n, v16_load(x + (long)(first + t) * N + n));
}
