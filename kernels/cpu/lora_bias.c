// out = bias + B . (A . norm(x)), A and B those of the row's adapter: the bias that low-rank adapters make of a product's input
//
//   out       [T, O] float32            a bias of each row; of a row without adapter `bias`, or -0 without BIAS: y + -0 has the bits of y
//   scratch   [T, E + PARTS R] float32  a row's normed x, then A . norm(x)
//   shared    meeting.h, if WORLD ranks divide the columns of x: this one writes the lanes of its A . x into its place
//   x         [T, E] float32
//   norm      [E] float32, if NORM is RMS
//   a         [N, PARTS, R, E] float32  of each adapter and projection; zeros from the adapter's rank on
//   b         [N, R, O] float32         with the adapter's scale in it
//   ranks     [N] int32                 of each adapter in this product, up to R; 0 if it does not change it
//   bias      [O] float32, if BIAS
//   adapters  [T] int32                 n for adapter n - 1, 0 for none
//   rows      [1] int32                 how many rows of x there are, 0 to T; further rows of out are unchanged
//
// E % 16 == 0, O % 16 == 0, R % 4 == 0; with WORLD, 16 T PARTS R <= PLACE. The outputs of the second of the PARTS projections begin at
// SECOND, of the third at THIRD, of the fourth at FOURTH, multiples of 16. All in float32, a row's sums in one order whatever the other rows
// are: over x in sixteen lanes, ascending, then v16_sum; over ranks ascending; then + bias. Where the product's columns are in slices
// (slices.h; UNIT is that of the product's weight), so is the sum over x: lanes are added in the tree, then v16_sum. A row to norm is a unit
// of work, then four ranks of some rows, then some outputs of some rows. LoRA (Hu et al., 2021, arXiv:2106.09685); many adapters in one batch
// as in Punica (Chen et al., 2023, arXiv:2310.18547).
#include "params.h"
#include "spread.h"
#include "thread_team.h"
#ifdef WORLD
#include "rank_sums.h"
#endif
#define I E
#ifndef UNIT
#define UNIT 32
#endif
#include "slices.h"

#include "arguments.h"  // the last one

#define ROWS 4       // of a unit
#define OUTPUTS 256  // of a unit
#define SCRATCH (E + PARTS * R)
#define HIDDEN (PARTS * R)
#ifdef WORLD
#define SHARED_ARGUMENT uint8_t *shared,
#else
#define SHARED_ARGUMENT
#endif
#ifndef NORM
#define NORM RMS
#endif
#if NORM == NO_NORM
#define NORM_ARGUMENT
#define norm ((const float *)0)
#define EPS 0.0f
#else
#define NORM_ARGUMENT const float *norm,
#endif
#ifndef SECOND
#define SECOND O
#endif
#ifndef THIRD
#define THIRD O
#endif
#ifndef FOURTH
#define FOURTH O
#endif

static inline int rank_of(const int32_t *ranks, int adapter) { return adapter > 0 ? ranks[adapter - 1] : 0; }
static inline void norm_row(float *out, const float *x, const float *weight);
static inline void shrink(float *out, const float *a, const float *x);
static inline void expand(float *out, const float *b, const float *hidden, int rank, int o, const float *biases);

