// Which experts of a mixture each row has, with what shares, and the order of work by expert:
// logits = rmsnorm(x) . weight^T + bias if LOGIT_BIAS; the C experts with the largest logits, the largest first, the lower number of equals;
// their shares of the softmax over all logits, or of that over the chosen ones if RENORMALIZE, times SHARE_SCALE (1 if not defined).
//
// If SIGMOID, scores are sigmoids instead of parts of the softmax. If CHOICE_BIAS, the largest of score + bias are chosen, whose shares are
// still of the scores; if EXPERT_GROUPS, only from the KEPT_GROUPS groups of X / EXPERT_GROUPS experts whose two largest add up to the most (DeepSeek-V3,
// arXiv:2412.19437), or, if GROUP_SCORES is 1, with the largest (DeepSeek-V2, arXiv:2405.04434).
//
//   shares    [T, C] float32
//   chosen    [T, C] int32
//   order     [T C] int32      places after the last row's are unchanged
//   tasks     [1 + 3 N] int32  both: experts.h
//   gates     [T] float32      the sigmoid of one more logit, X, if SHARED_GATE
//   scratch   PREPARED_BYTES(E) (product.h) for every row, T rounded up to a multiple of 16; then LOGITS float32 for every row; 64-byte aligned
//   x         [T, E] float32
//   norm      [E] float32      RMS norm's weights; EPS inside the root; not if NORM == NO_NORM
//   weight    panels (format.h) [X, E] of the router, [X + 1, E] if SHARED_GATE
//   bias      [X] float32, if LOGIT_BIAS or CHOICE_BIAS
//   rows      [1] int32        how many rows of x there are, 0 to T; further rows of the results are unchanged
//
// E % 32 == 0, C <= X <= 4096. A row with a logit that is not finite has NaN for shares. Units of work: a row to prepare; a pair of panels
// with PIECE rows; a row to choose for. Then one thread counts.
#define I E
#include "routing.h"
#define BIAS (LOGIT_BIAS || CHOICE_BIAS)
#define BY_SCORES (SIGMOID || CHOICE_BIAS || EXPERT_GROUPS > 1)
#include "activations.h"
#include "experts.h"
#include "norm.h"
#include "product.h"
#include "thread_team.h"

#define PANELS ((X + SHARED_GATE + 15) / 16)
#define LOGITS (PANELS * 16)

#if SHARED_GATE
#define GATES_ARGUMENT float *gates,
#else
#define GATES_ARGUMENT
#endif
#include "arguments.h"  // the last one

static inline void multiply_rows(float *logits, const uint8_t *a, const uint8_t *b, const uint8_t *next, const uint8_t *prepared,
                                 int count);
static inline void choose(float *logits, float *shares, int32_t *chosen, const float *biases);
static inline void list_tasks(const int32_t *chosen, int pairs, int32_t *order, int32_t *tasks);

static void norm_route(float *shares, int32_t *chosen, int32_t *order, int32_t *tasks, GATES_ARGUMENT void *scratch, const float *x,
                       NORM_ARGUMENT const void *weight, BIAS_ARGUMENT const int32_t *rows, const struct thread_team *team) {
  const int count = rows[0], pairs = (PANELS + 1) / 2, pieces = (count + PIECE - 1) / PIECE;
  uint8_t *prepared = scratch;
  float *logits = (float *)(prepared + (count + 15) / 16 * 16 * PREPARED);
  for (int t = next_unit(team); t < count; t = next_unit(team)) prepare_normed(prepared + t * PREPARED, x + (long)t * E, norm, 0);
  barrier(team);
  for (int unit = next_unit(team); unit < pairs * pieces; unit = next_unit(team)) {
    const int pair = unit / pieces, from = unit % pieces * PIECE, many = count - from < PIECE ? count - from : PIECE;
    const uint8_t *a = (const uint8_t *)weight + 2 * pair * PANEL, *b = 2 * pair + 1 < PANELS ? a + PANEL : a;
    multiply_rows(logits + (long)from * LOGITS + pair * 32, a, b, pair + 1 < pairs ? a + 2 * PANEL : a, prepared + from * PREPARED, many);
  }
  barrier(team);
  for (int t = next_unit(team); t < count; t = next_unit(team)) {
    float *own = logits + (long)t * LOGITS;
#if SHARED_GATE
    gates[t] = v16_max_of(sigmoid(v16_set(own[X])));
#endif
    choose(own, shares + (long)t * C, chosen + (long)t * C, bias);
  }
  barrier(team);
  if (team->thread == 0) list_tasks(chosen, count * C, order, tasks);
}

// The logits of `count` rows for two panels, or for one where `b` is `a`; `logits` is the first of them.
static inline void multiply_rows(float *logits, const uint8_t *a, const uint8_t *b, const uint8_t *next, const uint8_t *prepared,
                                 int count) {
  for (int t = 0, tokens; t < count; t += tokens) {
    float tile[MAX_TOKENS * 32];
    tokens = tile_tokens(count - t);
    panel_dot(a, b, t + tokens < count ? a : next, prepared + t * PREPARED, tokens, (struct results){tile, 32, 0, 0});
    for (int r = 0; r < tokens; r++) {
      for (int c = 0; c < (a == b ? 16 : 32); c += 16) v16_store(logits + (long)(t + r) * LOGITS + c, v16_load(tile + r * 32 + c));
    }
  }
}

