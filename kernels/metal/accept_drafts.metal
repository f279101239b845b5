// accepted[b] = length of the prefix of drafts[b] that the target model drew itself; next[b] = the token that it drew after that prefix
//
//   accepted  [B] int32              length of the longest prefix of drafts[b, :lengths[b]] that equals the same prefix of chosen[b]
//   next      [B] int32              chosen[b, accepted[b]]: the token after the accepted ones, always the target model's
//   drafts    [B, DRAFTS] int32
//   chosen    [B, DRAFTS + 1] int32  the target model's token at each position; -1 where its logits had no token to draw
//   lengths   [B] int32              number of valid drafts, 0 to DRAFTS
//   count     [1] int32              number of valid sequences, at most B
//
// Grid (ceil(B / 4)), 128 threads: a SIMD group takes a sequence and compares 32 drafts at a time. A -1 equals no draft. Integers only.
// Greedy and seeded draws need no more than this: a draw is a function of logits, seed and position, so a draft is right or wrong.
// Speculation: Leviathan et al., "Fast inference from transformers via speculative decoding" (2023).
#include "gpu.h"

INLINE uint accepted_length(device const int *drafts, device const int *chosen, uint length, uint lane);

[[max_total_threads_per_threadgroup(128)]] kernel void accept_drafts(device int *accepted, device int *next, device const int *drafts,
                                                                     device const int *chosen, device const int *lengths,
                                                                     device const int *count, uint3 group [[threadgroup_position_in_grid]],
                                                                     uint lane [[thread_index_in_simdgroup]],
                                                                     uint simd [[simdgroup_index_in_threadgroup]]) {
  const uint b = group.x * 4 + simd;
  if (b >= uint(count[0])) return;
  const uint length = accepted_length(drafts + b * DRAFTS, chosen + b * (DRAFTS + 1), uint(lengths[b]), lane);
  if (lane > 0) return;
  accepted[b] = int(length);
  next[b] = chosen[b * (DRAFTS + 1) + length];
}

INLINE uint accepted_length(device const int *drafts, device const int *chosen, uint length, uint lane) {
  for (uint from = 0; from < length; from += 32) {
    const uint n = from + lane;
    const bool differs = n >= length || chosen[n] < 0 || drafts[n] != chosen[n];
    const uint first = simd_min(differs ? n : from + 32);
    if (first < from + 32) return first;
  }
  return length;
}
