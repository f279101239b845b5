// token = argmax of a row's logits after what its parameters ask for: penalties, bias, min_p, top_k, top_p, temperature, noise
//
//   tokens    [count] int32       the lowest id among equals; -1 if a logit is NaN or none is above -inf
//   params    [count, 12] int32   each row's SampleParams (kernels/include/params.h); if SAMPLED, its position is incremented
//   scratch   SCRATCH_BYTES, 64-byte aligned
//   seen      [R, V] int32        if PENALIZED: how often each token is in a row's output; the drawn one is counted (0 for -1)
//   logits    [count, V] float32
//   prompted  [R, V] uint8        if PENALIZED: whether a token is in a row's prompt
//   bias      [R, V] float32      if BIASED: added to the logits after the penalties
//   count     [1] int32           rows of the batch
//
// SAMPLED, TOP_K, TOP_P, MIN_P, PENALIZED, BIASED (0 or 1) say what at least one row needs; a row that does not need it skips it. Row
// NEUTRAL_ROW (if PENALIZED or BIASED) of `seen` and `bias` belongs to such rows and is neither read nor written. Any V.
//
// As many rows as divide evenly among the threads are drawn by one thread each; for each of the others every thread has a part of the
// vocabulary. The scores are those of kernels/include/sampling.h, and all that is summed over tokens is int64, so no bit depends on how a
// row is divided.
//
// Most functions that are called from several places are not inlined: each copy is compiled again, a sixth of the time that this kernel took
// of a first start. max_of is: without that a draw by AVX-512 took up to 1.45 times as long.
#include "lanes.h"
#include "sampling.h"
#include "thread_team.h"

#define FILTERED (TOP_K || TOP_P || MIN_P)

enum {
  RUN = 128,  // tokens that are skipped together where none of them passes
  RUNS = (V + RUN - 1) / RUN,
  WAYS = 16,  // parts into which a search for a threshold divides its range at a time
};

struct report {  // what a thread publishes for the other threads of a row
  _Alignas(64) int64_t sums[WAYS];
  float low, high;
  int32_t token, broken;
};

// Scratch: reports of every thread, two of each; then for every row adjusted logits, if any, and, if FILTERED, a list and the runs' maxima.
#define REPORT_BYTES (2 * MAX_THREADS * (long)sizeof(struct report))
#define ADJUSTED_FLOATS ((PENALIZED || BIASED) * (long)V)
#define ROW_FLOATS (ADJUSTED_FLOATS + FILTERED * ((long)V + RUNS))
#define SCRATCH_BYTES (REPORT_BYTES + count * ROW_FLOATS * 4)

struct part {  // a thread's part of a row, and the threads among which the row is divided
  const struct thread_team *team;
  struct report *reports;
  int turn;  // of the two sets of reports: one is being read while the other is written
  int first, end;
  float *list, *maxima;
};

struct tables {
  int32_t *tokens;
  SampleParams *params;
  float *work;  // ROW_FLOATS for every row
  const float *logits, *bias;
  int32_t *seen;
  const uint8_t *prompted;
};

static struct part part_of(const struct thread_team *team, struct report *reports);
NOINLINE void draw(struct part *part, const struct tables *tables, int b);

#if PENALIZED
#define SEEN_ARGUMENT int32_t *seen,
#define PROMPTED_ARGUMENT const uint8_t *prompted,
#define SEEN seen
#define PROMPTED prompted
#else
#define SEEN_ARGUMENT
#define PROMPTED_ARGUMENT
#define SEEN 0
#define PROMPTED 0
#endif
#if BIASED
#define BIAS_ARGUMENT const float *bias,
#define BIAS bias
#else
#define BIAS_ARGUMENT
#define BIAS 0
#endif

static void sample(int32_t *tokens, SampleParams *params, void *scratch, SEEN_ARGUMENT const float *logits,
                   PROMPTED_ARGUMENT BIAS_ARGUMENT const int32_t *count, const struct thread_team *team) {
  const struct tables tables = {tokens, params, (float *)((char *)scratch + REPORT_BYTES), logits, BIAS, SEEN, PROMPTED};
  struct thread_pool unused = {0};
  const struct thread_team alone = {0, 1, &unused};
  struct part all = part_of(&alone, (struct report *)scratch + team->thread), mine = part_of(team, scratch);
  const int whole = count[0] - count[0] % team->threads;
  for (int b = next_unit(team); b < whole; b = next_unit(team)) draw(&all, &tables, b);
  for (int b = whole; b < count[0]; b++) draw(&mine, &tables, b);
}

