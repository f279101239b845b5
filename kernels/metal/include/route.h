// Of choose_experts.metal: what the experts of a row are chosen by, and the choice of the next one. Constants as there.
#pragma once
#include "order.h"

#include "routing.h"
#define BY_SCORES (SIGMOID || CHOICE_BIAS || EXPERT_GROUPS > 1)
#define LOGITS (X + SHARED_GATE)
#define OF_GROUP (X / EXPERT_GROUPS)

static_assert(C <= X && X <= 1024, "route: at most 1024 experts, of which C are chosen");

// Of the row: parts of the softmax before their division, or sigmoids; what experts are chosen by, in the order of order.h, 0 for one that has been
// chosen; what each group is kept by.
struct Choice {
  float parts[X];
  uint orders[X];
  float totals[EXPERT_GROUPS];
};

INLINE float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
// A NaN counts as -infinity. It is found by its bits, whatever a compiler takes for granted of floats.
INLINE uint order_by(float number) {
  const uint order = order_or_nan(number);
  return order == NAN_ORDER ? MIN_ORDER : order;
}
INLINE bool is_finite(float number) { return (as_type<uint>(number) & 0x7F800000u) != 0x7F800000u; }

// What a group is kept by: its largest number, or the sum of its two largest.
INLINE float total_of(threadgroup const uint *orders) {
  uint best = MIN_ORDER, second = MIN_ORDER;
  for (int e = 0; e < OF_GROUP; e++) {
    const uint order = orders[e];
    if (order > best) second = best, best = order;
    else if (order > second) second = order;
  }
  const float largest = float_from_order(best);
  return GROUP_SCORES == 1 ? largest : largest + float_from_order(second);
}

// Only the groups with the largest totals keep their numbers, the first of equals; those of the others become -infinity.
INLINE void keep_groups(threadgroup Choice &choice, int lane) {
  for (int g = lane; g < EXPERT_GROUPS; g += LANES) choice.totals[g] = total_of(choice.orders + g * OF_GROUP);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = lane; e < X; e += LANES) {
    const int g = e / OF_GROUP;
    int ahead = 0;
    for (int other = 0; other < EXPERT_GROUPS; other++)
      ahead += choice.totals[other] > choice.totals[g] || (choice.totals[other] == choice.totals[g] && other < g);
    if (ahead >= KEPT_GROUPS) choice.orders[e] = MIN_ORDER;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// The expert with the largest number, of those that have not been chosen; every lane gets it.
INLINE int next_expert(threadgroup Choice &choice, int lane) {
  Candidate best = make_candidate(0, 0);
  for (int e = lane; e < X; e += LANES) best = better(best, make_candidate(choice.orders[e], e));
#pragma unroll
  for (int apart = 16; apart; apart /= 2)
    best = better(best, make_candidate(simd_shuffle_xor(best.order, (ushort)apart), simd_shuffle_xor(best.token, (ushort)apart)));
  const int expert = int(best.token);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == expert % LANES) choice.orders[expert] = 0;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  return expert;
}
