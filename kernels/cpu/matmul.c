// out = activation(x . weight^T + bias) + residual
//
//   out       [T, O] float32   does not alias x or residual
//   scratch   PREPARED_BYTES(I) (product.h) for every row, T rounded up to a multiple of 16; 64-byte aligned
//   x         [T, I] float32
//   weight    panels (format.h) of WEIGHT, O rounded up to a multiple of 16
//   bias      [O] float32, if BIAS
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        how many rows of x there are, 0 to T; further rows of out are unchanged
//
// ACTIVATION: 0 none, 1 GELU, the tanh form. I % 32 == 0, any O. Accumulated in float32 in the order of product.h; BF16 rounds x to bfloat16
// and integer formats round it to int8 in groups of 32, once a row.
// First every row is prepared (a row is a unit of work), then a few pairs of panels meet all rows, or PIECE rows if panels are few.
#include "params.h"
#include "product.h"
#include "thread_team.h"

#define PIECE 96  // rows; a multiple of twelve

#if BIAS
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#define bias ((const float *)0)
#endif
#if RESIDUAL
#define RESIDUAL_ARGUMENT const float *residual,
#else
#define RESIDUAL_ARGUMENT
#define residual ((const float *)0)
#endif

static inline void finish_row(float *out, float *tile, const float *biases, const float *residuals, int columns);

static void matmul(float *out, void *scratch, const float *x, const void *weight, BIAS_ARGUMENT RESIDUAL_ARGUMENT const int32_t *rows,
                   const struct thread_team *team) {
  const int count = rows[0], panels = (O + 15) / 16, pairs = (panels + 1) / 2;
  uint8_t *prepared = scratch;
  for (int t = next_unit(team); t < count; t = next_unit(team)) prepare_row(prepared + t * PREPARED, x + (long)t * I);
  barrier(team);

  const int run = pairs_in_unit(pairs, team->threads), runs = (pairs + run - 1) / run;
  const int piece = runs < 4 * team->threads ? PIECE : count > 0 ? count : 1;
  const int pieces = (count + piece - 1) / piece, units = runs * pieces;
  for (int unit = next_unit(team), ahead; unit < units; unit = unit_after(team, ahead)) {
    ahead = unit_ahead(team, unit, units);
    const int from = unit % pieces * piece, to = from + piece < count ? from + piece : count;
    const int first = unit / pieces * run, end = first + run < pairs ? first + run : pairs;
    for (int pair = first; pair < end; pair++) {
      const int next = pair + 1 < end ? pair + 1 : likely_unit(team, unit, ahead, units) / pieces * run;
      const uint8_t *a = (const uint8_t *)weight + 2 * pair * PANEL, *b = 2 * pair + 1 < panels ? a + PANEL : a;
      const uint8_t *next_panel = (const uint8_t *)weight + 2 * next * PANEL;
      const int o = pair * 32, columns = O - o < 32 ? O - o : 32;
      for (int t = from, tokens; t < to; t += tokens) {
        float tile[MAX_TOKENS * 32];
        tokens = tile_tokens(to - t);
        panel_dot(a, b, t + tokens < to ? a : next_panel, prepared + t * PREPARED, tokens, tile, 32);
        for (int r = 0; r < tokens; r++) {
          const long at = (long)(t + r) * O + o;
          finish_row(out + at, tile + r * 32, BIAS ? bias + o : 0, RESIDUAL ? residual + at : 0, columns);
        }
      }
    }
  }
}

static inline v16 gelu(v16 x) {
  v16 cube = v16_mul(v16_mul(x, x), x);
  v16 u = v16_mul(v16_fma(v16_set(0.044715f), cube, x), v16_set(-1.5957691216057308f));  // -2 sqrt(2 / pi)
  return v16_div(x, v16_add(v16_set(1.0f), v16_exp(u)));
}

// Sixteen of a row's results, from their sums `y`.
static inline v16 finish_16(v16 y, const float *biases, const float *residuals) {
  if (BIAS) y = v16_add(y, v16_load(biases));
  if (ACTIVATION == GELU) y = gelu(y);
  if (RESIDUAL) y = v16_add(y, v16_load(residuals));
  return y;
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
