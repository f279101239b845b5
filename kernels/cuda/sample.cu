// token = argmax of what a row's parameters make of its logits: penalties, bias, min_p, top_k, top_p, temperature, noise
//
//   tokens    [B] int32           the lowest id among equals; -1 if a logit is NaN or none is above -inf
//   lines     [B, 12] int32       what each row asks for (struct line); if SAMPLED, its position moves one on
//   scratch   SCRATCH_BYTES, 8-byte aligned, all zeros, and left so
//   seen      [R, V] int32        if PENALIZED: how often each token is in a row's output; the drawn one counts once more (0 for -1)
//   logits    [B, V] float32
//   prompted  [R, V] uint8        if PENALIZED: whether a token is in a row's prompt
//   bias      [R, V] float32      if BIASED: added to the logits after the penalties
//   count     [1] int32           rows that are meant, at most B
//
// SAMPLED, TOP_K, TOP_P, MIN_P, PENALIZED, BIASED (0 or 1) say what at least one row needs; a row that does not need it skips it. Row
// NEUTRAL_ROW of `seen` and `bias` belongs to such rows and is neither read nor written. V up to 2^18; rows of logits, seen and bias on a
// border of 16 bytes if V is a multiple of 4.
//
// grid (PARTS, B), block THREADS (a power of two, 64 to 1024; 1024 is meant). PARTS, a power of two up to 32, blocks of threads share a
// row: as many as keep PARTS * B within the number of multiprocessors (twice that without filters) and PARTS within V / 4096. With filters
// (TOP_K, TOP_P or MIN_P) and PARTS > 1 the kernel is launched twice, STAGE LOOK and then STAGE DRAW; otherwise once, STAGE WHOLE.
// SCRATCH_BYTES is 0 if PARTS is 1; else B * (32 + (filters ? 4 * THREADS + 8 * (CAPACITY + 1) : 0)).
//
// A row without filters is read once. With top_k or top_p it is read twice. First every thread finds the largest of its logits: where the
// k-th of those is reached, k logits reach it at least and hardly more. Then the logits that reach it are gathered in shared memory, and,
// for top_p, all are weighed. The exact thresholds are searched and the draw is made in that list. Only where it proves too short or too
// long (flat distributions, a k of thousands) one block of threads goes over the whole row again, a few times.
//
// Every score is one float32 expression of one token; all that is summed over tokens is integer. So no bit depends on how a row is divided,
// and tokens are those of kernels/cpu/sample.c and tinyvllm/ops/sample.py. Thresholds by counting in bins of the bits: radix select as in
// Alabi et al., "Fast k-selection algorithms for graphics processing units" (2012).
#include "sampling.cuh"

#define WHOLE 0
#define LOOK 1
#define DRAW 2
#define FILTERED (TOP_K || TOP_P || MIN_P)
#define SEARCHED (TOP_K || TOP_P)

#ifndef THREADS
#define THREADS 1024
#endif
#ifndef CAPACITY
#define CAPACITY 4095  // of the list
#endif

enum {
  WARPS = THREADS / 32,
  FOURS = (V + 3) / 4,  // tokens are read in fours
  BINS = THREADS,
  BIN_BITS = THREADS == 1024 ? 10 : THREADS == 512 ? 9 : THREADS == 256 ? 8 : THREADS == 128 ? 7 : 6,
  FEW = PENALIZED || BIASED ? 1 : 2, MANY = PENALIZED || BIASED ? 1 : 4,  // fours that are loaded before the first is looked at
  EXACT = (31 + BIN_BITS) / BIN_BITS,                     // rounds of a search that certainly end at a number
  MOST_MAXIMA = THREADS / 16 * 15,                     // this many of the maxima are reached by 2.8 * THREADS logits of random order
};

static_assert(1 << BIN_BITS == THREADS, "sample: THREADS must be 64, 128, 256, 512 or 1024");
static_assert(PARTS >= 1 && PARTS <= 32 && (PARTS & (PARTS - 1)) == 0, "sample: PARTS must be a power of two up to 32");
static_assert(CAPACITY + 1 >= THREADS, "sample: the list holds a number of every thread for a while");
static_assert(V <= 1 << 18, "sample: bins hold sums of at most 2^18 weights");
static_assert(STAGE == WHOLE ? !FILTERED || PARTS == 1 : FILTERED && PARTS > 1, "sample: stages are for filters in several parts");

struct row {
  const float *logits, *bias;  // the tables are null where they are not for this row
  int *seen;
  const u8 *prompted;
  line asks;
};