static struct part part_of(const struct thread_team *team, struct report *reports) {
  const int first = (int)((long)RUNS * team->thread / team->threads) * RUN;
  const int end = (int)((long)RUNS * (team->thread + 1) / team->threads) * RUN;
  return (struct part){team, reports, 0, first, V < end ? V : end, 0, 0};
}

// --- a row

static void adjust(float *y, const float *x, const int32_t *seen, const uint8_t *prompted, const float *bias, const struct part *part,
                   SampleParams params);
NOINLINE float floor_of(struct part *part, const float *x, const SampleParams *params);
NOINLINE int32_t best_of(struct part *part, const float *x, const SampleParams *params, float floor);

NOINLINE void draw(struct part *part, const struct tables *tables, int b) {
  const SampleParams params = tables->params[b];
  const float *x = tables->logits + (long)b * V;
  float *work = tables->work + b * ROW_FLOATS, floor = MINUS_INFINITY;
#if PENALIZED || BIASED
  int32_t *seen = PENALIZED && params.seen_row != NEUTRAL_ROW ? tables->seen + (long)params.seen_row * V : 0;
  const float *bias = BIASED && params.bias_row != NEUTRAL_ROW ? tables->bias + (long)params.bias_row * V : 0;
  if (seen || bias) {
    adjust(work, x, seen, seen ? tables->prompted + (long)params.seen_row * V : 0, bias, part, params);
    x = work;
  }
#endif
#if FILTERED
  part->list = work + ADJUSTED_FLOATS + part->first;
  part->maxima = work + ADJUSTED_FLOATS + V;
  if (params.inverse_temperature != 0.0f) floor = floor_of(part, x + part->first, &params);
#endif
  const int32_t token = best_of(part, x, &params, floor);
  if (part->team->thread > 0) return;
  tables->tokens[b] = token;
  if (SAMPLED) tables->params[b].position = params.position + 1;
#if PENALIZED
  if (seen) seen[token > 0 ? token : 0] += 1;
#endif
}

#if PENALIZED || BIASED
static void adjust(float *y, const float *x, const int32_t *seen, const uint8_t *prompted, const float *bias, const struct part *part,
                   SampleParams params) {
  for (int v = part->first; v < part->end; v++) y[v] = x[v];
  if (seen)
    for (int v = part->first; v < part->end; v++) y[v] = penalized(y[v], seen[v], prompted[v], params);
  if (bias)
    for (int v = part->first; v < part->end; v++) y[v] += bias[v];
}
#endif

// --- a run of logits

static inline int min(int a, int b) { return a < b ? a : b; }

static float max_of(const float *x, int n) {  // NaNs left out; -inf if n is 0
  v16 max16 = v16_set(MINUS_INFINITY);
  int i = 0;
  for (; i + 16 <= n; i += 16) max16 = v16_max(v16_load(x + i), max16);
  float max = v16_max_of(max16);
  for (; i < n; i++) max = x[i] > max ? x[i] : max;
  return max;
}

NOINLINE float min_of(const float *x, int n) {
  float each[16], min = -MINUS_INFINITY;
  v16 min16 = v16_set(-MINUS_INFINITY);
  int i = 0;
  for (; i + 16 <= n; i += 16) min16 = v16_min(v16_load(x + i), min16);
  v16_store(each, min16);
  for (int k = 0; k < 16; k++) min = each[k] < min ? each[k] : min;
  for (; i < n; i++) min = x[i] < min ? x[i] : min;
  return min;
}

static inline int any_nan(const float *x, int n) {
  uint32_t found = 0;
  for (int i = 0; i < n; i++) found |= x[i] != x[i];
  return (int)found;
}

static inline int any_within(const float *x, int n, float low, float below) {
  uint32_t found = 0;
  for (int i = 0; i < n; i++) found |= (x[i] >= low) & (x[i] < below);
  return (int)found;
}

