// out = the rows of all ranks in their order, of which each has computed its own (rank_rows.h)
//
//   out     [T, N] float32
//   shared  meeting.h: the memory of all ranks; this one writes its rows into its place
//   part    [ceil(T / WORLD), N] float32   this rank's rows
//   rows    [1] int32                      how many rows of out there are, 0 to T; further rows are unchanged. The same in all ranks
//
// N % 16 == 0, ceil(T / WORLD) N <= PLACE. A row is a unit of work.
#include "lanes.h"
#include "meeting.h"
#include "rank_rows.h"

static inline void copy_row(float *to, const float *from);

static void gather_rows(float *out, uint8_t *shared, const float *part, const int32_t *rows, const struct thread_team *team) {
  struct meeting *meeting = (struct meeting *)shared;
  const unsigned turn = turn_of(meeting);
  float *places = (float *)(shared + MEETING_BYTES) + (long)(turn % 2) * WORLD * PLACE, *own = places + (long)RANK * PLACE;
  for (int t = next_unit(team); t < rows_of(RANK, rows[0]); t = next_unit(team)) copy_row(own + (long)t * N, part + (long)t * N);
  meet(meeting, turn, team);
  for (int t = next_unit(team), rank = 0; t < rows[0]; t = next_unit(team)) {
    while (t >= first_row_of(rank + 1, rows[0])) rank++;
    copy_row(out + (long)t * N, places + (long)rank * PLACE + (long)(t - first_row_of(rank, rows[0])) * N);
  }
}

static inline void copy_row(float *to, const float *from) {
  for (int n = 0; n < N; n += 16) v16_store(to + n, v16_load(from + n));
}
