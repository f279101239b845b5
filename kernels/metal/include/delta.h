// Of gated_delta and delta_norm: a sequence's rows and slots, and the functions of the gated delta rule.
#pragma once
#include "delta_rule.h"

// A sequence's rows in the step, those from `certain` on drafts; its slots; the row after which its state is copied, -1 for none; and how many
// accepted drafts of earlier steps the state lacks.
struct Sequence {
  int first, certain, end, slot, before, copy, copied, taken;
  bool is_new;
};

// Whether decode b is a draft after the one before it: it has the same slot.
INLINE bool is_draft(int b, int decodes, device const int *slots) {
  return DRAFTS && b && b < decodes && slots[4 * b] == slots[4 * (b - 1)];
}

INLINE Sequence sequence_at(int b, int decodes, device const int *slots, device const int *positions, device const int *query_starts) {
  Sequence own;
  own.first = query_starts[b], own.end = own.certain = query_starts[b + 1], own.taken = 0;
  while (is_draft(own.end, decodes, slots)) own.end++;
  own.slot = slots[4 * b], own.before = slots[4 * b + 1], own.copy = slots[4 * b + 2];
  const int position = positions[own.first];
  own.copied = copied_row(own.first, own.certain, position, slots[4 * b + 3]), own.is_new = position == 0;
  return own;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
INLINE float silu(float x) { return x / (1.0f + precise::exp(-x)); }
