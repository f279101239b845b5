// The first half of a gated feed-forward layer for a tile of prepared rows: silu(gate) * up, or gelu(gate) * up if GATE_GELU, or
// clamped_gate (activations.h) if GATE_LIMIT and GATE_ALPHA are defined.
//
//   F       features of gate and of up, a multiple of 16; I (product.h) is the width of x
//   HALF    BOTH; where gate and up have different formats, GATE writes gate to the output, and UP, launched after it, reads it there
//   BIAS    whether there is a bias of each row, which may be the same one: gate's, and that of up UP_BIAS numbers after it
//
// A run of pairs of gate's panels comes before those of up. silu(a) = a / (1 + e^-a).
#pragma once
#include "activations.h"
#include "params.h"
#include "product.h"

#define BOTH 0
#define GATE 1
#define UP 2
#ifndef GATE_GELU
#define GATE_GELU 0
#endif
#ifndef UP_BIAS
#define UP_BIAS F
#endif
#define GATE_PANELS (F / 16)
#define GATE_PAIRS ((GATE_PANELS + 1) / 2)

// Pairs of panels in a run, where the rows are one tile: with one pair a unit, of 36 KB in 4 bits, a core read a tenth less.
#define MAX_RUN 8
static inline int pairs_in_run(int pairs, int threads) {
  const int run = pairs_in_unit(pairs, threads);
  return run < MAX_RUN ? run : MAX_RUN;
}
// Results of gate that wait for those of up.
#define GATE_ROWS (MAX_RUN * STREAM_TOKENS > MAX_TOKENS ? MAX_RUN * STREAM_TOKENS : MAX_TOKENS)
static inline float *run_tile(float *tiles, int pair) { return tiles + pair * STREAM_TOKENS * 32; }

// Where results from feature f on will be written, for panel_dot; rows of experts are not neighbours.
static inline const float *place_of(float *const *outs, int f) {
#ifdef TILE_ROWS
  return 0;
#else
  return outs[0] + f;
#endif
}

static inline void pair_dot(const uint8_t *weight, int pair, const uint8_t *next_panel, const uint8_t *x, int tokens, float *tile,
                            const float *out) {
  const uint8_t *a = weight + 2 * pair * PANEL;
  panel_dot(a, 2 * pair + 1 < GATE_PANELS ? a + PANEL : a, next_panel, x, tokens, (struct results){tile, 32, out, F});
}

static inline v16 gated(v16 gate, v16 up) {
#ifdef GATE_LIMIT
  return clamped_gate(gate, up, GATE_ALPHA, GATE_LIMIT);
#else
  return v16_mul(GATE_GELU ? gelu(gate) : silu(gate), up);
#endif
}

// A row's results from feature f on, 32 or what is left of F; `out` is the row's first.
static inline void finish_row(float *out, const float *gates, const float *ups, const float *biases, int f) {
  for (int c = 0; c < 32 && f + c < F; c += 16) {
    v16 a = v16_load(HALF == UP ? out + f + c : gates + c);
    if (BIAS && HALF != UP) a = v16_add(a, v16_load(biases + f + c));
    if (HALF == GATE) {
      v16_store(out + f + c, a);
      continue;
    }
    v16 b = v16_load(ups + c);
    if (BIAS) b = v16_add(b, v16_load(biases + UP_BIAS + f + c));
    v16_store(out + f + c, gated(a, b));
  }
}

static inline void gate_up_run(const uint8_t *gate, const uint8_t *up, int first, int end, const uint8_t *next, const uint8_t *x_rows,
                               int tokens, float *const *outs, const float *const *biases) {
  float gates[GATE_ROWS * 32], ups[MAX_TOKENS * 32];
  const uint8_t *last = HALF == BOTH ? up + 2 * first * PANEL : next;
  for (int pair = first; HALF != UP && pair < end; pair++)
    pair_dot(gate, pair, pair + 1 < end ? gate + 2 * (pair + 1) * PANEL : last, x_rows, tokens, run_tile(gates, pair - first),
             HALF == GATE ? place_of(outs, pair * 32) : 0);
  for (int pair = first; pair < end; pair++) {
    if (HALF != GATE)
      pair_dot(up, pair, pair + 1 < end ? up + 2 * (pair + 1) * PANEL : next, x_rows, tokens, ups, place_of(outs, pair * 32));
    for (int r = 0; r < tokens; r++) {
      const float *own = BIAS ? biases[r] : 0;
      finish_row(outs[r], run_tile(gates, pair - first) + r * 32, ups + r * 32, own, pair * 32);
    }
  }
}

// Pairs `first` to `end` - 1, MAX_RUN at most, of the panels `gate` and `up` (the same where HALF is one of them) with `tokens` prepared
// rows, whose results begin at outs[r] and whose biases at biases[r]. `next` are the panels that are read after these.
static inline void gate_up_tile(const uint8_t *gate, const uint8_t *up, int first, int end, const uint8_t *next, const uint8_t *x_rows,
                                int tokens, float *const *outs, const float *const *biases) {
  const int run = tokens <= STREAM_TOKENS ? end - first : 1;
  for (int pair = first; pair < end; pair += run)
    gate_up_run(gate, up, pair, pair + run, pair + run < end ? gate + 2 * (pair + run) * PANEL : next, x_rows, tokens, outs, biases);
}
