// Of gated_delta and delta_norm: a sequence's rows and slots, and the functions of the gated delta rule.
#pragma once
#include "delta_rule.h"

// A sequence's rows in the step, its slots, and the row after which its state is copied, -1 for none.
struct Sequence {
  int first, end, slot, before, copy, copied;
  bool is_new;
};

INLINE Sequence sequence_at(int b, device const int *slots, device const int *positions, device const int *query_starts) {
  Sequence own;
  own.first = query_starts[b], own.end = query_starts[b + 1];
  own.slot = slots[4 * b], own.before = slots[4 * b + 1], own.copy = slots[4 * b + 2];
  const int position = positions[own.first];
  own.copied = copied_row(own.first, own.end, position, slots[4 * b + 3]), own.is_new = position == 0;
  return own;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
INLINE float silu(float x) { return x / (1.0f + precise::exp(-x)); }