// chosen[C], the places of the C largest of numbers[X]: insertion into a sorted list. A NaN counts as less than any number.
static inline void choose_largest(const float *numbers, int32_t *chosen) {
  float held[C];
  for (int e = 0, n = 0; e < X; e++) {
    const float number = numbers[e] == numbers[e] ? numbers[e] : -__builtin_inff();
    if (n == C && !(number > held[C - 1])) continue;
    int at = n < C ? n++ : C - 1;
    for (; at > 0 && number > held[at - 1]; at--) held[at] = held[at - 1], chosen[at] = chosen[at - 1];
    held[at] = number, chosen[at] = e;
  }
}

static inline float largest_of(const float *logits) {
  float largest = logits[0];
  for (int e = 1; e < X; e++) largest = logits[e] > largest ? logits[e] : largest;
  return largest;
}

// Only the KEPT_GROUPS groups whose GROUP_SCORES best numbers add up to the most keep theirs, the first of equals.
static inline void keep_groups(float *numbers) {
  float totals[EXPERT_GROUPS];
  for (int g = 0; g < EXPERT_GROUPS; g++) {
    float best = -__builtin_inff(), second = best;
    for (int e = g * (X / EXPERT_GROUPS); e < (g + 1) * (X / EXPERT_GROUPS); e++) {
      if (numbers[e] > best) second = best, best = numbers[e];
      else if (numbers[e] > second) second = numbers[e];
    }
    totals[g] = GROUP_SCORES == 1 ? best : best + second;
  }
  for (int g = 0; g < EXPERT_GROUPS; g++) {
    int ahead = 0;
    for (int other = 0; other < EXPERT_GROUPS; other++) ahead += totals[other] > totals[g] || (totals[other] == totals[g] && other < g);
    for (int e = g * (X / EXPERT_GROUPS); ahead >= KEPT_GROUPS && e < (g + 1) * (X / EXPERT_GROUPS); e++) numbers[e] = -__builtin_inff();
  }
}

// The experts of a row by their scores, each of which is `of` a part.
static inline void choose_by_scores(const float *parts, float of, int32_t *chosen, const float *biases) {
  float numbers[X];
  for (int e = 0; e < X; e++) numbers[e] = parts[e] / of + (CHOICE_BIAS ? biases[e] : 0.0f);
  if (EXPERT_GROUPS > 1) keep_groups(numbers);
  choose_largest(numbers, chosen);
}

// The experts of a row and their shares; logits become e^(logit - largest), or their sigmoids.
static inline void choose(float *logits, float *shares, int32_t *chosen, const float *biases) {
  for (int e = 0; LOGIT_BIAS && e < X; e++) logits[e] += biases[e];
  if (!BY_SCORES) choose_largest(logits, chosen);
  const float largest = BY_SCORES ? largest_of(logits) : logits[chosen[0]];
  for (int e = X; e < LOGITS; e++) logits[e] = largest - 100.0f;  // e^-100 is 0 here
  v16 sums = v16_set(0.0f), odd = v16_set(0.0f);
  for (int e = 0; e < LOGITS; e += 16) {
    const v16 logit = v16_load(logits + e), part = SIGMOID ? sigmoid(logit) : v16_exp(v16_sub(logit, v16_set(largest)));
    odd = v16_fma(logit, v16_set(0.0f), odd);
    sums = v16_add(sums, part);
    v16_store(logits + e, part);
  }
  float sum = SIGMOID ? 1.0f : v16_sum(sums);
  if (BY_SCORES) choose_by_scores(logits, sum, chosen, biases);
  if (RENORMALIZE) {
    sum = BY_SCORES ? 1e-20f : 0.0f;  // all of them may be 0
    for (int c = 0; c < C; c++) sum += logits[chosen[c]];
  }
  const int finite = v16_sum(odd) == 0.0f;
  for (int c = 0; c < C; c++) shares[c] = finite ? logits[chosen[c]] / sum * SHARE_SCALE : __builtin_nanf("");
}

// Sorts the pairs by expert, by counting, and cuts what each expert has into tasks.
static inline void list_tasks(const int32_t *chosen, int pairs, int32_t *order, int32_t *tasks) {
  int32_t ends[X], count = 0;
  for (int e = 0; e < X; e++) ends[e] = 0;
  for (int p = 0; p < pairs; p++) ends[chosen[p]]++;
  for (int e = 0, start = 0; e < X; e++) {
    const int end = start + ends[e];
    for (int first = start; first < end; first += PIECE, count++) {
      int32_t *task = tasks + 1 + 3 * count;
      task[0] = e, task[1] = first, task[2] = first + PIECE < end ? first + PIECE : end;
    }
    ends[e] = start;  // where the next pair of this expert goes
    start = end;
  }
  for (int p = 0; p < pairs; p++) order[ends[chosen[p]]++] = p;
  tasks[0] = count;
}
