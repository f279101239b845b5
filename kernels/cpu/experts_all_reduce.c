// out = residual + the sum over a row's C experts of share * (the sum of all ranks' parts + bias), c ascending: the end of a mixture of experts
// whose columns are divided among WORLD ranks
//
//   out       [T, E] float32
//   shared    meeting.h: the memory of all ranks; this one writes its parts into its place
//   part      [T C, E] float32  of pair t C + c (experts.h): this rank's slices of the product (experts_down.c)
//   bias      [X E] float32, if BIAS
//   shares    [T, C] float32
//   chosen    [T, C] int32      the expert of each pair; read if BIAS
//   residual  [T, E] float32, if RESIDUAL
//   rows      [1] int32         how many rows there are, 0 to T; further rows of out are unchanged. The same in all ranks
//
// E % 16 == 0, C E <= PLACE. Parts are added in the tree of slices.h, then bias, shares and residual as in experts_down.c. Ranks meet once for
// each ROWS rows, whose sums stay in caches. UNIT_COLUMNS of a row are a unit of work.
#include "rank_sums.h"

#include "arguments.h"  // the last one

#define MOST (1 << 18)  // float32 of a rank between two meetings
#define ROWS ((PLACE < MOST ? PLACE : MOST) / (C * E) > 0 ? (PLACE < MOST ? PLACE : MOST) / (C * E) : 1)
#define UNITS ((E + UNIT_COLUMNS - 1) / UNIT_COLUMNS)
_Static_assert((long)C *E <= PLACE, "the pairs of a row have a place");

static inline void add_up(float *out, const float *places, const float *biases, const float *shares, const int32_t *chosen,
                          const float *residuals, int from);

static void experts_all_reduce(float *out, uint8_t *shared, const float *part, BIAS_ARGUMENT const float *shares, const int32_t *chosen,
                               RESIDUAL_ARGUMENT const int32_t *rows, const struct thread_team *team) {
  struct meeting *meeting = (struct meeting *)shared;
  unsigned turn = turn_of(meeting);
  for (long from = 0; from < rows[0]; from += ROWS, turn++) {
    const int count = rows[0] - from < ROWS ? rows[0] - from : ROWS;
    float *places = places_of(shared, turn);
    write_sums(places, part + from * C * E, (long)count * C * E, team);
    meet(meeting, turn, team);
    for (int unit = next_unit(team); unit < count * UNITS; unit = next_unit(team)) {
      const long t = from + unit / UNITS;
      add_up(out + t * E, places + (long)(unit / UNITS) * C * E, bias, shares + t * C, chosen + t * C, RESIDUAL ? residual + t * E : 0,
             unit % UNITS * UNIT_COLUMNS);
    }
    barrier(team);  // units count from 0 again
  }
}

// UNIT_COLUMNS of a row from column `from` on, or what is left of E; `places` begin at the row's first pair.
static inline void add_up(float *out, const float *places, const float *biases, const float *shares, const int32_t *chosen,
                          const float *residuals, int from) {
  for (int o = from; o < E && o < from + UNIT_COLUMNS; o += 16) {
    v16 sum = v16_set(0.0f);
    for (int c = 0; c < C; c++) {
      v16 y = sum_of_ranks(places, (long)c * E + o);
      if (BIAS) y = v16_add(y, v16_load(biases + (long)chosen[c] * E + o));
      sum = c == 0 ? v16_mul(v16_set(shares[c]), y) : v16_fma(v16_set(shares[c]), y, sum);
    }
    v16_store(out + o, RESIDUAL ? v16_add(sum, v16_load(residuals + o)) : sum);
  }
}
