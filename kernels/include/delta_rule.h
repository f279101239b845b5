// Sizes of the gated delta rule, the rows that a sequence has in a step, and softplus: what gated_delta and delta_norm of both kinds of
// GPU share. kernels/cpu/gated_delta.c has the formulas.
//
// A plain C subset as order.h. Constants: KH, VH, DK, DV, TAPS, TILED, DRAFTS.
#pragma once
#include "portable.h"

#define KEYS (KH * DK)
#define VALUES (VH * DV)
#define CHANNELS (2 * KEYS + VALUES)
#define WIDTH (CHANNELS + VALUES + 2 * VH)
#define KEPT ((TAPS - 1 + DRAFTS) * CHANNELS)
#define GATES (KEPT + VH * DK * DV)
#define TOKENS (GATES + DRAFTS * 2 * VH)
#define STATE (DRAFTS ? (TOKENS + 16) / 16 * 16 : GATES)

// Whether sequence b counts: those between decodes and chunks, and after the chunks, are padding.
DEVICE_FN int is_counted(int b, int decodes, int first_chunk, int chunks) {
  return b < decodes || (b >= first_chunk && b < first_chunk + chunks);
}

// The row of a step after which a sequence's state is copied, -1 for none. Its first row has position `position`; the copy is made after
// `tokens` tokens of the sequence, which is never after a draft.
DEVICE_FN int copied_row(int first, int certain, int position, int tokens) {
  const int at = first + tokens - 1 - position;
  return at >= first && at < certain ? at : -1;
}

// Drafts that a step before the one at `position` has accepted and that its state, of `tokens` tokens, lacks. What a slot has no room for
// is not a number of drafts: no memory outside it is read.
DEVICE_FN int taken_drafts(int position, float tokens) {
  const int taken = position - (int)tokens;
  return taken < 0 ? 0 : taken > DRAFTS ? DRAFTS : taken;
}

// log(1 + e^x), given u = e^-|x|: max(x, 0) + log(1 + u), which is 2 artanh(u / (2 + u)), whose series ends below 1e-8.
DEVICE_FN float softplus(float x, float u) {
  const float s = u / (2.0f + u), square = s * s;
  float sum = 1.0f / 15.0f;
  sum = fmadd(sum, square, 1.0f / 13.0f);
  sum = fmadd(sum, square, 1.0f / 11.0f);
  sum = fmadd(sum, square, 1.0f / 9.0f);
  sum = fmadd(sum, square, 1.0f / 7.0f);
  sum = fmadd(sum, square, 1.0f / 5.0f);
  sum = fmadd(sum, square, 1.0f / 3.0f);
  sum = fmadd(sum, square, 1.0f);
  return fmadd(s * 2.0f, sum, x > 0.0f ? x : 0.0f);
}
