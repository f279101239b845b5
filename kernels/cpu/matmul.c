// out = activation(x . weight^T + bias) * OUT_SCALE + residual, or norm(activation(x . weight^T + bias)) * OUT_SCALE + residual
//
//   out       [T, O] float32   does not alias x or residual
//   scratch   PREPARED_BYTES(I) (product.h) for every row, T rounded up to a multiple of 16; 64-byte aligned
//   x         [T, I] float32
//   weight    panels (format.h) of WEIGHT, O rounded up to a multiple of 16
//   bias      [O] float32, if BIAS; with BIAS_PITCH = O [T, O], a row's own (lora_bias.c)
//   out_norm  [O] float32, if OUT_NORM: RMS norm's weights of the outputs, with EPS; then O % 16 == 0
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        how many rows of x there are, 0 to T; further rows of out are unchanged
//
// The columns are added in a tree over SLICES slices, all 8 if it is not defined (slices.h).
// ACTIVATION: 0 none, 1 GELU, the tanh form. I % 32 == 0, any O. Accumulated in float32 in the order of product.h; BF16 rounds x to bfloat16
// and integer formats round it to int8 in groups of 32, once a row.
// First every row is prepared (a row is a unit of work), then a few pairs of panels meet a piece of the rows; with OUT_NORM every row of out
// is a unit once more.
#ifndef SLICES
#define SLICES 8
#endif
#include "activations.h"
#include "outputs.h"
#include "params.h"
#include "product.h"
#include "thread_team.h"

#include "arguments.h"  // the last one

static inline void multiply_pair(float *out, const uint8_t *prepared, const uint8_t *weight, int pair, int next, int pass, int from, int to,
                                 const float *biases, const float *residuals);
static inline void finish_row(float *out, float *tile, const float *biases, const float *residuals, int columns);
static inline v16 finish_16(v16 y, const float *biases, const float *residuals);

static void matmul(float *out, void *scratch, const float *x, const void *weight,
                   BIAS_ARGUMENT OUT_NORM_ARGUMENT RESIDUAL_ARGUMENT const int32_t *rows, const struct thread_team *team) {
  const int count = rows[0], panels = (O + 15) / 16, pairs = (panels + 1) / 2;
  uint8_t *prepared = scratch;
  for (int t = next_unit(team); t < count; t = next_unit(team)) prepare_row(prepared + t * PREPARED, x + (long)t * I);
  barrier(team);

  const int run = pairs_in_unit(pairs, team->threads), runs = (pairs + run - 1) / run;
  const int piece = rows_in_piece(count, runs, 4 * team->threads);
  const int pieces = (count + piece - 1) / piece, units = runs * pieces;
  const int passes = count > STREAM_TOKENS ? PASSES : 1;
  for (int pass = 0; pass < passes; pass++) {
    if (pass > 0) barrier(team);
    for (int unit = next_unit(team), ahead; unit < units; unit = unit_after(team, ahead)) {
      ahead = unit_ahead(team, unit, units);
      const int from = piece_of(unit, runs, pieces) * piece, to = from + piece < count ? from + piece : count;
      const int first = run_of(unit, runs, pieces) * run, end = first + run < pairs ? first + run : pairs;
      for (int pair = first; pair < end; pair++) {
        const int next = pair + 1 < end ? pair + 1 : run_of(likely_unit(team, unit, ahead, units), runs, pieces) * run;
        multiply_pair(out, prepared, weight, pair, next, passes > 1 ? pass : ALL_PASSES, from, to, bias, residual);
      }
    }
  }
#ifdef OUT_NORM
  barrier(team);
  for (int t = next_unit(team); t < count; t = next_unit(team))
    norm_and_join(out + (long)t * O, out_norm, RESIDUAL ? residual + (long)t * O : 0, O);
#endif
}

// Outputs of a pair of panels for rows `from` to `to` - 1, or what a pass makes of them: between passes sums of slices are in `out`.
static inline void multiply_pair(float *out, const uint8_t *prepared, const uint8_t *weight, int pair, int next, int pass, int from, int to,
                                 const float *biases, const float *residuals) {
  const uint8_t *a = weight + 2 * pair * PANEL, *b = 2 * pair + 1 < (O + 15) / 16 ? a + PANEL : a, *next_panel = weight + 2 * next * PANEL;
  const int o = pair * 32, columns = O - o < 32 ? O - o : 32;
  for (int t = from, tokens; t < to; t += tokens) {
    float tile[MAX_TOKENS * 32];
    tokens = tile_tokens(to - t);
    const struct results results = {tile, 32, out + (long)t * O + o, O};
    pass_dot(pass, a, b, t + tokens < to ? a : next_panel, prepared + t * PREPARED, tokens, results);
    for (int r = 0; r < tokens; r++) {
      const long at = (long)(t + r) * O + o;
      float *sums = tile + r * 32;
      for (int c = 0; pass > 0 && c < columns; c++) sums[c] = out[at + c] + sums[c];
      if (pass == ALL_PASSES || pass + 1 == PASSES)
        finish_row(out + at, sums, BIAS ? biases + (long)(t + r) * BIAS_PITCH + o : 0, RESIDUAL ? residuals + at : 0, columns);
      else
        for (int c = 0; c < columns; c++) out[at + c] = sums[c];
    }
  }
}

// Sixteen of a row's results, from their sums `y`.
static inline v16 finish_16(v16 y, const float *biases, const float *residuals) {
  if (BIAS) y = v16_add(y, v16_load(biases));
  if (ACTIVATION == GELU) y = gelu(y);
  return ADDS_AT_ONCE ? joined(y, residuals) : y;
}

// The sums of one row in `tile` [32] become `columns` of its results; all pointers are at the first of these columns.
static inline void finish_row(float *out, float *tile, const float *biases, const float *residuals, int columns) {
  for (int c = 0; c < columns; c += 16) {
    if (columns - c >= 16) {
      v16_store(out + c, finish_16(v16_load(tile + c), biases + c, residuals + c));
      continue;
    }
    float odd_biases[16] = {0}, odd_residuals[16] = {0};  // the last, short panel: nothing after the end of the arrays is read
    for (int i = 0; BIAS && i < columns - c; i++) odd_biases[i] = biases[c + i];
    for (int i = 0; RESIDUAL && i < columns - c; i++) odd_residuals[i] = residuals[c + i];
    v16_store(tile + c, finish_16(v16_load(tile + c), odd_biases, odd_residuals));
    for (int i = 0; i < columns - c; i++) out[c + i] = tile[c + i];
  }
}