static inline int any_from(const float *x, int n, float low) {  // a NaN counts
  uint32_t found = 0;
  for (int i = 0; i < n; i++) found |= !(x[i] < low);
  return (int)found;
}

static inline void perturb(float *scores, const float *x, int n, int token, SampleParams params) {
#pragma clang loop vectorize_width(16) interleave_count(1)
  for (int i = 0; i < n; i++) scores[i] = perturbed(x[i], (u32)(token + i), params);
}

// --- between the threads of a row

static inline struct report *report_of(const struct part *part, int thread) {
  return part->reports + (part->turn & 1) * MAX_THREADS + thread;
}

NOINLINE int32_t best_of(struct part *part, const float *x, const SampleParams *params, float floor) {
  const int noisy = SAMPLED && params->inverse_temperature != 0.0f, filtered = FILTERED && floor > MINUS_INFINITY;
  float best = MINUS_INFINITY;
  int32_t token = -1, broken = 0;
  for (int v = part->first; v < part->end; v += RUN) {
    const int n = min(RUN, part->end - v);
    const float *y = x + v;
    float scores[RUN];
    if (filtered && !any_from(y, n, floor)) continue;
    broken |= any_nan(y, n);
    if (noisy) {
      perturb(scores, y, n, v, *params);
      if (filtered)
        for (int i = 0; i < n; i++) scores[i] = y[i] < floor ? MINUS_INFINITY : scores[i];
      y = scores;
    }
    const float max = max_of(y, n);
    if (max > best) {
      best = max;
      for (token = v; y[token - v] != max;) token++;
    }
  }
  struct report *mine = report_of(part, part->team->thread);
  mine->high = best, mine->token = token, mine->broken = broken;
  barrier(part->team);
  best = MINUS_INFINITY, token = -1;
  for (int thread = 0; thread < part->team->threads; thread++) {  // in the order of their tokens
    const struct report *other = report_of(part, thread);
    broken |= other->broken;
    if (other->high > best) best = other->high, token = other->token;
  }
  part->turn++;
  return broken ? -1 : token;
}

#if FILTERED
NOINLINE void share_range(struct part *part, float *low, float *high) {  // the minimum of `low` and the maximum of `high` of all threads
  report_of(part, part->team->thread)->low = *low;
  report_of(part, part->team->thread)->high = *high;
  barrier(part->team);
  for (int thread = 0; thread < part->team->threads; thread++) {
    const struct report *other = report_of(part, thread);
    *low = other->low < *low ? other->low : *low;
    *high = other->high > *high ? other->high : *high;
  }
  part->turn++;
}

NOINLINE void share_sums(struct part *part, int64_t *sums) {
  for (int j = 0; j < WAYS; j++) report_of(part, part->team->thread)->sums[j] = sums[j];
  barrier(part->team);
  for (int j = 0; j < WAYS; j++) sums[j] = 0;
  for (int thread = 0; thread < part->team->threads; thread++)
    for (int j = 0; j < WAYS; j++) sums[j] += report_of(part, thread)->sums[j];
  part->turn++;
}

// --- thresholds

struct weigher {  // the weight of a logit in a search: e^((x - peak) * inverse) in units of 2^-40, or 1
  float peak, inverse;
  int by_probability;
};

NOINLINE float search(struct part *part, const float *x, int n, float low, float high, const struct weigher *weigher, int64_t share,
                      int32_t top_p);

// The lowest logit that passes the row's filters; any number if a logit is NaN.
NOINLINE float floor_of(struct part *part, const float *x, const SampleParams *params) {
  const int n = part->end - part->first, runs = (n + RUN - 1) / RUN;
  float *maxima = part->maxima + part->first / RUN;
  for (int c = 0; c < runs; c++) maxima[c] = max_of(x + c * RUN, min(RUN, n - c * RUN));
  float lowest_maximum = min_of(maxima, runs), peak = max_of(maxima, runs), floor = MINUS_INFINITY;
  share_range(part, &lowest_maximum, &peak);
  if (params->min_p > MINUS_INFINITY) floor = peak + params->min_p;
  if (params->top_k < V) {
    const struct weigher ones = {0};
    // where the k-th of the runs' maxima is reached, at least k logits reach it
    float low = MINUS_INFINITY;
    if (params->top_k <= RUNS) low = search(part, maxima, runs, lowest_maximum, peak, &ones, params->top_k, 0);
    const float kth = search(part, x, n, low, peak, &ones, params->top_k, 0);
    floor = kth > floor ? kth : floor;
  }
  if (params->top_p < TOP_P_ONE) {
    const struct weigher weigher = {peak, params->inverse_temperature, 1};
    const float weightless = weightless_below(peak, params->inverse_temperature);
    floor = search(part, x, n, weightless > floor ? weightless : floor, peak, &weigher, 0, params->top_p);
  }
  return floor;
}

