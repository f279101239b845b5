// Of gated_delta and delta_norm: a sequence's rows and slots, and the functions of the gated delta rule.
#pragma once
#include "delta_rule.h"

// A sequence's rows in the step, its slots, and the row after which its state is copied, -1 for none.
struct Sequence {
  int first, end, slot, before, copy, copied;
  bool is_new;
};

DEVICE Sequence sequence_at(int b, const int *slots, const int *positions, const int *query_starts) {
  const int first = query_starts[b], end = query_starts[b + 1], position = positions[first], *own = slots + 4 * b;
  return {first, end, own[0], own[1], own[2], copied_row(first, end, position, own[3]), position == 0};
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
