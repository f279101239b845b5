// out = residual + the sum over a row's C experts of share * (h . weight^T + bias) with the expert's weights, c ascending: the second half of a
// mixture of experts
//
//   out       [T, E] float32    does not alias h or residual; not if PARTIAL
//   outputs   [T C, E] float32  of each pair (experts.h), not yet times its share
//   scratch   PREPARED_BYTES(F) (product.h) for every pair, T C rounded up to a multiple of 16, and TILE_ROWS times for each of 64 threads (experts.h)
//   h         [T C, F] float32  of pair t C + c
//   weight    panels (format.h) of all experts [X E, F]
//   bias      [X E] float32, if BIAS
//   shares    [T, C] float32, if not PARTIAL
//   order, tasks                experts.h
//   residual  [T, E] float32, if RESIDUAL
//   rows      [1] int32         how many rows there are, 0 to T; further rows of out are unchanged
//
// F % 32 == 0, E % 16 == 0. The columns of a product are added in a tree over all 8 slices (slices.h), as in matmul. If SLICES is defined, the
// columns are those of a rank, and the result is PARTIAL: only `outputs`, without bias, which experts_all_reduce.c adds.
// A pair to prepare is a unit of work, then a task with a run of pairs of panels, then COLUMNS outputs of a row.
#define I F
#ifdef SLICES
#define PARTIAL 1
#define OUT_ARGUMENT
#define SHARES_ARGUMENT
#else
#define SLICES 8
#define PARTIAL 0
#define OUT_ARGUMENT float *out,
#define SHARES_ARGUMENT const float *shares,
#endif
#ifndef BIAS
#define BIAS 0
#endif
#include "experts.h"
#include "product.h"

#define PANELS (E / 16)
#define COLUMNS 512
#include "arguments.h"  // the last one

static inline void multiply_task(float *outputs, const uint8_t *weight, const float *biases, int first, int end, const uint8_t *next_panel,
                                 const uint8_t *prepared, const int32_t *order, int count, uint8_t *area);
static inline void add_up(float *out, const float *outputs, const float *shares, const float *residuals, int from);

static void experts_down(OUT_ARGUMENT float *outputs, void *scratch, const float *h, const void *weight,
                         BIAS_ARGUMENT SHARES_ARGUMENT const int32_t *order, const int32_t *tasks, RESIDUAL_ARGUMENT const int32_t *rows,
                         const struct thread_team *team) {
  const int count = rows[0] * C, pairs = (PANELS + 1) / 2;
  uint8_t *prepared = scratch, *area = prepared + ((count + 15) / 16 * 16 + (long)team->thread * TILE_ROWS) * PREPARED;
  for (int p = next_unit(team); p < count; p = next_unit(team)) prepare_row(prepared + p * PREPARED, h + (long)p * F);
  barrier(team);

  const int few = pairs_in_unit(tasks[0] * pairs, team->threads), run = few < pairs ? few : pairs;
  const int runs = (pairs + run - 1) / run, units = tasks[0] * runs;
  for (int unit = next_unit(team), ahead; unit < units; unit = unit_after(team, ahead)) {
    ahead = unit_ahead(team, unit, units);
    const int likely = likely_unit(team, unit, ahead, units);
    const struct task task = task_of(tasks, unit / runs);
    const long next_expert = (long)task_of(tasks, likely / runs).expert * PANELS;
    const int first = unit % runs * run, end = first + run < pairs ? first + run : pairs;
    const uint8_t *own = (const uint8_t *)weight + (long)task.expert * PANELS * PANEL;
    const uint8_t *next_panel = (const uint8_t *)weight + (next_expert + 2 * (likely % runs * run)) * PANEL;
    multiply_task(outputs, own, bias + (BIAS ? (long)task.expert * E : 0), first, end, next_panel, prepared, order + task.first,
                  task.end - task.first, area);
  }
#if !PARTIAL
  barrier(team);

  const int cuts = (E + COLUMNS - 1) / COLUMNS;
  for (int unit = next_unit(team); unit < rows[0] * cuts; unit = next_unit(team)) {
    const long t = unit / cuts;
    add_up(out + t * E, outputs + t * C * E, shares + t * C, RESIDUAL ? residual + t * E : 0, unit % cuts * COLUMNS);
  }
#endif
}

// Sixteen outputs of a pair from output `o` on.
static inline void store_16(float *output, const float *products, const float *biases, int o) {
  const v16 y = v16_load(products);
  v16_store(output + o, BIAS ? v16_add(y, v16_load(biases + o)) : y);
}

// The products of `count` pairs, those that `order` begins with, with pairs `first` to `end` - 1 of an expert's panels.
static inline void multiply_task(float *outputs, const uint8_t *weight, const float *biases, int first, int end, const uint8_t *next_panel,
                                 const uint8_t *prepared, const int32_t *order, int count, uint8_t *area) {
  for (int at = 0, tokens; at < count; at += tokens) {
    tokens = tile_tokens(count - at);
    const uint8_t *x_rows = gathered(prepared, order + at, tokens, 1, area),
                  *after = at + tokens < count ? weight + 2 * first * PANEL : next_panel;
    for (int pair = first; pair < end; pair++) {
      float tile[MAX_TOKENS * 32];
      const uint8_t *a = weight + 2 * pair * PANEL, *b = 2 * pair + 1 < PANELS ? a + PANEL : a;
      panel_dot(a, b, pair + 1 < end ? a + 2 * PANEL : after, x_rows, tokens, (struct results){tile, 32, 0, 0});
      for (int r = 0; r < tokens; r++) {
        for (int c = 0; c < 32 && pair * 32 + c < E; c += 16)
          store_16(outputs + (long)order[at + r] * E, tile + r * 32 + c, biases, pair * 32 + c);
      }
    }
  }
}

// COLUMNS of a row from column `from` on, or what is left of E.
static inline void add_up(float *out, const float *outputs, const float *shares, const float *residuals, int from) {
  for (int o = from; o < E && o < from + COLUMNS; o += 16) {
    v16 sum = v16_mul(v16_set(shares[0]), v16_load(outputs + o));
    for (int c = 1; c < C; c++) sum = v16_fma(v16_set(shares[c]), v16_load(outputs + (long)c * E + o), sum);
    v16_store(out + o, RESIDUAL ? v16_add(sum, v16_load(residuals + o)) : sum);
  }
}
