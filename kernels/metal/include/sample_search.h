// sample: the search for a threshold by counting in bins of the order bits. Radix select as in Alabi et al., "Fast k-selection algorithms
// for graphics processing units" (2012).
//
// Constants in addition to those of sample_row.h and sample_threadgroup.h: STAGE, as sample.metal says.
#pragma once
#include "sample_row.h"
#include "sample_threadgroup.h"

#define BIN_BITS (THREADS == 1024 ? 10 : THREADS == 512 ? 9 : THREADS == 256 ? 8 : THREADS == 128 ? 7 : 6)
#define EXACT ((31 + BIN_BITS) / BIN_BITS)  // rounds of a search that certainly end at one order

static_assert(1 << BIN_BITS == THREADS || (THREADS == 32 && STAGE == DRAW && !SEARCHED), "sample: THREADS must be 64 to 1024");
static_assert(V <= 1 << 18, "sample: bins hold sums of at most 2^18 weights");

#if SEARCHED
// e^((x - peak) * inverse) in units of 2^-40, x no NaN. The last step is in integers: no float of 41 bits is converted to a long.
INLINE ulong probability_weight(float x, float peak, float inverse) {
  const ScaledExp power = scaled_exp(x, peak, inverse);
  const uint bits = as_type<uint>(power.mantissa);
  const int shift = int(bits >> 23) - 150 + 40 + power.exponent;
  const ulong digits = (bits & 0x7FFFFFu) | 0x800000u;
  return shift >= 0 ? digits << shift : shift > -24 ? digits >> -shift : 0;
}

struct Weights {  // the weight of a logit: its probability relative to the peak's, or 1
  float peak, inverse;
  bool by_probability;
  ulong of(uint order) const { return by_probability ? probability_weight(float_from_order(order), peak, inverse) : 1; }
};

INLINE Weights unit_weights() {
  Weights weights;
  weights.peak = weights.inverse = 0.0f, weights.by_probability = false;
  return weights;
}

INLINE Weights probability_weights(uint peak, thread const Row &row) {
  Weights weights;
  weights.peak = float_from_order(peak), weights.inverse = row.params.inverse_temperature, weights.by_probability = true;
  return weights;
}

struct Searched {  // the logits to search: the first `length` of the list, or the whole row
  bool listed;
  uint length;
};

template <typename Visitor> INLINE void for_each(Searched searched, thread const Row &row, Worker self, thread Visitor &visitor) {
  if (searched.listed) {
    for (uint i = self.index; i < searched.length; i += THREADS) visitor.visit(self.work->orders[i], self.work->tokens[i]);
  } else {
    Span span;
    span.first = self.index, span.stride = THREADS;
    for_each_logit(row, span, visitor);
  }
}

struct BinVisitor {  // adds the weights of orders in a range to their bins
  threadgroup Workspace *work;
  uint from, width, shift;
  Weights weights;
  void visit(uint order, uint) {
    if (order - from > width) return;
    const uint bin = (order - from) >> shift;
    const ulong weight = weights.of(order);
    const uint parts[3] = {uint(weight) & 0x3FFF, uint(weight >> 14) & 0x3FFF, uint(weight >> 28)};
    for (uint k = 0; k < 3; k++)
      if (parts[k]) atomic_fetch_add_explicit(&work->bins[k][bin], parts[k], memory_order_relaxed);
  }
};

INLINE ulong weight_of_bin(uint bin, Worker self) {
  ulong weight = 0;
  for (uint k = 0; k < 3; k++) weight += ulong(atomic_load_explicit(&self.work->bins[k][bin], memory_order_relaxed)) << (14 * k);
  return weight;
}

// Narrows the range to the bin in which the sum from above reaches `share`; false if it does in none. Adds the weights of the higher bins
// to `above`.
INLINE bool narrow(thread uint &low, thread uint &high, uint shift, thread ulong &above, ulong share, Worker self) {
  const uint bin = BINS - 1 - self.index;
  const ulong weight = weight_of_bin(bin, self);
  if (self.index == 0) self.work->bin = -1;
  const ulong reached = above + sum_of_group(weight, false, self);
  if (reached >= share && reached - weight < share) self.work->bin = int(bin), self.work->above = reached - weight;
  sync_threads();
  const int chosen = self.work->bin;
  if (chosen >= 0) {
    above = self.work->above;
    low += uint(chosen) << shift;
    high = min(high, low + ((1u << shift) - 1));
  }
  return chosen >= 0;
}

// `low` and `high` become the largest order in their range such that the orders from it to `high` weigh `share` together; false if all
// weigh less. With fewer rounds than EXACT a range may remain that holds the order.
INLINE bool search(Searched searched, thread const Row &row, Weights weights, thread uint &low, thread uint &high, ulong share, int rounds,
                   Worker self) {
  ulong above = 0;
  for (int round = 0; round == 0 || (round < rounds && low < high); round++) {
    BinVisitor visitor;
    visitor.work = self.work, visitor.from = low, visitor.width = high - low, visitor.weights = weights;
    visitor.shift = uint(max(0, 32 - BIN_BITS - int(clz(high - low))));
    for (uint k = 0; k < 3; k++) atomic_store_explicit(&self.work->bins[k][self.index], 0u, memory_order_relaxed);
    sync_threads();
    for_each(searched, row, self, visitor);
    sync_threads();
    if (!narrow(low, high, visitor.shift, above, share, self)) return false;
  }
  return true;
}
#endif
