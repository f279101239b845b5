// out = (the sum of all ranks' parts + bias) * OUT_SCALE + residual, or norm(that sum) * OUT_SCALE + residual: the end of a product whose
// columns are divided among WORLD ranks
//
//   out       [T, O] float32
//   shared    meeting.h: the memory of all ranks; this one writes its part into its place
//   part      [T, O] float32   this rank's slices of the product (matmul.c)
//   bias      [O] float32, if BIAS; with BIAS_PITCH = O [T, O], a row's own (lora_bias.c)
//   out_norm  [O] float32, if OUT_NORM (outputs.h)
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        how many rows there are, 0 to T; further rows of out are unchanged. The same in all ranks
//
// O % 16 == 0, T O <= PLACE. Parts are added in the tree of slices.h, then bias and the rest as in matmul.c. UNIT_COLUMNS of a row are a unit of
// work, with OUT_NORM every row of out once more.
// The place of one rank is read by all others from its core's cache; no rank writes where another does.
#include "outputs.h"
#include "params.h"
#include "rank_sums.h"

#include "arguments.h"  // the last one

#define UNITS ((O + UNIT_COLUMNS - 1) / UNIT_COLUMNS)

static void all_reduce(float *out, uint8_t *shared, const float *part,
                       BIAS_ARGUMENT OUT_NORM_ARGUMENT RESIDUAL_ARGUMENT const int32_t *rows, const struct thread_team *team) {
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
      if (BIAS) y = v16_add(y, v16_load(bias + (long)(unit / UNITS) * BIAS_PITCH + o));
      v16_store(out + at, ADDS_AT_ONCE ? joined(y, residual + at) : y);
    }
  }
#ifdef OUT_NORM
  barrier(team);
  for (int t = next_unit(team); t < rows[0]; t = next_unit(team))
    norm_and_join(out + (long)t * O, out_norm, RESIDUAL ? residual + (long)t * O : 0, O);
#endif
}