struct span {  // the fours of a row that are this thread's
  int first, stride;
};

struct meeting {  // where the parts of a row leave what the last of them needs
  u64 best, total;
  u32 listed, arrived;
  u32 unused[2];
};

struct workspace {
  u64 warps[WARPS];
  u32 lows[WARPS], highs[WARPS];
  u64 above;
  int bin;
  u32 listed, base, last;
#if SEARCHED
  u32 bins[3][BINS];  // sums of weights, 14 bits of each weight apiece
  u32 orders[CAPACITY + 1];
  int tokens[CAPACITY + 1];
#endif
};

// --- what the threads of a block tell each other. All end with a barrier behind the last use of the workspace.

DEVICE u64 largest_of_block(u64 key, workspace &work) {
  for (int apart = 16; apart > 0; apart /= 2) key = max(key, __shfl_xor_sync(ALL_LANES, key, apart));
  if (threadIdx.x % 32 == 0) work.warps[threadIdx.x / 32] = key;
  __syncthreads();
  for (int warp = 0; warp < WARPS; warp++) key = max(key, work.warps[warp]);
  __syncthreads();
  return key;
}

// The sum of this thread's and all lower threads' values; if `total`, of all threads'.
DEVICE u64 sum_of_block(u64 value, workspace &work, bool total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int apart = 1; apart < 32; apart *= 2) {
    const u64 below = __shfl_up_sync(ALL_LANES, value, apart);
    if (lane >= apart) value += below;
  }
  if (lane == 31) work.warps[warp] = value;
  __syncthreads();
  u64 others = lane < WARPS && (total || lane < warp) ? work.warps[lane] : 0;
  for (int apart = 16; apart > 0; apart /= 2) others += __shfl_xor_sync(ALL_LANES, others, apart);
  __syncthreads();
  return total ? others : value + others;
}

DEVICE void range_of_block(u32 &low, u32 &high, workspace &work) {
  low = __reduce_min_sync(ALL_LANES, low), high = __reduce_max_sync(ALL_LANES, high);
  if (threadIdx.x % 32 == 0) work.lows[threadIdx.x / 32] = low, work.highs[threadIdx.x / 32] = high;
  __syncthreads();
  const int lane = threadIdx.x % 32 < WARPS ? threadIdx.x % 32 : 0;
  low = __reduce_min_sync(ALL_LANES, work.lows[lane]), high = __reduce_max_sync(ALL_LANES, work.highs[lane]);
  __syncthreads();
}

// --- a row's logits

template <typename number> struct alignas(4 * sizeof(number)) four {
  number at[4];
};

template <typename number> DEVICE four<number> four_at(const number *row, int i) {  // behind the row's end its last again
  if constexpr (V % 4 == 0) {
    return ((const four<number> *)row)[i];
  } else {
    four<number> numbers;
    for (int j = 0; j < 4; j++) numbers.at[j] = row[min(4 * i + j, V - 1)];
    return numbers;
  }
}

DEVICE void adjust(four<float> &x, const row &row, int i) {
#if PENALIZED
  if (row.seen) {
    const four<int> seen = four_at(row.seen, i);
    const four<u8> prompted = four_at(row.prompted, i);
    for (int j = 0; j < 4; j++) x.at[j] = penalized(x.at[j], seen.at[j], prompted.at[j], row.asks);
  }
#endif
#if BIASED
  if (row.bias) {
    const four<float> bias = four_at(row.bias, i);
    for (int j = 0; j < 4; j++) x.at[j] += bias.at[j];
  }
#endif
}

// see(token, logit) for every token of the span.
template <int AHEAD, typename function> DEVICE void for_each_logit(const row &row, span span, const function &see) {
  for (int i = span.first; i < FOURS; i += AHEAD * span.stride) {
    four<float> x[AHEAD];
#pragma unroll
    for (int n = 0; n < AHEAD; n++)
      if (i + n * span.stride < FOURS) x[n] = four_at(row.logits, i + n * span.stride);
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int from = i + n * span.stride;
      if (from >= FOURS) break;
      adjust(x[n], row, from);
      for (int j = 0; j < 4; j++)
        if (V % 4 == 0 || 4 * from + j < V) see(4 * from + j, x[n].at[j]);
    }
  }
}

