// From the logits of each row to its experts and their shares: the C experts with the largest logits, the largest first, the lower number of equals;
// shares of the softmax over all logits, or of that over the chosen ones if RENORMALIZE, times SHARE_SCALE (1 if not defined).
//
//   shares   [T, C] float32
//   chosen   [T, C] int32
//   gates    [T] float32     the sigmoid of the last logit, if SHARED_GATE
//   logits   [T, X + SHARED_GATE] float32
//   bias     [X] float32, if LOGIT_BIAS or CHOICE_BIAS
//   rows     [1] int32       number of valid rows, 0 to T; the rows of the results from there on are not written
//
// LOGIT_BIAS adds the bias to the logits. If SIGMOID, scores are sigmoids instead of parts of the softmax. If CHOICE_BIAS, the largest of score + bias
// are chosen, whose shares are still of the scores; if EXPERT_GROUPS, only from the KEPT_GROUPS groups of X / EXPERT_GROUPS experts whose two largest add
// up to the most (DeepSeek-V3, arXiv:2412.19437), or, if GROUP_SCORES is 1, with the largest (DeepSeek-V2, arXiv:2405.04434). Constants as in
// kernels/cpu/norm_route.c.
//
// C <= X <= 1024. A row with a logit that is not finite has NaN for shares, and some experts. Sums over experts: a lane has the experts l, l + 32, ...,
// ascending; then lanes are added in pairs 16, 8, 4, 2 and 1 apart. A SIMD group, which is a threadgroup, takes a row.
//     grid (T, 1, 1), 32 threads
#include "route.h"

#if SHARED_GATE
#define GATES_ARGUMENT device float *gates,
#else
#define GATES_ARGUMENT
#endif
#if LOGIT_BIAS || CHOICE_BIAS
#define BIAS_ARGUMENT device const float *bias,
#define BIAS_OF(e) bias[e]
#else
#define BIAS_ARGUMENT
#define BIAS_OF(e) 0.0f
#endif

[[max_total_threads_per_threadgroup(32)]] kernel void choose_experts(device float *shares, device int *chosen,
                                                                     GATES_ARGUMENT device const float *logits,
                                                                     BIAS_ARGUMENT device const int *rows,
                                                                     uint3 group [[threadgroup_position_in_grid]],
                                                                     uint thread_in_simd [[thread_index_in_simdgroup]]) {
  threadgroup Choice choice;
  const int t = group.x, lane = thread_in_simd;
  if (t >= rows[0]) return;
  device const float *own = logits + (ulong)t * LOGITS;
  float largest = MINUS_INFINITY, sum = 0.0f;
  bool finite = true;
  for (int e = lane; e < X; e += LANES) {
    const float logit = LOGIT_BIAS ? own[e] + BIAS_OF(e) : own[e];
    choice.parts[e] = logit;
    finite = finite && is_finite(logit);
    largest = max(largest, logit);
  }
  largest = simd_max(largest);
  finite = simd_all(finite);
  for (int e = lane; e < X; e += LANES) {
    const float logit = choice.parts[e], part = SIGMOID ? sigmoid(logit) : precise::exp(logit - largest);
    choice.orders[e] = order_by(logit);
    choice.parts[e] = part;
    sum += part;
  }
  sum = SIGMOID ? 1.0f : sum_lanes(sum);
  for (int e = lane; BY_SCORES && e < X; e += LANES) {
    const float score = choice.parts[e] / sum;
    choice.orders[e] = order_by(CHOICE_BIAS ? score + BIAS_OF(e) : score);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (EXPERT_GROUPS > 1) keep_groups(choice, lane);
  float picked = BY_SCORES ? 1e-20f : 0.0f;  // all of them may be 0
  for (int c = 0; c < C; c++) {
    const int expert = next_expert(choice, lane);
    picked += choice.parts[expert];
    if (lane == 0) chosen[(ulong)t * C + c] = expert;
  }
  const float of = RENORMALIZE ? picked : sum;
  for (int c = 0; lane == 0 && c < C; c++) {
    const float share = choice.parts[chosen[(ulong)t * C + c]] / of * SHARE_SCALE;
    shares[(ulong)t * C + c] = finite ? share : as_type<float>(0x7FC00000u);
  }
#if SHARED_GATE
  if (lane == 0) gates[t] = sigmoid(own[X]);
#endif
}
