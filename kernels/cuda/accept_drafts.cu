// accepted[b] = the number of drafts[b] that equal what the target model drew, up to the first that differs; next[b] = what it drew there
//
//   accepted  [B] int32              length of the longest prefix of drafts[b, :lengths[b]] that equals the same prefix of chosen[b]
//   next      [B] int32              chosen[b, accepted[b]]: the token after the accepted ones, always the target model's
//   drafts    [B, DRAFTS] int32
//   chosen    [B, DRAFTS + 1] int32  what the target model drew at each place; -1 where its logits were unusable
//   lengths   [B] int32              number of drafts of each sequence, 0 to DRAFTS
//   count     [1] int32              number of sequences, at most B
//
// Launch: grid (ceil(B / 4)), 128 threads. Unit of work: a warp has a sequence and compares 32 drafts at a time. A -1 equals no draft.
// Greedy and seeded draws need no more than this: a draw is a function of logits, seed and position, so a draft is either right or wrong.
// Speculation: Leviathan et al., "Fast inference from transformers via speculative decoding" (2023).
#include "gpu.cuh"

constexpr int THREADS = 128;

DEVICE int accepted_length(const int *drafts, const int *chosen, int length, int lane);

extern "C" __global__ void __launch_bounds__(THREADS)
    accept_drafts(int *accepted, int *next, const int *drafts, const int *chosen, const int *lengths, const int *count) {
  const int b = (blockIdx.x * THREADS + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (b >= count[0]) return;
  const int length = accepted_length(drafts + (s64)b * DRAFTS, chosen + (s64)b * (DRAFTS + 1), lengths[b], lane);
  if (lane > 0) return;
  accepted[b] = length;
  next[b] = chosen[(s64)b * (DRAFTS + 1) + length];
}

DEVICE int accepted_length(const int *drafts, const int *chosen, int length, int lane) {
  for (int from = 0; from < length; from += 32) {
    const int n = from + lane;
    const bool differs = n >= length || chosen[n] < 0 || drafts[n] != chosen[n];
    const u32 first = __ballot_sync(ALL_LANES, differs);
    if (first) return from + __ffs((int)first) - 1;
  }
  return length;
}
