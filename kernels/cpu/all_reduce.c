// out = the sum of all ranks' parts + bias + residual: the end of a product whose columns are divided among WORLD ranks
//
//   out       [T, O] float32
//   shared    meeting.h: the memory of all ranks; this one writes its part into its place
//   part      [T, O] float32   this rank's slices of the product (matmul.c)
//   bias      [O] float32, if BIAS
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        how many rows there are, 0 to T; further rows of out are unchanged. The same in all ranks
//
// O % 16 == 0, T O <= PLACE. Parts are added in the tree of slices.h, then bias and residual as matmul.c adds them. A row is a unit of work.
// The place of one rank is read by all others from its core's cache; no rank writes where another does.
#include "rank_sums.h"

#include "arguments.h"  // the last one

#define UNITS ((O + UNIT_COLUMNS - 1) / UNIT_COLUMNS)

static void all_reduce(float *out, uint8_t *shared, const float *part, BIAS_ARGUMENT RESIDUAL_ARGUMENT const int32_t *rows,
                       const struct thread_team *team) {
  struct meeting *meeting = (struct meeting *)shared;
  const unsigned turn = turn_of(meeting);
  float *places = places_of(shared, turn);
  write_sums(places, part, (long)rows[0] * O, team);
  meet(meeting, turn, team);
  for (int unit = next_unit(team); unit < rows[0] * UNITS; unit = next_unit(team)) {
    const int first = unit % UNITS * UNIT_COLUMNS, end = first + UNIT_COLUMNS < O ? first + UNIT_COLUMNS : O;
    for (int o = first; o < end; o += 16) {
      const long at = (long)(unit / UNITS) * O + o;
      v16 y = sum_of_ranks(places, at);
      if (BIAS) y = v16_add(y, v16_load(bias + o));
      v16_store(out + at, RESIDUAL ? v16_add(y, v16_load(residual + at)) : y);
    }
  }
}