// Sixteen numbers from low to high in ascending order. At equal distances as numbers or, every second time, as bits, so that no
// distribution can make a search long.
NOINLINE void divide(float *border, float low, float high, int turn) {
  const float width = high - low;
  const uint64_t from = order_of(low), steps = order_of(high) - from;
  for (int j = 1; j < WAYS - 1; j++) {
    const float even = low + width * ((float)j * (1.0f / (WAYS - 1)));
    const uint64_t order = from + steps * (uint64_t)j / (WAYS - 1);
    border[j] = turn % 2 || width == -MINUS_INFINITY ? float_from_order((uint32_t)order) : even < high ? even : high;
  }
  border[0] = low, border[WAYS - 1] = high;
}

static inline int64_t probability(float x, float peak, float inverse) {  // in units of 2^-40
  const ScaledExp power = scaled_exp(x, peak, inverse);
  return (int64_t)(power.mantissa * float_from_bits((uint32_t)(power.exponent + 40 + 127) << 23));
}

// Adds to sums[j] the weight of all logits from border[j] on.
static void weigh(int64_t *sums, const float *x, int n, const float *border, const struct weigher *weigher) {
  for (int at = 0; at < n; at += RUN, x += RUN) {
    const int m = min(RUN, n - at);
    int64_t weights[RUN];
    if (!any_from(x, m, border[0])) continue;
    if (weigher->by_probability) {
      const float peak = weigher->peak, inverse = weigher->inverse;
#pragma clang loop vectorize_width(16) interleave_count(1)
      for (int i = 0; i < m; i++) weights[i] = probability(x[i], peak, inverse);
    } else {
      for (int i = 0; i < m; i++) weights[i] = 1;
    }
    for (int j = 0; j < WAYS; j++) {
      const float least = border[j];
      int64_t sum = 0;
#pragma clang loop vectorize_width(16) interleave_count(1)
      for (int i = 0; i < m; i++) sum += x[i] >= least ? weights[i] : 0;
      sums[j] += sum;
    }
  }
}

// Copies the x from `low` to less than `below` to `list`, which may be x; returns how many they are.
static int keep(float *list, const float *x, int n, float low, float below) {
  int kept = 0;
  for (int at = 0; at < n; at += RUN) {
    const int end = min(at + RUN, n);
    if (!any_within(x + at, end - at, low, below)) continue;
    for (int i = at; i < end; i++) {
      const float value = x[i];
      list[kept] = value;
      kept += (value >= low) & (value < below);
    }
  }
  return kept;
}

// The largest of the x of all threads such that those that reach it weigh `share` together, or top_p of all, if share is 0; x below low
// weigh nothing, high is the largest x. Every turn keeps those between two neighbouring borders, and at least the largest goes.
NOINLINE float search(struct part *part, const float *x, int n, float low, float high, const struct weigher *weigher, int64_t share,
                      int32_t top_p) {
  int64_t above = 0;  // the weight of those that were dropped above the range
  for (int turn = 0; low < high; turn++) {
    float border[WAYS];
    int64_t sums[WAYS] = {0};
    divide(border, low, high, turn);
    weigh(sums, x, n, border, weigher);
    share_sums(part, sums);
    if (share == 0) share = (int64_t)share_of((u64)sums[0], top_p);
    int j = WAYS - 1;
    while (j > 0 && above + sums[j] < share) j--;
    if (j == WAYS - 1) return high;
    above += sums[j + 1];
    n = keep(part->list, x, n, border[j], border[j + 1]);
    x = part->list;
    low = min_of(x, n), high = max_of(x, n);
    share_range(part, &low, &high);
  }
  return low;
}
#endif
