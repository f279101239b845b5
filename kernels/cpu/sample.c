// token = argmax of what a row's parameters make of its logits: penalties, bias, min_p, top_k, top_p, temperature, noise
//
//   tokens    [count] int32       the lowest id among equals; -1 if a logit is NaN or none is above -inf
//   lines     [count, 12] int32   what each row asks for (struct line); if SAMPLED, its position moves one on
//   scratch   SCRATCH_BYTES, 64-byte aligned
//   seen      [R, V] int32        if PENALIZED: how often each token is in a row's output; the drawn one counts once more (0 for -1)
//   logits    [count, V] float32
//   prompted  [R, V] uint8        if PENALIZED: whether a token is in a row's prompt
//   bias      [R, V] float32      if BIASED: added to the logits after the penalties
//   count     [1] int32           rows of the batch
//
// SAMPLED, TOP_K, TOP_P, MIN_P, PENALIZED, BIASED (0 or 1) say what at least one row needs; a row that does not need it skips it. Row
// NEUTRAL_ROW of `seen` and `bias` belongs to such rows and is neither read nor written. Any V.
//
// As many rows as divide among the lanes are drawn by one lane each; of the others every lane has a part of the vocabulary.
//
// Every score is one float32 expression of one token, with fused multiply-add where the compiler of the reference (tinyvllm/ops/sample.py)
// puts it; all that is summed over tokens is int64. So no bit depends on how a row is divided.
//
// Threefry-2x32: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Logarithm: Moshier's Cephes, logf.
#include "numbers.h"
#include "lanes.h"
#include "thread_team.h"

#define FILTERED (TOP_K || TOP_P || MIN_P)
#define INFINITE __builtin_inff()

enum {
  CHUNK = 128,  // tokens that are skipped together where none of them passes
  CHUNKS = (V + CHUNK - 1) / CHUNK,
  WAYS = 16,  // parts into which a search for a threshold divides its range at a time
  MOST_LANES = 64,
};

struct line {
  int32_t seen_row, bias_row;
  uint32_t seed_low, seed_high, position;
  float inverse_temperature;  // 0: no noise, no filters
  int32_t top_k, top_p;       // V: off; in units of 2^-30, 2^30: off
  float min_p;                // how far below the largest logit; -inf: off
  float repetition, presence, frequency;
};

struct report {  // what a lane of a row tells the others
  _Alignas(64) int64_t sums[WAYS];
  float low, high;
  int32_t token, broken;
};

// Scratch: reports of every lane, two of each; then for every row adjusted logits, if any, and, if FILTERED, a list and the chunks' maxima.
#define REPORT_BYTES (2 * MOST_LANES * (long)sizeof(struct report))
#define ADJUSTED_FLOATS ((PENALIZED || BIASED) * (long)V)
#define ROW_FLOATS (ADJUSTED_FLOATS + FILTERED * ((long)V + CHUNKS))
#define SCRATCH_BYTES (REPORT_BYTES + count * ROW_FLOATS * 4)

struct part {  // a lane's part of a row, and the lanes among which the row is divided
  const struct team *team;
  struct report *reports;
  int turn;  // of the two sets of reports: one is being read while the other is written
  int first, end;
  float *list, *maxima;
};