DEVICE u64 best_of(const row &row, span span, float floor) {  // this thread's
  const bool noisy = SAMPLED && row.asks.inverse_temperature != 0.0f;
  float best = -INFINITE;
  int at = 0;
  bool broken = false;
  for_each_logit<SAMPLED ? FEW : MANY>(row, span, [&](int token, float x) {
    broken |= x != x;
    if (x < floor) return;
    const float score = noisy ? perturbed(x, token, row.asks) : x;
    if (score > best) best = score, at = token;
  });
  return broken ? NAN_KEY : key_of(best, at);
}

#if FILTERED
DEVICE u32 highest_of(const row &row, span span) {  // order bits of this thread's largest logit, of -inf if it has none
  float most = -INFINITE;
  bool broken = false;
  for_each_logit<MANY>(row, span, [&](int, float x) { most = fmaxf(most, x), broken |= x != x; });
  return broken ? NO_NUMBER : order_of(most);
}
#endif

#if SEARCHED
// --- a search for a threshold

struct weigher {  // what a logit weighs: its probability relative to the peak's, or 1
  float peak, inverse;
  bool by_probability;
};

DEVICE u64 weigh(const weigher &weigher, float x) {
  return weigher.by_probability ? probability(x, weigher.peak, weigher.inverse) : 1;
}

DEVICE void put(u32 (&bins)[3][BINS], int bin, u64 weight) {
  const u32 parts[3] = {(u32)weight & 0x3FFF, (u32)(weight >> 14) & 0x3FFF, (u32)(weight >> 28)};
  for (int k = 0; k < 3; k++)
    if (parts[k]) atomicAdd(&bins[k][bin], parts[k]);
}

// Leaves of the range the bin in which the sum from above reaches `share`; false if it does in none. Afterwards `above` is what the
// higher bins weigh together with what was above before.
DEVICE bool narrow(workspace &work, u32 &low, u32 &high, int shift, u64 &above, u64 share) {
  const int bin = BINS - 1 - threadIdx.x;
  const u64 weight = work.bins[0][bin] + ((u64)work.bins[1][bin] << 14) + ((u64)work.bins[2][bin] << 28);
  if (threadIdx.x == 0) work.bin = -1;
  const u64 reached = above + sum_of_block(weight, work, false);
  if (reached >= share && reached - weight < share) work.bin = bin, work.above = reached - weight;
  __syncthreads();
  const int found = work.bin;
  if (found >= 0) {
    above = work.above;
    low += (u32)found << shift;
    high = min(high, low + ((1u << shift) - 1));
  }
  return found >= 0;
}

struct list {  // numbers to search: each(see) calls see(order) for those that are this thread's
  const u32 *orders;
  u32 length;
  template <typename function> __device__ __forceinline__ void each(const function &see) const {
    for (u32 i = threadIdx.x; i < length; i += THREADS) see(orders[i]);
  }
};

struct whole_row {
  const row &numbers;
  template <typename function> __device__ __forceinline__ void each(const function &see) const {
    for_each_logit<1>(numbers, {(int)threadIdx.x, THREADS}, [&](int, float x) { see(order_of(x)); });
  }
};

// `low` and `high` become the largest number in their range such that those from it to `high` weigh `share` together; false if all
// weigh less. With fewer rounds than EXACT a range may remain that holds the number.
template <typename numbers>
DEVICE bool search(workspace &work, const numbers &those, const weigher &weigher, u32 &low, u32 &high, u64 share, int rounds) {
  u64 above = 0;
  for (int round = 0; round == 0 || (round < rounds && low < high); round++) {
    const u32 from = low, width = high - low;
    const int shift = max(0, 32 - BIN_BITS - __clz(width));
    for (int k = 0; k < 3; k++) work.bins[k][threadIdx.x] = 0;
    __syncthreads();
    those.each([&](u32 order) {
      if (order - from <= width) put(work.bins, (order - from) >> shift, weigh(weigher, of_order(order)));
    });
    __syncthreads();
    if (!narrow(work, low, high, shift, above, share)) return false;
  }
  return true;
}

// --- the list of a row

// From where on logits are listed: as far down as the row's filters may need, if they need little. Otherwise it is a guess.
DEVICE u32 border_of(workspace &work, u32 most, u32 lowest, u32 peak, u32 floor, const line &asks) {
  if (V <= CAPACITY) return floor;
  const u64 wanted = TOP_K && asks.top_k < MOST_MAXIMA ? asks.top_k : MOST_MAXIMA;
  work.orders[threadIdx.x] = most;
  __syncthreads();
  u32 low = lowest, high = peak;
  search(work, list{work.orders, THREADS}, weigher{}, low, high, wanted, 2);
  return max(low, floor);
}

