// sample: one row's logits as its parameters change them, and loops over them.
//
// Constants: V, PENALIZED, BIASED and SAMPLED, as sample.metal says.
#pragma once
#include "sampling.h"

#define FOURS ((V + 3) / 4)                                // tokens are read in fours
#define AHEAD (PENALIZED || BIASED ? 1 : SAMPLED ? 2 : 4)  // fours that are loaded before the first is used

struct Row {
  device const float *logits, *bias;  // the tables are null where the row does not use them
  device int *seen;
  device const uchar *prompted;
  SampleParams params;
};

struct Span {  // the fours of a row that are this thread's
  uint first, stride;
};

#if V % 4 == 0
INLINE float4 four_at(device const float *row, uint i) { return ((device const float4 *)row)[i]; }
INLINE int4 four_at(device const int *row, uint i) { return ((device const int4 *)row)[i]; }
INLINE uchar4 four_at(device const uchar *row, uint i) { return ((device const uchar4 *)row)[i]; }
#else  // after the row's end its last element again
INLINE uint4 indices(uint i) { return min(4 * i + uint4(0, 1, 2, 3), uint4(V - 1)); }
INLINE float4 four_at(device const float *row, uint i) {
  const uint4 at = indices(i);
  return float4(row[at.x], row[at.y], row[at.z], row[at.w]);
}
INLINE int4 four_at(device const int *row, uint i) {
  const uint4 at = indices(i);
  return int4(row[at.x], row[at.y], row[at.z], row[at.w]);
}
INLINE uchar4 four_at(device const uchar *row, uint i) {
  const uint4 at = indices(i);
  return uchar4(row[at.x], row[at.y], row[at.z], row[at.w]);
}
#endif

// Four logits with penalties and bias.
INLINE float4 adjusted(float4 x, thread const Row &row, uint i) {
#if PENALIZED
  if (row.seen) {
    const int4 seen = four_at(row.seen, i);
    const uchar4 prompted = four_at(row.prompted, i);
    for (int j = 0; j < 4; j++) x[j] = penalized(x[j], seen[j], prompted[j], row.params);
  }
#endif
#if BIASED
  if (row.bias) x += four_at(row.bias, i);
#endif
  return x;
}

// visitor.visit(order, token) for every token of the span.
template <typename Visitor> INLINE void for_each_logit(thread const Row &row, Span span, thread Visitor &visitor) {
  for (uint i = span.first; i < FOURS; i += AHEAD * span.stride) {
    float4 x[AHEAD];
    for (uint n = 0; n < AHEAD; n++)
      if (i + n * span.stride < FOURS) x[n] = four_at(row.logits, i + n * span.stride);
    for (uint n = 0; n < AHEAD; n++) {
      const uint from = i + n * span.stride;
      if (from >= FOURS) break;
      const float4 y = adjusted(x[n], row, from);
      for (uint j = 0; j < 4; j++)
        if (V % 4 == 0 || 4 * from + j < V) visitor.visit(order_or_nan(y[j]), 4 * from + j);
    }
  }
}

struct BestVisitor {  // the best token from `floor` on; its order is NAN_ORDER once a NaN was visited
  SampleParams params;
  uint floor;
  bool noisy;
  Candidate best;
  void visit(uint order, uint token) {
    if (order == NAN_ORDER) best.order = NAN_ORDER;
    if (order < floor || best.order == NAN_ORDER) return;
    best = better(best, make_candidate(SAMPLED && noisy ? order_or_nan(perturbed(float_from_order(order), token, params)) : order, token));
  }
};

INLINE BestVisitor best_from(uint floor, thread const Row &row) {
  BestVisitor visitor;
  visitor.params = row.params, visitor.floor = floor, visitor.noisy = row.params.inverse_temperature != 0.0f;
  visitor.best = no_candidate();
  return visitor;
}

INLINE Candidate best_of_span(thread const Row &row, Span span, uint floor) {
  BestVisitor visitor = best_from(floor, row);
  for_each_logit(row, span, visitor);
  return visitor.best;
}

struct MaxVisitor {
  uint max_order;
  void visit(uint order, uint) { max_order = max(max_order, order); }
};

INLINE uint max_of_span(thread const Row &row, Span span) {  // MIN_ORDER if it has no logits, NAN_ORDER if one is a NaN
  MaxVisitor visitor;
  visitor.max_order = MIN_ORDER;
  for_each_logit(row, span, visitor);
  return visitor.max_order;
}