static inline float fused(float a, float b, float c) {  // a * b + c, rounded once where the processor can
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

static inline int smaller(int a, int b) { return a < b ? a : b; }

static inline struct report *report_of(const struct part *part, int lane) {
  return part->reports + (part->turn & 1) * MOST_LANES + lane;
}

static float largest(const float *x, int n) {  // NaNs left out; -inf of none
  v16 most16 = v16_set(-INFINITE);
  int i = 0;
  for (; i + 16 <= n; i += 16) most16 = v16_max(v16_load(x + i), most16);
  float most = v16_max_of(most16);
  for (; i < n; i++) most = x[i] > most ? x[i] : most;
  return most;
}

static float smallest(const float *x, int n) {
  float least16[16], least = INFINITE;
  v16 least_so_far = v16_set(INFINITE);
  int i = 0;
  for (; i + 16 <= n; i += 16) least_so_far = v16_min(v16_load(x + i), least_so_far);
  v16_store(least16, least_so_far);
  for (int k = 0; k < 16; k++) least = least16[k] < least ? least16[k] : least;
  for (; i < n; i++) least = x[i] < least ? x[i] : least;
  return least;
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

// --- noise

static inline uint32_t threefry(uint32_t key0, uint32_t key1, uint32_t a, uint32_t b) {
  const uint32_t key2 = key0 ^ key1 ^ 0x1BD11BDAu;
#define MIX(r) a += b, b = (b << r | b >> (32 - r)) ^ a
#define MIX_EVEN MIX(13), MIX(15), MIX(26), MIX(6)
#define MIX_ODD MIX(17), MIX(29), MIX(16), MIX(24)
  a += key0, b += key1;
  MIX_EVEN, a += key1, b += key2 + 1;
  MIX_ODD, a += key2, b += key0 + 2;
  MIX_EVEN, a += key0, b += key1 + 3;
  MIX_ODD, a += key1, b += key2 + 4;
  MIX_EVEN, a += key2;
  return a;
}

// ln x in two parts: the factor 2^exponent, and of the rest m + 1 the bend: m - ln(m + 1).
struct logarithm {
  float exponent, rest, square, bend;
};

static inline struct logarithm take_apart(float x) {
  const int32_t bits = (int32_t)bits_of_float(x) - 0x3F3504F3;
  const float rest = float_from_bits((uint32_t)((bits & 0x7FFFFF) + 0x3F3504F3)), m = rest + -1.0f;
  float y = fused(m, 7.0376836292e-2f, -1.1514610310e-1f);
  y = fused(y, m, 1.1676998740e-1f);
  y = fused(y, m, -1.2420140846e-1f);
  y = fused(y, m, 1.4249322787e-1f);
  y = fused(y, m, -1.6668057665e-1f);
  y = fused(y, m, 2.0000714765e-1f);
  y = fused(y, m, -2.4999993993e-1f);
  y = fused(y, m, 3.3333331174e-1f);
  return (struct logarithm){(float)(bits >> 23), rest, m * m, fused(y, m, -0.5f)};
}

// Minus the noise of a token: ln(-ln(1 - u)), u of 31 random bits.
static inline float negative_gumbel(uint32_t word) {
  const float scale = 0x1p-31f, ln2 = 0.6931471805599453f, t = (float)(int32_t)(word >> 1) + 0.5f;
  const struct logarithm one_less = take_apart(fused(t, -scale, 1.0f));
  const float large = fused(one_less.exponent, -ln2, fused(-one_less.square, one_less.bend, -one_less.rest)) + 1.0f;
  const float cubic = t * fused(t, 0x1p-33f, 0.3333333333333333f), square = t * fused(cubic, scale, 0.5f);
  const float small = t * fused(square, scale, 1.0f) * scale;
  const struct logarithm exponential = take_apart(t * scale < 0.01f ? small : large);
  return fused(exponential.exponent, ln2, fused(exponential.square, exponential.bend, exponential.rest)) + -1.0f;
}

static inline void perturb(float *scores, const float *x, int n, int token, const struct line *line) {
  const uint32_t low = line->seed_low, high = line->seed_high, position = line->position;
  const float inverse = line->inverse_temperature;
#pragma clang loop vectorize_width(16) interleave_count(1)
  for (int i = 0; i < n; i++) scores[i] = fused(x[i], inverse, -negative_gumbel(threefry(low, high, (uint32_t)(token + i), position)));
}

// --- penalties and bias

#if PENALIZED || BIASED
static void adjust(float *y, const float *x, const int32_t *seen, const uint8_t *prompted, const float *bias, const struct part *part,
                   const struct line *line) {
  const float repetition = line->repetition, presence = line->presence, frequency = line->frequency;
  for (int v = part->first; v < part->end; v++) y[v] = x[v];
  if (seen)
    for (int v = part->first; v < part->end; v++) {
      const float repeated = y[v] > 0.0f ? y[v] / repetition : y[v] * repetition;
      const float least = (seen[v] > 0 || prompted[v] > 0) ? repeated : y[v];
      y[v] = fused(-frequency, (float)seen[v], least - (seen[v] > 0 ? presence : 0.0f));
    }
  if (bias)
    for (int v = part->first; v < part->end; v++) y[v] += bias[v];
}
#endif

// --- filters

#if FILTERED
static inline uint32_t order_of(float x) {  // compares as x does
  const uint32_t bits = bits_of_float(x);
  return bits >> 31 ? 0x80000000u - (bits & 0x7FFFFFFFu) : bits + 0x80000000u;
}
static inline float of_order(uint32_t order) {
  return float_from_bits(order >> 31 ? order - 0x80000000u : 0x80000000u | (0x80000000u - order));
}

// Sixteen numbers from low to high in ascending order. At equal distances as numbers or, every second time, as bits, so that no
// distribution can make a search long.
static void divide(float *border, float low, float high, int turn) {
  const float width = high - low;
  const uint64_t from = order_of(low), steps = order_of(high) - from;
  for (int j = 1; j < WAYS - 1; j++) {
    const float even = low + width * ((float)j * (1.0f / (WAYS - 1)));
    const uint64_t order = from + steps * (uint64_t)j / (WAYS - 1);
    border[j] = turn % 2 || width == INFINITE ? of_order((uint32_t)order) : even < high ? even : high;
  }
  border[0] = low, border[WAYS - 1] = high;
}

struct weigher {  // what a logit weighs in a search: e^((x - peak) * inverse) in units of 2^-40, or 1
  float peak, inverse;
  int by_probability;
};

static inline int64_t probability(float x, float peak, float inverse) {
  float t = (x - peak) * inverse * 1.4426950408889634f;
  t = x < peak ? (t > -100.0f ? t : -100.0f) : 0.0f;  // an infinite peak minus itself is NaN
  const int32_t n = (int32_t)(t - 0.5f);
  const float r = t - (float)n;
  float y = fused(r, 0.0001535920892f, 0.001339262701f);
  y = fused(y, r, 0.009618384764f);
  y = fused(y, r, 0.05550347269f);
  y = fused(y, r, 0.2402264476f);
  y = fused(y, r, 0.6931471825f);
  y = fused(y, r, 1.0f);
  return (int64_t)(y * float_from_bits((uint32_t)(n + 40 + 127) << 23));
}

// For every border, what all that reaches it weighs together, added to `sums`.
static void weigh(int64_t *sums, const float *x, int n, const float *border, const struct weigher *weigher) {
  for (int at = 0; at < n; at += CHUNK, x += CHUNK) {
    const int m = smaller(CHUNK, n - at);
    int64_t weights[CHUNK];
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

// The x from low on and below another, side by side in `list`, which may be x; how many.
static int keep(float *list, const float *x, int n, float low, float below) {
  int kept = 0;
  for (int at = 0; at < n; at += CHUNK) {
    const int end = smaller(at + CHUNK, n);
    if (!any_within(x + at, end - at, low, below)) continue;
    for (int i = at; i < end; i++) {
      const float value = x[i];
      list[kept] = value;
      kept += (value >= low) & (value < below);
    }
  }
  return kept;
}

static void meet_with_range(struct part *part, float *low, float *high) {  // the least low and the largest high of all lanes
  report_of(part, part->team->lane)->low = *low;
  report_of(part, part->team->lane)->high = *high;
  meet(part->team);
  for (int lane = 0; lane < part->team->lanes; lane++) {
    const struct report *told = report_of(part, lane);
    *low = told->low < *low ? told->low : *low;
    *high = told->high > *high ? told->high : *high;
  }
  part->turn++;
}

static void meet_with_sums(struct part *part, int64_t *sums) {
  for (int j = 0; j < WAYS; j++) report_of(part, part->team->lane)->sums[j] = sums[j];
  meet(part->team);
  for (int j = 0; j < WAYS; j++) sums[j] = 0;
  for (int lane = 0; lane < part->team->lanes; lane++)
    for (int j = 0; j < WAYS; j++) sums[j] += report_of(part, lane)->sums[j];
  part->turn++;
}

static int64_t share_of(int64_t total, int32_t top_p) {  // total * top_p / 2^30 in 63 bits
  const int64_t share = (total >> 30) * top_p + (((total & ((1 << 30) - 1)) * top_p) >> 30);
  return share > 1 ? share : 1;
}

// The largest of the x of all lanes such that those that reach it weigh `share` together, or top_p of all, if share is 0; x below low
// weigh nothing, high is the largest x. Every turn leaves those between two neighbouring borders, and at least the largest goes.
static float search(struct part *part, const float *x, int n, float low, float high, const struct weigher *weigher, int64_t share,
                    int32_t top_p) {
  int64_t above = 0;  // what those weigh that have gone upwards
  for (int turn = 0; low < high; turn++) {
    float border[WAYS];
    int64_t sums[WAYS] = {0};
    divide(border, low, high, turn);
    weigh(sums, x, n, border, weigher);
    meet_with_sums(part, sums);
    if (share == 0) share = share_of(sums[0], top_p);
    int j = WAYS - 1;
    while (j > 0 && above + sums[j] < share) j--;
    if (j == WAYS - 1) return high;
    above += sums[j + 1];
    n = keep(part->list, x, n, border[j], border[j + 1]);
    x = part->list;
    low = smallest(x, n), high = largest(x, n);
    meet_with_range(part, &low, &high);
  }
  return low;
}

// The lowest logit that the row's filters let live; if a logit is NaN, whatever it be.
static float floor_of(struct part *part, const float *x, const struct line *line) {
  const int n = part->end - part->first, chunks = (n + CHUNK - 1) / CHUNK;
  float *maxima = part->maxima + part->first / CHUNK;
  for (int c = 0; c < chunks; c++) maxima[c] = largest(x + c * CHUNK, smaller(CHUNK, n - c * CHUNK));
  float lowest_maximum = smallest(maxima, chunks), peak = largest(maxima, chunks), floor = -INFINITE;
  meet_with_range(part, &lowest_maximum, &peak);
  if (line->min_p > -INFINITE) floor = peak + line->min_p;
  if (line->top_k < V) {
    const struct weigher ones = {0};
    // where the k-th of the chunks' maxima is reached, k logits reach it at least
    float low = -INFINITE;
    if (line->top_k <= CHUNKS) low = search(part, maxima, chunks, lowest_maximum, peak, &ones, line->top_k, 0);
    const float kth = search(part, x, n, low, peak, &ones, line->top_k, 0);
    floor = kth > floor ? kth : floor;
  }
  if (line->top_p < 1 << 30) {
    const struct weigher weigher = {peak, line->inverse_temperature, 1};
    const float weightless = peak - 28.0f / line->inverse_temperature;  // e^-28 is less than 2^-40
    floor = search(part, x, n, weightless > floor ? weightless : floor, peak, &weigher, 0, line->top_p);
  }
  return floor;
}
#endif

// --- a row

static inline int32_t best_of(struct part *part, const float *x, const struct line *line, float floor) {
  const int noisy = SAMPLED && line->inverse_temperature != 0.0f, filtered = FILTERED && floor > -INFINITE;
  float best = -INFINITE;
  int32_t token = -1, broken = 0;
  for (int v = part->first; v < part->end; v += CHUNK) {
    const int n = smaller(CHUNK, part->end - v);
    const float *y = x + v;
    float scores[CHUNK];
    if (filtered && !any_from(y, n, floor)) continue;
    broken |= any_nan(y, n);
    if (noisy) {
      perturb(scores, y, n, v, line);
      if (filtered)
        for (int i = 0; i < n; i++) scores[i] = y[i] < floor ? -INFINITE : scores[i];
      y = scores;
    }
    const float most = largest(y, n);
    if (most > best) {
      best = most;
      for (token = v; y[token - v] != most;) token++;
    }
  }
  struct report *mine = report_of(part, part->team->lane);
  mine->high = best, mine->token = token, mine->broken = broken;
  meet(part->team);
  best = -INFINITE, token = -1;
  for (int lane = 0; lane < part->team->lanes; lane++) {  // in the order of their tokens
    const struct report *told = report_of(part, lane);
    broken |= told->broken;
    if (told->high > best) best = told->high, token = told->token;
  }
  part->turn++;
  return broken ? -1 : token;
}

struct tables {
  int32_t *tokens;
  struct line *lines;
  float *work;  // ROW_FLOATS for every row
  const float *logits, *bias;
  int32_t *seen;
  const uint8_t *prompted;
};

static void draw(struct part *part, const struct tables *tables, int b) {
  const struct line line = tables->lines[b];
  const float *x = tables->logits + (long)b * V;
  float *work = tables->work + b * ROW_FLOATS, floor = -INFINITE;
#if PENALIZED || BIASED
  int32_t *seen = PENALIZED && line.seen_row != NEUTRAL_ROW ? tables->seen + (long)line.seen_row * V : 0;
  const float *bias = BIASED && line.bias_row != NEUTRAL_ROW ? tables->bias + (long)line.bias_row * V : 0;
  if (seen || bias) {
    adjust(work, x, seen, seen ? tables->prompted + (long)line.seen_row * V : 0, bias, part, &line);
    x = work;
  }
#endif
#if FILTERED
  part->list = work + ADJUSTED_FLOATS + part->first;
  part->maxima = work + ADJUSTED_FLOATS + V;
  if (line.inverse_temperature != 0.0f) floor = floor_of(part, x + part->first, &line);
#endif
  const int32_t token = best_of(part, x, &line, floor);
  if (part->team->lane > 0) return;
  tables->tokens[b] = token;
  if (SAMPLED) tables->lines[b].position = line.position + 1;
#if PENALIZED
  if (seen) seen[token > 0 ? token : 0] += 1;
#endif
}

static struct part part_of(const struct team *team, struct report *reports) {
  const int first = (int)((long)CHUNKS * team->lane / team->lanes) * CHUNK;
  const int end = smaller(V, (int)((long)CHUNKS * (team->lane + 1) / team->lanes) * CHUNK);
  return (struct part){team, reports, 0, first, end, 0, 0};
}

#if PENALIZED
#define SEEN_ARGUMENT int32_t *seen,
#define PROMPTED_ARGUMENT const uint8_t *prompted,
#else
#define SEEN_ARGUMENT
#define PROMPTED_ARGUMENT
#define seen 0
#define prompted 0
#endif
#if BIASED
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#define bias 0
#endif

static void sample(int32_t *tokens, struct line *lines, void *scratch, SEEN_ARGUMENT const float *logits, PROMPTED_ARGUMENT BIAS_ARGUMENT
                   const int32_t *count, const struct team *team) {
  const struct tables tables = {tokens, lines, (float *)((char *)scratch + REPORT_BYTES), logits, bias, seen, prompted};
  struct thread_pool nobody = {0};
  const struct team lone = {0, 1, &nobody};
  struct part all = part_of(&lone, (struct report *)scratch + team->lane), mine = part_of(team, scratch);
  const int whole = count[0] - count[0] % team->lanes;
  for (int b = next(team); b < whole; b = next(team)) draw(&all, &tables, b);
  for (int b = whole; b < count[0]; b++) draw(&mine, &tables, b);
}