// Lists what reaches the border; what this thread's logits from `low` on weigh.
DEVICE u64 gather(workspace &work, const row &row, span span, u32 border, bool weighed, float low, const weigher &weigher) {
  u64 total = 0;
  if (threadIdx.x == 0) work.listed = 0;
  __syncthreads();
  for_each_logit<MANY>(row, span, [&](int token, float x) {
    const u32 order = order_of(x);
    if (order >= border) {
      const u32 at = atomicAdd(&work.listed, 1u);
      if (at < CAPACITY) work.orders[at] = order, work.tokens[at] = token;
    }
    if (weighed && x >= low) total += weigh(weigher, x);
  });
  __syncthreads();
  return total;
}

// The lists and sums of all parts to the last of them; whether this is the last.
DEVICE bool hand_over(workspace &work, meeting *meeting, u64 *list, u64 &total) {
  if (threadIdx.x == 0) {
    work.base = atomicAdd(&meeting->listed, work.listed);
    atomicAdd(&meeting->total, total);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < min(work.listed, (u32)CAPACITY) && work.base + i < CAPACITY; i += THREADS)
    list[work.base + i] = (u64)work.orders[i] << 32 | (u32)work.tokens[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    work.last = arrive(&meeting->arrived) == PARTS - 1;
    if (work.last) {
      work.listed = meeting->listed, work.above = meeting->total;
      meeting->listed = 0, meeting->total = 0, meeting->arrived = 0;
    }
  }
  __syncthreads();
  if (!work.last) return false;
  total = work.above;
  for (u32 i = threadIdx.x; i < min(work.listed, (u32)CAPACITY); i += THREADS)
    work.orders[i] = (u32)(list[i] >> 32), work.tokens[i] = (int)(u32)list[i], list[i] = 0;
  __syncthreads();
  return true;
}

struct found {  // in a list
  u32 peak, border;
  float floor;  // of min_p
  u64 total;    // what all that reaches top_p's lower end weighs, if there is no top_k
};

// This thread's best of those that top_k and top_p let live.
DEVICE u64 choose(workspace &work, const row &row, const found &found) {
  const line &asks = row.asks;
  const u32 listed = work.listed, lowest = order_of(found.floor);
  const bool held = listed <= CAPACITY;  // else the list has gaps
  const span all = {(int)threadIdx.x, THREADS};
  const weigher ones = {}, probabilities = {of_order(found.peak), asks.inverse_temperature, true};
  const list in_list = {work.orders, listed};
  const whole_row in_row = {row};
  float floor = found.floor;
  if (TOP_K && asks.top_k < V) {
    u32 low = found.border, high = found.peak;
    bool reached = held && search(work, in_list, ones, low, high, asks.top_k, EXACT);
    if (!reached && !(held && found.border == lowest)) {
      low = LOWEST, high = found.peak;
      reached = search(work, in_row, ones, low, high, asks.top_k, EXACT);
    }
    if (reached && of_order(low) > floor) floor = of_order(low);
  }
  if (TOP_P && asks.top_p < 1 << 30) {
    const float weightless = probabilities.peak - 28.0f / asks.inverse_temperature;  // e^-28 is less than 2^-40
    const float least = weightless > floor ? weightless : floor;
    floor = least;
    if (least < probabilities.peak) {
      u64 total = found.total;
      if (TOP_K && asks.top_k < V) {
        total = 0;
        const auto add = [&](u32 order) { total += order >= order_of(least) ? weigh(probabilities, of_order(order)) : 0; };
        if (held && found.border <= order_of(least))
          in_list.each(add);
        else
          in_row.each(add);
        total = sum_of_block(total, work, true);
      }
      const u64 share = share_of(total, asks.top_p);
      u32 low = max(found.border, order_of(least)), high = found.peak;
      if (!(held && search(work, in_list, probabilities, low, high, share, EXACT))) {
        low = order_of(least), high = found.peak;
        search(work, in_row, probabilities, low, high, share, EXACT);
      }
      floor = of_order(low);
    }
  }
  if (!held || found.border > order_of(floor)) return best_of(row, all, floor);
  u64 best = 0;
  for (u32 i = threadIdx.x; i < listed; i += THREADS)
    if (work.orders[i] >= order_of(floor)) {
      const int token = work.tokens[i];
      best = max(best, key_of(perturbed(of_order(work.orders[i]), token, asks), token));
    }
  return best;
}
#endif

// --- writing

