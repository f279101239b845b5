// out = silu(gate) * up, where gate, up = rmsnorm(x) . weight^T + bias: the first half of a gated feed-forward layer; gelu(gate) * up if
// GATE_GELU
//
//   out       [T, F] float32   does not alias x
//   scratch   PREPARED_BYTES(E) (product.h) for every row, T rounded up to a multiple of 16; 64-byte aligned
//   x         [T, E] float32
//   norm      [E] float32      RMS norm's weights; EPS inside the root; not if NORM == NO_NORM
//   weight    panels (format.h) of gate [F, E], then those of up [F, E]; of one of the two if HALF is GATE or UP
//   bias      [2 F] float32, gate's first, if BIAS
//   rows      [1] int32        how many rows of x there are, 0 to T; further rows of out are unchanged
//
// HALF is BOTH but where gate and up have different formats: then GATE writes gate to `out`, and UP, launched after it, reads it there.
//
// E % 32 == 0, F % 16 == 0. Norm, bias, silu and product with up in float32; matrix products as product.h says.
// A row to prepare is a unit of work, then some pairs of gate's panels with those of up. silu(a) = a / (1 + e^-a).
#define I E
#include "activations.h"
#include "norm.h"
#include "product.h"
#include "thread_team.h"

#define PIECE 96  // rows; a multiple of twelve
#define BOTH 0
#define GATE 1
#define UP 2

#ifndef GATE_GELU
#define GATE_GELU 0
#endif
#if BIAS
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#define bias ((const float *)0)
#endif

// Pairs of panels in a unit, all of gate's before those of up, where the rows are one tile: with one pair a unit, of 36 KB in 4 bits, a core
// read a tenth less.
#define MAX_RUN 8
#define GATE_ROWS (MAX_RUN * STREAM_TOKENS > MAX_TOKENS ? MAX_RUN * STREAM_TOKENS : MAX_TOKENS)
static inline int pairs_in_run(int pairs, int threads);
static inline float *run_tile(float *tiles, int pair);
static inline void pair_dot(const uint8_t *weight, int panels, int pair, const uint8_t *next_panel, const uint8_t *x, int tokens,
                            float *tile);
static inline void finish_row(float *out, const float *gates, const float *ups, const float *biases, int f);

static void norm_gate_up_silu(float *out, void *scratch, const float *x, NORM_ARGUMENT const void *weight,
                              BIAS_ARGUMENT const int32_t *rows, const struct thread_team *team) {
  const int count = rows[0], panels = F / 16;
  uint8_t *prepared = scratch;
  for (int t = next_unit(team); t < count; t = next_unit(team)) prepare_normed(prepared + t * PREPARED, x + (long)t * E, norm, 0);
  barrier(team);

  const int pairs = (panels + 1) / 2, piece = pairs < 4 * team->threads ? PIECE : count > 0 ? count : 1;
  const int run = count <= STREAM_TOKENS ? pairs_in_run(pairs, team->threads) : 1, runs = (pairs + run - 1) / run;
  const int pieces = (count + piece - 1) / piece, units = runs * pieces;
  for (int unit = next_unit(team), ahead; unit < units; unit = unit_after(team, ahead)) {
    ahead = unit_ahead(team, unit, units);
    const int first = unit / pieces * run, end = first + run < pairs ? first + run : pairs;
    const int from = unit % pieces * piece, to = from + piece < count ? from + piece : count;
    const uint8_t *next_panel = (const uint8_t *)weight + 2 * (likely_unit(team, unit, ahead, units) / pieces * run) * PANEL;
    const uint8_t *gate = (const uint8_t *)weight, *up = HALF == BOTH ? gate + panels * PANEL : gate;
    for (int t = from, tokens; t < to; t += tokens) {
      float gates[GATE_ROWS * 32], ups[MAX_TOKENS * 32];
      tokens = tile_tokens(to - t);
      const uint8_t *x_rows = prepared + t * PREPARED, *next = t + tokens < to ? gate + 2 * first * PANEL : next_panel;
      for (int pair = first; HALF != UP && pair < end; pair++) {
        const uint8_t *last = HALF == BOTH ? up + 2 * first * PANEL : next;
        pair_dot(gate, panels, pair, pair + 1 < end ? gate + 2 * (pair + 1) * PANEL : last, x_rows, tokens, run_tile(gates, pair - first));
      }
      for (int pair = first; pair < end; pair++) {
        if (HALF != GATE) pair_dot(up, panels, pair, pair + 1 < end ? up + 2 * (pair + 1) * PANEL : next, x_rows, tokens, ups);
        for (int r = 0; r < tokens; r++)
          finish_row(out + (long)(t + r) * F, run_tile(gates, pair - first) + r * 32, ups + r * 32, bias, pair * 32);
      }
    }
  }
}

static inline int pairs_in_run(int pairs, int threads) {
  const int run = pairs_in_unit(pairs, threads);
  return run < MAX_RUN ? run : MAX_RUN;
}
static inline float *run_tile(float *tiles, int pair) { return tiles + pair * STREAM_TOKENS * 32; }

static inline void pair_dot(const uint8_t *weight, int panels, int pair, const uint8_t *next_panel, const uint8_t *x, int tokens,
                            float *tile) {
  const uint8_t *a = weight + 2 * pair * PANEL;
  panel_dot(a, 2 * pair + 1 < panels ? a + PANEL : a, next_panel, x, tokens, tile, 32);
}

// A row's results from feature f on, 32 or what is left of F.
static inline void finish_row(float *out, const float *gates, const float *ups, const float *biases, int f) {
  for (int c = 0; c < 32 && f + c < F; c += 16) {
    v16 a = v16_load(HALF == UP ? out + f + c : gates + c);
    if (BIAS && HALF != UP) a = v16_add(a, v16_load(biases + f + c));
    if (HALF == GATE) {
      v16_store(out + f + c, a);
      continue;
    }
    v16 b = v16_load(ups + c);
    if (BIAS) b = v16_add(b, v16_load(biases + F + f + c));
    v16_store(out + f + c, v16_mul(GATE_GELU ? gelu(a) : silu(a), b));
  }
}
