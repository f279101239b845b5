// What the attention kernels share: which keys a row sees, where the cache's numbers are, and how parts of a softmax are combined.
//
// Constants: H, K, D, S, M, CACHE_TYPE (F16, BF16, F32), SCALE (above 0), WINDOW (0: none), CAP (of scores * SCALE, none if not
// defined), SINKS (none if not defined; they are not scaled). H % K == 0, D % 16 == 0, D from 32 to 512, S a power of two
// from 8 to 256. A layer's cache holds less than 2^34 numbers.
//
// q and weights are not rounded: float32 is multiplied by the cache's exact values, and all sums are float32. Scores are in units of
// log2(e), as q is multiplied by SCALE_2 when it is read. NO_SCORE is finite, so that no infinity reaches the fast exponential; a hidden
// key gets the weight 0 by selection, and its table entry is not read: some visible key is loaded in its place. A sink, one more score of
// a head that has no value, is added to the sum of a row's weights last.
//
// The online softmax is Milakov and Gimelshein's (arXiv:1805.02867), tiles and the delayed division are FlashAttention-2's
// (arXiv:2307.08691), the split over keys and its merge are flash decoding's.
#pragma once
#include "cache_number.h"

#ifndef SINKS
#define SINKS 0
#endif
#if SINKS
#define SINKS_ARGUMENT(number) device const float *sinks [[buffer(number)]],
#define SINKS_POINTER sinks
#else
#define SINKS_ARGUMENT(number)
#define SINKS_POINTER nullptr
#endif

constant constexpr int G = H / K;            // query heads to a KV head
constant constexpr float NO_SCORE = -1e38f;  // the maximum over no keys
constant constexpr float SCALE_2 = (float)(SCALE * 1.44269504f);

static_assert(H % K == 0, "attention: query heads must be a multiple of key heads");
static_assert(D % 16 == 0 && D >= 32 && D <= 512, "attention: D must be a multiple of 16 from 32 to 512");
static_assert(S >= 8 && S <= 256 && (S & (S - 1)) == 0, "attention: S must be a power of two from 8 to 256");

// The first key that a row at this position sees; the last one is its own.
INLINE int first_visible(int position) { return WINDOW > 0 ? max(0, position - WINDOW + 1) : 0; }

// Row `key % S` of a KV head's keys in a block, counted in rows of D numbers; its values are VALUES rows further on. [P, 2, K, S, D]
constant constexpr uint VALUES = K * S;
INLINE uint row_at(int block, int head, int key) { return (uint)block * (2 * VALUES) + (uint)(head * S) + (uint)(key % S); }

INLINE float fast_exp2(float x) { return fast::exp2(x); }

// CAP tanh(score / CAP), where it is defined: with c = CAP log2(e), c tanh(s / c) = c - 2 c / (e^(2 s / c) + 1).
INLINE float capped(float score) {
#ifdef CAP
  const float c = CAP * 1.44269504f, power = score * (2.0f / CAP);
  return c - 2.0f * c / (fast_exp2(power > 126.0f ? 126.0f : power) + 1.0f);
#else
  return score;
#endif
}

// The sum of a row's weights, relative to its largest score, with that of its head's sink. A sink far above all scores makes it infinite:
// then nothing is left of the values. That, and a sink of -infinity, is why it is not the fast exponential.
INLINE float with_sink(float sum, float max_score, device const float *head_sinks, int head) {
  return SINKS ? sum + exp2(head_sinks[head] * 1.44269504f - max_score) : sum;
}

// What earlier sums are multiplied by when the maximum score rises. Nothing changes where it does not: exactly 1.
INLINE float rescale_of(float earlier_max, float max_score) { return earlier_max == max_score ? 1.0f : fast_exp2(earlier_max - max_score); }