DEVICE void finish(u64 key, const row &row, int *token, line *asked) {  // in one thread
  const int drawn = token_of(key);
  *token = drawn;
  if (SAMPLED) asked->position = row.asks.position + 1;
  if (PENALIZED && row.seen) row.seen[drawn > 0 ? drawn : 0] += 1;
}

// Whether this is the last part; its thread 0 then has the best of all.
DEVICE bool best_of_parts(workspace &work, u64 &key, meeting *meeting) {
  if (PARTS == 1) return true;
  if (threadIdx.x == 0) {
    atomicMax(&meeting->best, key);
    work.last = arrive(&meeting->arrived) == PARTS - 1;
    if (work.last) {
      key = meeting->best;
      meeting->best = 0, meeting->arrived = 0;
    }
  }
  __syncthreads();
  return work.last;
}

#if PENALIZED
#define SEEN_ARGUMENT int *seen,
#define PROMPTED_ARGUMENT const u8 *prompted,
#else
#define SEEN_ARGUMENT
#define PROMPTED_ARGUMENT
#endif
#if BIASED
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
sample(int *tokens, line *lines, u8 *scratch, SEEN_ARGUMENT const float *logits, PROMPTED_ARGUMENT BIAS_ARGUMENT const int *count) {
  static __shared__ workspace work;
  const int part = blockIdx.x, b = blockIdx.y, B = gridDim.y;
  if (b >= count[0]) return;
  row row = {logits + (s64)b * V, 0, 0, 0, lines[b]};
#if PENALIZED
  const s64 table = (s64)row.asks.seen_row * V;
  if (row.asks.seen_row != NEUTRAL_ROW) row.seen = seen + table, row.prompted = prompted + table;
#endif
#if BIASED
  if (row.asks.bias_row != NEUTRAL_ROW) row.bias = bias + (s64)row.asks.bias_row * V;
#endif
  const span mine = {part * THREADS + (int)threadIdx.x, PARTS * THREADS};
  meeting *meeting = (struct meeting *)scratch + b;
  float floor = -INFINITE;
  u64 key = 0;
  bool known = false;  // the best token of this part: then `key` holds this thread's
#if FILTERED
  u32 *maxima = (u32 *)(scratch + 32 * (s64)B) + (s64)b * THREADS;
  const line &asks = row.asks;
  const bool warm = asks.inverse_temperature != 0.0f;
  const bool searched = warm && ((TOP_K && asks.top_k < V) || (TOP_P && asks.top_p < 1 << 30));
  if (searched || (warm && MIN_P && asks.min_p > -INFINITE)) {
    u32 most = STAGE == DRAW ? maxima[threadIdx.x] : highest_of(row, mine);
#if STAGE == LOOK
    for (int apart = PARTS / 2; apart > 0; apart /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, apart));
    if (threadIdx.x % PARTS == 0) maxima[(part * THREADS + threadIdx.x) / PARTS] = most;
#else
    u32 lowest = most, peak = most;
    range_of_block(lowest, peak, work);
    if (MIN_P && asks.min_p > -INFINITE) floor = of_order(peak) + asks.min_p;
    known = peak == NO_NUMBER || peak == LOWEST;
#if SEARCHED
    if (searched && !known) {
      const bool weighed = TOP_P && asks.top_p < 1 << 30 && !(TOP_K && asks.top_k < V);
      const weigher weigher = {of_order(peak), asks.inverse_temperature, true};
      const float weightless = weigher.peak - 28.0f / asks.inverse_temperature, least = weightless > floor ? weightless : floor;
      const u32 border = border_of(work, most, lowest, peak, order_of(floor), asks);
      u64 total = gather(work, row, mine, border, weighed, least, weigher);
      if (weighed) total = sum_of_block(total, work, true);
      if (PARTS > 1) {
        u64 *list = (u64 *)(scratch + (32 + 4 * THREADS) * (s64)B) + (s64)b * (CAPACITY + 1);
        if (!hand_over(work, meeting, list, total)) return;
        maxima[threadIdx.x] = 0;
      }
      key = largest_of_block(choose(work, row, {peak, border, floor, total}), work);
      if (threadIdx.x == 0) finish(key, row, tokens + b, lines + b);
      return;
    }
#endif
#endif
  }
  if (STAGE == LOOK) return;
#endif
  if (!known) key = best_of(row, mine, floor);
  key = largest_of_block(key, work);
  if (!best_of_parts(work, key, meeting)) return;
#if FILTERED
  if (PARTS > 1) maxima[threadIdx.x] = 0;
#endif
  if (threadIdx.x == 0) finish(key, row, tokens + b, lines + b);
}
