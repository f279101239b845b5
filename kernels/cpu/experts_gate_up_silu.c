// out = silu(gate) * up of each pair of a row and one of its experts, where gate, up = rmsnorm(x) . weight^T + bias with the expert's weights;
// another gate if GATE_GELU or GATE_LIMIT (gate_up.h)
//
//   out       [T C, F] float32  of pair t C + c (experts.h); does not alias x
//   scratch   PREPARED_BYTES(E) (product.h) for every row, T rounded up to a multiple of 16, and TILE_ROWS times for each of 64 threads (experts.h)
//   x         [T, E] float32
//   norm      [E] float32       RMS norm's weights; EPS inside the root; not if NORM == NO_NORM
//   weight    panels (format.h) of gate of all experts [X F, E], then of up [X F, E]; of one of the two if HALF (gate_up.h) is GATE or UP
//   bias      [2 X F] float32, gate's of all experts first, if BIAS; with BIAS_PITCH = 2 F [T C, 2 F], a pair's own (lora_bias.c)
//   order, tasks                experts.h
//   rows      [1] int32         how many rows of x there are, 0 to T; the pairs of further rows are unchanged
//
// E % 32 == 0, F % 16 == 0. A pair has the bits that norm_gate_up_silu gives its row with the expert's matrices.
// A row to prepare is a unit of work, then a task with a run of pairs of panels.
#define I E
#ifndef BIAS_PITCH
#define UP_BIAS (X * F)
#endif
#ifndef BIAS
#define BIAS 0
#endif
#include "experts.h"
#include "gate_up.h"
#include "norm.h"

#include "arguments.h"  // the last one

static void experts_gate_up_silu(float *out, void *scratch, const float *x, NORM_ARGUMENT const void *weight,
                                 BIAS_ARGUMENT const int32_t *order, const int32_t *tasks, const int32_t *rows,
                                 const struct thread_team *team) {
  const int count = rows[0], pairs = GATE_PAIRS;
  uint8_t *prepared = scratch, *area = prepared + ((count + 15) / 16 * 16 + (long)team->thread * TILE_ROWS) * PREPARED;
  for (int t = next_unit(team); t < count; t = next_unit(team)) prepare_normed(prepared + t * PREPARED, x + (long)t * E, norm, 0);
  barrier(team);

  const uint8_t *gates = weight, *ups = HALF == BOTH ? gates + (long)X * GATE_PANELS * PANEL : gates;
  const int few = pairs_in_run(tasks[0] * pairs, team->threads), run = few < pairs ? few : pairs;
  const int runs = (pairs + run - 1) / run, units = tasks[0] * runs;
  for (int unit = next_unit(team), ahead; unit < units; unit = unit_after(team, ahead)) {
    ahead = unit_ahead(team, unit, units);
    const int likely = likely_unit(team, unit, ahead, units);
    const struct task task = task_of(tasks, unit / runs);
    const long expert = (long)task.expert * GATE_PANELS * PANEL, next_expert = (long)task_of(tasks, likely / runs).expert * GATE_PANELS;
    const int first = unit % runs * run, end = first + run < pairs ? first + run : pairs;
    const uint8_t *gate = gates + expert, *up = ups + expert, *next_panel = gates + (next_expert + 2 * (likely % runs * run)) * PANEL;
    for (int at = task.first, tokens; at < task.end; at += tokens) {
      float *outs[MAX_TOKENS];
      const float *biases[MAX_TOKENS];
      tokens = tile_tokens(task.end - at);
      for (int r = 0; r < tokens; r++) outs[r] = out + (long)order[at + r] * F;
      for (int r = 0; BIAS && r < tokens; r++) biases[r] = bias + (BIAS_PITCH ? (long)order[at + r] * BIAS_PITCH : (long)task.expert * F);
      const uint8_t *next = at + tokens < task.end ? gate + 2 * first * PANEL : next_panel;
      gate_up_tile(gate, up, first, end, next, gathered(prepared, order + at, tokens, C, area), tokens, outs, biases);
    }
  }
}