static void lora_bias(float *out, float *scratch, SHARED_ARGUMENT const float *x, NORM_ARGUMENT const float *a, const float *b,
                      const int32_t *ranks, BIAS_ARGUMENT const int32_t *adapters, const int32_t *rows, const struct thread_team *team) {
  const int count = rows[0], tiles = (count + ROWS - 1) / ROWS;
  if (NORM != NO_NORM) {
    for (int t = next_unit(team); t < count; t = next_unit(team))
      if (rank_of(ranks, adapters[t])) norm_row(scratch + (long)t * SCRATCH, x + (long)t * E, norm);
    barrier(team);
  }

#ifdef WORLD
  struct meeting *meeting = (struct meeting *)shared;
  const unsigned turn = turn_of(meeting);
  float *places = places_of(shared, turn);
#endif
  const int fours = HIDDEN / 4;
  for (int unit = next_unit(team); unit < tiles * fours; unit = next_unit(team)) {
    const int first = unit / fours * ROWS, four = unit % fours * 4;
    for (int t = first; t < first + ROWS && t < count; t++) {
      if (four % R >= rank_of(ranks, adapters[t])) continue;
      const float *own = NORM == NO_NORM ? x + (long)t * E : scratch + (long)t * SCRATCH;
#ifdef WORLD
      float *out_of_four = places + (long)RANK * PLACE + ((long)t * HIDDEN + four) * 16;
#else
      float *out_of_four = scratch + (long)t * SCRATCH + E + four;
#endif
      shrink(out_of_four, a + ((long)(adapters[t] - 1) * HIDDEN + four) * E, own);
    }
  }
#ifdef WORLD
  meet(meeting, turn, team);
  for (int t = next_unit(team); t < count; t = next_unit(team))
    for (int h = 0; h < HIDDEN && rank_of(ranks, adapters[t]); h++)
      scratch[(long)t * SCRATCH + E + h] = v16_sum(sum_of_ranks(places, ((long)t * HIDDEN + h) * 16));
#endif
  barrier(team);

  const int pieces = (O + OUTPUTS - 1) / OUTPUTS;
  for (int unit = next_unit(team); unit < tiles * pieces; unit = next_unit(team)) {
    const int first = unit / pieces * ROWS, from = unit % pieces * OUTPUTS, to = from + OUTPUTS < O ? from + OUTPUTS : O;
    for (int t = first; t < first + ROWS && t < count; t++) {
      const int rank = rank_of(ranks, adapters[t]);
      const float *own = b + (long)(rank ? adapters[t] - 1 : 0) * R * O, *hidden = scratch + (long)t * SCRATCH + E;
      for (int o = from; o < to; o += 16) expand(out + (long)t * O, own, hidden, rank, o, bias);
    }
  }
}

static inline void norm_row(float *out, const float *x, const float *weight) {
  const v16 inverse = v16_set(inverse_spread(x, E, 0.0f, EPS));
  for (int i = 0; i < E; i += 16) v16_store(out + i, v16_mul(v16_mul(v16_load(x + i), inverse), v16_load(weight + i)));
}

// Four rows of A times a row of x; of a rank the sixteen lanes of each.
static inline void shrink(float *out, const float *a, const float *x) {
  v16 sums[SLICES][4];
  for (int s = 0; s < SLICES; s++) {
    v16 own[4] = {v16_set(0.0f), v16_set(0.0f), v16_set(0.0f), v16_set(0.0f)};
    for (long i = slice_column(s); i < slice_column(s + 1); i += 16) {
      const v16 y = v16_load(x + i);
      UNROLL for (int r = 0; r < 4; r++) own[r] = v16_fma(v16_load(a + (long)r * E + i), y, own[r]);
    }
    UNROLL for (int r = 0; r < 4; r++) sums[s][r] = own[r];
  }
  for (int apart = 1; apart < SLICES; apart *= 2)
    for (int s = 0; s < SLICES; s += 2 * apart)
      for (int r = 0; r < 4; r++) sums[s][r] = v16_add(sums[s][r], sums[s + apart][r]);
  for (int r = 0; r < 4; r++) {
#ifdef WORLD
    v16_store(out + 16 * r, sums[0][r]);
#else
    out[r] = v16_sum(sums[0][r]);
#endif
  }
}

// Outputs o to o + 15 of a row.
static inline void expand(float *out, const float *b, const float *hidden, int rank, int o, const float *biases) {
  const v16 start = BIAS ? v16_load(biases + o) : v16_set(-0.0f);
  if (rank == 0) {
    v16_store(out + o, start);
    return;
  }
  const float *h = hidden + ((o >= SECOND) + (o >= THIRD) + (o >= FOURTH)) * R;
  v16 sum = v16_set(0.0f);
  for (int r = 0; r < rank; r++) sum = v16_fma(v16_set(h[r]), v16_load(b + (long)r * O + o), sum);
  v16_store(out + o, v16_add(sum, start));
}
