// A row of logits in sample.cu, as each thread reads it: after penalties and bias, in vectors of four.
#pragma once
#include "sampling.h"

struct Row {
  const float *logits, *bias;  // tables are null where they do not apply to this row
  int *seen;
  const u8 *prompted;
  SampleParams params;
};

struct Span {  // the vectors of a row that are this thread's
  int first, stride;
};

template <typename Number> struct alignas(4 * sizeof(Number)) Four {
  Number at[4];
};

template <typename Number> DEVICE Four<Number> four_at(const Number *row, int i) {  // after the row's end, its last number again
  if constexpr (V % 4 == 0) {
    return ((const Four<Number> *)row)[i];
  } else {
    Four<Number> numbers;
    for (int j = 0; j < 4; j++) numbers.at[j] = row[min(4 * i + j, V - 1)];
    return numbers;
  }
}

DEVICE void adjust(Four<float> &x, const Row &row, int i) {
#if PENALIZED
  if (row.seen) {
    const Four<int> seen = four_at(row.seen, i);
    const Four<u8> prompted = four_at(row.prompted, i);
    for (int j = 0; j < 4; j++) x.at[j] = penalized(x.at[j], seen.at[j], prompted.at[j], row.params);
  }
#endif
#if BIASED
  if (row.bias) {
    const Four<float> bias = four_at(row.bias, i);
    for (int j = 0; j < 4; j++) x.at[j] += bias.at[j];
  }
#endif
}

// Calls visit(token, logit) for every token of the span; AHEAD vectors are loaded before the first is used.
template <int AHEAD, typename Function> DEVICE void for_each_logit(const Row &row, Span span, const Function &visit) {
  for (int i = span.first; i < FOURS; i += AHEAD * span.stride) {
    Four<float> x[AHEAD];
#pragma unroll
    for (int n = 0; n < AHEAD; n++)
      if (i + n * span.stride < FOURS) x[n] = four_at(row.logits, i + n * span.stride);
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int from = i + n * span.stride;
      if (from >= FOURS) break;
      adjust(x[n], row, from);
      for (int j = 0; j < 4; j++)
        if (V % 4 == 0 || 4 * from + j < V) visit(4 * from + j, x[n].at[j]);
    }
  }
}

// The key of this thread's best token whose logit is at least `floor`; NAN_KEY if any of its logits is NaN.
DEVICE u64 best_of(const Row &row, Span span, float floor) {
  const bool noisy = SAMPLED && row.params.inverse_temperature != 0.0f;
  float best = MINUS_INFINITY;
  int best_token = 0;
  bool broken = false;
  for_each_logit<SAMPLED ? FEW : MANY>(row, span, [&](int token, float x) {
    broken |= x != x;
    if (x < floor) return;
    const float score = noisy ? perturbed(x, token, row.params) : x;
    if (score > best) best = score, best_token = token;
  });
  return broken ? NAN_KEY : key_of(best, best_token);
}

// The order of this thread's largest logit: MIN_ORDER if it has none, NAN_ORDER if any is NaN.
DEVICE u32 max_order_of(const Row &row, Span span) {
  float largest = MINUS_INFINITY;
  bool broken = false;
  for_each_logit<MANY>(row, span, [&](int, float x) { largest = fmaxf(largest, x), broken |= x != x; });
  return broken ? NAN_ORDER : order_of(largest);
}
