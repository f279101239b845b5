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
DEVICE bool is_draft(int b, int decodes, const int *slots) { return DRAFTS && b && b < decodes && slots[4 * b] == slots[4 * (b - 1)]; }

DEVICE Sequence sequence_at(int b, int decodes, const int *slots, const int *positions, const int *query_starts) {
  const int first = query_starts[b], certain = query_starts[b + 1], position = positions[first], *own = slots + 4 * b;
  int end = certain;
  while (is_draft(end, decodes, slots)) end++;
  return {first, certain, end, own[0], own[1], own[2], copied_row(first, certain, position, own[3]), 0, position == 0};
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
