// out = silu(gate) * up, where gate, up = rmsnorm(x) . weight^T + bias: the first half of a gated feed-forward layer; gelu(gate) * up if
// GATE_GELU
//
//   out       [T, F] float32   does not alias x
//   scratch   PREPARED_BYTES(E) (product.h) for every row, T rounded up to a multiple of 16; 64-byte aligned
//   x         [T, E] float32
//   norm      [E] float32      RMS norm's weights; EPS inside the root; not if NORM == NO_NORM
//   weight    panels (format.h) of gate [F, E], then those of up [F, E]; of one of the two if HALF (gate_up.h) is GATE or UP
//   bias      [2 F] float32, gate's first, if BIAS; with BIAS_PITCH = 2 F [T, 2 F], a row's own (lora_bias.c)
//   rows      [1] int32        how many rows of x there are, 0 to T; further rows of out are unchanged
//
// E % 32 == 0, F % 16 == 0. Norm, bias, silu and product with up in float32; matrix products as product.h says.
// A row to prepare is a unit of work, then some pairs of gate's panels with those of up.
#define I E
#include "gate_up.h"
#include "norm.h"
#include "thread_team.h"

#include "arguments.h"  // the last one

static void norm_gate_up_silu(float *out, void *scratch, const float *x, NORM_ARGUMENT const void *weight,
                              BIAS_ARGUMENT const int32_t *rows, const struct thread_team *team) {
  const int count = rows[0], pairs = GATE_PAIRS;
  uint8_t *prepared = scratch;
  for (int t = next_unit(team); t < count; t = next_unit(team)) prepare_normed(prepared + t * PREPARED, x + (long)t * E, norm, 0);
  barrier(team);

  const int piece = rows_in_piece(count, pairs, 4 * team->threads);
  const int run = count <= STREAM_TOKENS ? pairs_in_run(pairs, team->threads) : 1, runs = (pairs + run - 1) / run;
  const int pieces = (count + piece - 1) / piece, units = runs * pieces;
  for (int unit = next_unit(team), ahead; unit < units; unit = unit_after(team, ahead)) {
    ahead = unit_ahead(team, unit, units);
    const int first = run_of(unit, runs, pieces) * run, end = first + run < pairs ? first + run : pairs;
    const int from = piece_of(unit, runs, pieces) * piece, to = from + piece < count ? from + piece : count;
    const uint8_t *gate = (const uint8_t *)weight, *up = HALF == BOTH ? gate + GATE_PANELS * PANEL : gate;
    const uint8_t *next_panel = gate + 2 * (run_of(likely_unit(team, unit, ahead, units), runs, pieces) * run) * PANEL;
    for (int t = from, tokens; t < to; t += tokens) {
      float *outs[MAX_TOKENS];
      const float *biases[MAX_TOKENS];
      tokens = tile_tokens(to - t);
      for (int r = 0; r < tokens; r++) outs[r] = out + (long)(t + r) * F;
      for (int r = 0; BIAS && r < tokens; r++) biases[r] = bias + (long)(t + r) * BIAS_PITCH;
      const uint8_t *next = t + tokens < to ? gate + 2 * first * PANEL : next_panel;
      gate_up_tile(gate, up, first, end, next, prepared + t * PREPARED, tokens, outs, biases);
    }
  }
}
