// From the logits of a row to its experts and their shares: the C experts with the largest logits, the largest first, the lower number of equals;
// shares of the softmax over all logits, or of that over the chosen ones if RENORMALIZE, times SHARE_SCALE (1 if not defined).
//
// LOGIT_BIAS adds the bias to the logits. If SIGMOID, scores are sigmoids instead of parts of the softmax. If CHOICE_BIAS, the largest of score + bias
// are chosen, whose shares are still of the scores; if EXPERT_GROUPS, only from the KEPT_GROUPS groups of X / EXPERT_GROUPS experts whose two largest add
// up to the most (DeepSeek-V3, arXiv:2412.19437), or, if GROUP_SCORES is 1, with the largest (DeepSeek-V2, arXiv:2405.04434). Constants as in
// kernels/cpu/norm_route.c.
//
// A row with a logit that is not finite has NaN for shares, and some experts. Sums over experts: lane l has the experts l, l + 32, ..., ascending;
// then lanes are added by a butterfly.
#pragma once
#include "order.h"

#include "routing.h"
#define BY_SCORES (SIGMOID || CHOICE_BIAS || EXPERT_GROUPS > 1)
#define LOGITS (X + SHARED_GATE)
#define OF_GROUP (X / EXPERT_GROUPS)

static_assert(C <= X && X <= 1024, "route: at most 1024 experts, of which C are chosen");

// A warp's memory for one row: parts of the softmax before their division, or sigmoids; what experts are chosen by, in the order of order.h, 0 for one
// that has been chosen; of each group what it is kept by.
struct Choice {
  float parts[X];
  u32 orders[X];
  float totals[EXPERT_GROUPS];
};

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}
DEVICE float largest_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}
DEVICE Candidate best_of_warp(Candidate best) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const u32 order = __shfl_xor_sync(ALL_LANES, best.order, distance), token = __shfl_xor_sync(ALL_LANES, best.token, distance);
    best = better(best, make_candidate(order, token));
  }
  return best;
}

// A NaN counts as -infinity.
DEVICE u32 order_by(float number) { return order_of(number == number ? number : MINUS_INFINITY); }

// What a group is kept by: its largest number, or the sum of its two largest.
DEVICE float total_of(const u32 *orders) {
  u32 best = MIN_ORDER, second = MIN_ORDER;
  for (int e = 0; e < OF_GROUP; e++) {
    const u32 order = orders[e];
    if (order > best) second = best, best = order;
    else if (order > second) second = order;
  }
  const float largest = float_from_order(best);
  return GROUP_SCORES == 1 ? largest : largest + float_from_order(second);
}

// Only the groups with the largest totals keep their numbers, the first of equals; those of the others become -infinity.
DEVICE void keep_groups(Choice &choice, int lane) {
  for (int g = lane; g < EXPERT_GROUPS; g += 32) choice.totals[g] = total_of(choice.orders + g * OF_GROUP);
  __syncwarp();
  for (int e = lane; e < X; e += 32) {
    const int g = e / OF_GROUP;
    int ahead = 0;
    for (int other = 0; other < EXPERT_GROUPS; other++)
      ahead += choice.totals[other] > choice.totals[g] || (choice.totals[other] == choice.totals[g] && other < g);
    if (ahead >= KEPT_GROUPS) choice.orders[e] = MIN_ORDER;
  }
  __syncwarp();
}

// The expert with the largest number, of those that have not been chosen; every lane gets it.
DEVICE int next_expert(Choice &choice, int lane) {
  Candidate best = make_candidate(0, 0);
  for (int e = lane; e < X; e += 32) best = better(best, make_candidate(choice.orders[e], e));
  const int expert = (int)best_of_warp(best).token;
  __syncwarp();
  if (lane == expert % 32) choice.orders[expert] = 0;
  __syncwarp();
  return expert;
}

// The experts of a row and their shares, by one warp. `logits` [LOGITS], `bias` [X] if there is one.
DEVICE void choose(Choice &choice, float *shares, int *chosen, const float *logits, const float *bias, int lane) {
  float largest = MINUS_INFINITY, sum = 0.0f;
  bool finite = true;
  for (int e = lane; e < X; e += 32) {
    const float logit = LOGIT_BIAS ? logits[e] + bias[e] : logits[e];
    choice.parts[e] = logit;
    finite = finite && logit - logit == 0.0f;
    largest = fmaxf(largest, logit);
  }
  largest = largest_of_warp(largest);
  finite = __all_sync(ALL_LANES, finite);
  for (int e = lane; e < X; e += 32) {
    const float logit = choice.parts[e], part = SIGMOID ? sigmoid(logit) : expf(logit - largest);
    choice.orders[e] = order_by(logit);
    choice.parts[e] = part;
    sum += part;
  }
  sum = SIGMOID ? 1.0f : sum_of_warp(sum);
  for (int e = lane; BY_SCORES && e < X; e += 32) {
    const float score = choice.parts[e] / sum;
    choice.orders[e] = order_by(CHOICE_BIAS ? score + bias[e] : score);
  }
  __syncwarp();
  if (EXPERT_GROUPS > 1) keep_groups(choice, lane);
  float picked = BY_SCORES ? 1e-20f : 0.0f;  // all of them may be 0
  for (int c = 0; c < C; c++) {
    const int expert = next_expert(choice, lane);
    picked += choice.parts[expert];
    if (lane == 0) chosen[c] = expert;
  }
  const float of = RENORMALIZE ? picked : sum;
  for (int c = 0; lane == 0 && c < C; c++) shares[c] = finite ? choice.parts[chosen[c]] / of * SHARE_SCALE : __uint_as_float(0x7FC00000u);
}
