// out = activation(x . weight^T + bias) + residual
//
//   out       [T, O] float32   does not alias x or residual
//   scratch   PREPARED_BYTES(I) (product.h) for every row, T counted up to a multiple of 16; 64-byte aligned
//   x         [T, I] float32
//   weight    panels (product.h) of WEIGHT = F32, F16, BF16, Q8_0 or Q4_0, O counted up to a multiple of 16
//   bias      [O] float32, if BIAS
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        how many rows of x there are, 0 to T; the rows of out behind them stay as they are
//
// ACTIVATION: 0 none, 1 gelu, the tanh form. I % 32 == 0, any O. Accumulated in float32 (product.h says in which order); BF16 rounds x to
// bfloat16 and the Q formats round it to int8 in blocks of 32, once a row.
// First every row is prepared (a row is a unit of work), then a few pairs of panels meet all rows, or a piece of them if panels are few.
#include "thread_team.h"
#include "product.h"

#define PIECE 96 // rows; a multiple of twelve

static inline v16 gelu(v16 x) {
  v16 cube = v16_mul(v16_mul(x, x), x);
  v16 u = v16_mul(v16_fma(v16_set(0.044715f), cube, x), v16_set(-1.5957691216057308f)); // -2 sqrt(2 / pi)
  return v16_div(x, v16_add(v16_set(1.0f), v16_exp(u)));
}

// Sixteen of a row's results, in `y`, for the columns from o.
static inline v16 finished(v16 y, const float *bias, const float *residual) {
  if (BIAS) y = v16_add(y, v16_load(bias));
  if (ACTIVATION == 1) y = gelu(y);
  if (RESIDUAL) y = v16_add(y, v16_load(residual));
  return y;
}

// The results of one row in `tile` [32] to `columns` columns of out from `o` on; the row of out and residual starts at `row`.
static inline void finish(float *out, float *tile, const float *bias, const float *residual, long row, int o, int columns) {
  for (int c = 0; c < columns; c += 16) {
    if (columns - c >= 16) {
      v16_store(out + row + o + c, finished(v16_load(tile + c), bias + o + c, residual + row + o + c));
      continue;
    }
    float odd_bias[16] = {0}, odd_residual[16] = {0}; // the last, short panel: nothing behind the arrays is touched
    for (int i = 0; BIAS && i < columns - c; i++) odd_bias[i] = bias[o + c + i];
    for (int i = 0; RESIDUAL && i < columns - c; i++) odd_residual[i] = residual[row + o + c + i];
    v16_store(tile + c, finished(v16_load(tile + c), odd_bias, odd_residual));
    for (int i = 0; i < columns - c; i++) out[row + o + c + i] = tile[c + i];
  }
}

#if BIAS && RESIDUAL
static void matmul(float *out, void *scratch, const float *x, const void *weight, const float *bias, const float *residual,
                   const int32_t *rows, const struct team *team) {
#elif BIAS
static void matmul(float *out, void *scratch, const float *x, const void *weight, const float *bias, const int32_t *rows,
                   const struct team *team) {
  const float *residual = 0;
#elif RESIDUAL
static void matmul(float *out, void *scratch, const float *x, const void *weight, const float *residual, const int32_t *rows,
                   const struct team *team) {
  const float *bias = 0;
#else
static void matmul(float *out, void *scratch, const float *x, const void *weight, const int32_t *rows, const struct team *team) {
  const float *bias = 0, *residual = 0;
#endif
  const int count = rows[0], panels = (O + 15) / 16, pairs = (panels + 1) / 2;
  uint8_t *prepared = scratch;
  for (int t = next(team); t < count; t = next(team)) prepare_row(prepared + t * PREPARED, x + (long)t * I);
  meet(team);

  const int run = pairs_in_unit(pairs, team->lanes), runs = (pairs + run - 1) / run;
  const int piece = runs < 4 * team->lanes ? PIECE : count > 0 ? count : 1;
  const int pieces = (count + piece - 1) / piece, units = runs * pieces;
  for (int unit = next(team), ahead; unit < units; unit = unit_after(team, ahead)) {
    ahead = unit_ahead(team, unit, units);
    const int from = unit % pieces * piece, to = from + piece < count ? from + piece : count;
    const int first = unit / pieces * run, end = first + run < pairs ? first + run : pairs;
    for (int pair = first; pair < end; pair++) {
      const int then = pair + 1 < end ? pair + 1 : likely_unit(team, unit, ahead, units) / pieces * run;
      const uint8_t *a = (const uint8_t *)weight + 2 * pair * PANEL, *b = 2 * pair + 1 < panels ? a + PANEL : a;
      const uint8_t *next_panel = (const uint8_t *)weight + 2 * then * PANEL;
      const int o = pair * 32, columns = O - o < 32 ? O - o : 32;
      for (int t = from, tokens; t < to; t += tokens) {
        float tile[MAX_TOKENS * 32];
        tokens = tile_tokens(to - t);
        panel_dot(a, b, t + tokens < to ? a : next_panel, prepared + t * PREPARED, tokens, tile, 32);
        for (int r = 0; r < tokens; r++) finish(out, tile + r * 32, bias, residual, (long)(t + r) * O, o, columns);
      }
    }
  }
}
