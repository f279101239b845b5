// token = argmax of what a row's parameters make of its logits: penalties, bias, min_p, top_k, top_p, temperature, noise
//
//   tokens    [B] int32           the lowest id among equals; -1 if a logit is NaN or none is above -inf
//   lines     [B, 12] int32       what each row asks for (struct line); if SAMPLED, its position moves one on
//   scratch   [B] struct meeting  SCRATCH_BYTES a row, 8-byte aligned; any bytes before, any bytes after. Not used if STAGE is WHOLE
//   seen      [R, V] int32        if PENALIZED: how often each token is in a row's output; the drawn one counts once more (0 for -1)
//   logits    [B, V] float32
//   prompted  [R, V] uint8        if PENALIZED: whether a token is in a row's prompt
//   bias      [R, V] float32      if BIASED: added to the logits after the penalties
//   count     [1] int32           rows that are meant, at most B
//
// SAMPLED, TOP_K, TOP_P, MIN_P, PENALIZED, BIASED (0 or 1) say what at least one row needs; a row that does not need it skips it. Row
// NEUTRAL_ROW of `seen` and `bias` belongs to such rows and is neither read nor written. V up to 2^18; rows of logits, seen and bias on a
// border of 16 bytes if V is a multiple of 4, rows of prompted on one of 4.
//
// THREADS, a power of two, 64 to 1024; 512 is meant. PARTS threadgroups, a power of two up to 32, share a row. One part is one launch,
// STAGE WHOLE, grid (1, B). Several are launches one after the other, of which each sees what the last has left in the scratch:
//   LOOK    grid (PARTS, B)   if TOP_K, TOP_P or MIN_P: the largest logits of each thread
//   GATHER  grid (PARTS, B)   each part's best token, or the list of what may be drawn and what it weighs
//   DRAW    grid (1, B)       the token. Without TOP_K and TOP_P, THREADS may be 32 here
// SCRATCH_BYTES = 16 * PARTS + 16 + (TOP_K | TOP_P | MIN_P ? 4 * THREADS + 8 * (CAPACITY + 1) : 0). No threadgroup waits for another: in
// Metal 3 there is no fence with which it could.
//
// A row without filters is read once. With top_k or top_p it is read twice. First every thread finds the largest of its logits: where the
// k-th of those is reached, k logits reach it at least and hardly more. Then the logits that reach it are gathered in threadgroup memory,
// and, for top_p, all are weighed. The exact thresholds are searched and the draw is made in that list. Only where it proves too short or
// too long (flat distributions, a k of thousands) one threadgroup goes over the whole row again, a few times.
//
// Every score is one float32 expression of one token; all that is summed over tokens is integer. So no bit depends on how a row is divided,
// and tokens are those of kernels/cpu/sample.c and tinyvllm/ops/sample.py. Thresholds by counting in bins of the bits: radix select as in
// Alabi et al., "Fast k-selection algorithms for graphics processing units" (2012).
#include "sampling.h"

#define WHOLE 0
#define LOOK 1
#define GATHER 2
#define DRAW 3
#define FILTERED (TOP_K || TOP_P || MIN_P)
#define SEARCHED (TOP_K || TOP_P)

#ifndef THREADS
#define THREADS 512
#endif
#ifndef CAPACITY
#define CAPACITY 2047  // of the list
#endif

enum {
  SIMDS = THREADS / 32,
  FOURS = (V + 3) / 4,  // tokens are read in fours
  BINS = THREADS,
  BIN_BITS = THREADS == 1024 ? 10 : THREADS == 512 ? 9 : THREADS == 256 ? 8 : THREADS == 128 ? 7 : 6,
  AHEAD = PENALIZED || BIASED ? 1 : SAMPLED ? 2 : 4,  // fours that are loaded before the first is looked at
  EXACT = (31 + BIN_BITS) / BIN_BITS,                 // rounds of a search that certainly end at a number
  MOST_MAXIMA = THREADS / 16 * 15,                    // this many of the maxima are reached by 2.8 * THREADS logits of random order
};

static_assert(1 << BIN_BITS == THREADS || (THREADS == 32 && STAGE == DRAW && !SEARCHED), "sample: THREADS must be 64 to 1024");
static_assert(PARTS >= 1 && PARTS <= 32 && (PARTS & (PARTS - 1)) == 0, "sample: PARTS must be a power of two up to 32");
static_assert(CAPACITY + 1 >= THREADS, "sample: the list holds a number of every thread for a while");
static_assert(V <= 1 << 18, "sample: bins hold sums of at most 2^18 weights");
static_assert((STAGE == WHOLE) == (PARTS == 1) && (STAGE != LOOK || FILTERED), "sample: stages are for several parts, LOOK for filters");

struct row {
  device const float *logits, *bias;  // the tables are null where they are not for this row
  device int *seen;
  device const uchar *prompted;
  line asks;
};

struct span {  // the fours of a row that are this thread's
  uint first, stride;
};

struct found {  // in a row
  uint peak, border, floor;  // the largest logit, from where on logits are listed, min_p's threshold
  ulong total;               // what all that reaches top_p's lower end weighs, if there is no top_k
};

struct meeting {  // where the parts of a row leave what the next launch needs
  ulong totals[PARTS];
  uint orders[PARTS], tokens[PARTS];  // the best of each part
  atomic_uint listed;
  uint peak, border, floor;  // as in struct found
#if FILTERED
  uint maxima[THREADS];
  uint list[2 * (CAPACITY + 1)];  // order bits and tokens
#endif
};

struct workspace {
  ulong sums[SIMDS];
  uint orders_of_simds[SIMDS], tokens_of_simds[SIMDS];
#if SEARCHED
  ulong above;
  int bin;
  uint base;
  atomic_uint listed;
  atomic_uint bins[3][BINS];  // sums of weights, 14 bits of each weight apiece
  uint orders[CAPACITY + 1], tokens[CAPACITY + 1];
#endif
};

struct place {  // who I am, and where all of us meet
  threadgroup workspace *work;
  uint at, lane, simd;
};

// --- what the threads of a threadgroup tell each other. All end with a barrier behind the last use of the workspace.

INLINE void meet() { threadgroup_barrier(mem_flags::mem_threadgroup); }

INLINE choice best_of_simd(choice best) {
  const uint most = simd_max(best.order);
  return choice_of(most, simd_min(best.order == most ? best.token : NO_NUMBER));
}

INLINE choice best_of_group(choice best, place me) {
  best = best_of_simd(best);
  if (me.lane == 0) me.work->orders_of_simds[me.simd] = best.order, me.work->tokens_of_simds[me.simd] = best.token;
  meet();
  const uint other = me.lane % SIMDS;
  best = best_of_simd(choice_of(me.work->orders_of_simds[other], me.work->tokens_of_simds[other]));
  meet();
  return best;
}

#if FILTERED
INLINE void range_of_group(thread uint &low, thread uint &high, place me) {
  low = simd_min(low), high = simd_max(high);
  if (me.lane == 0) me.work->orders_of_simds[me.simd] = low, me.work->tokens_of_simds[me.simd] = high;
  meet();
  low = simd_min(me.work->orders_of_simds[me.lane % SIMDS]), high = simd_max(me.work->tokens_of_simds[me.lane % SIMDS]);
  meet();
}
#endif

#if SEARCHED
INLINE ulong shuffled_up(ulong value, ushort by) { return as_type<ulong>(simd_shuffle_up(as_type<uint2>(value), by)); }
INLINE ulong shuffled_xor(ulong value, ushort by) { return as_type<ulong>(simd_shuffle_xor(as_type<uint2>(value), by)); }

// The sum of this thread's and all lower threads' values; if `total`, of all threads'.
INLINE ulong sum_of_group(ulong value, bool total, place me) {
  for (ushort apart = 1; apart < 32; apart *= 2) {
    const ulong below = shuffled_up(value, apart);
    if (me.lane >= apart) value += below;
  }
  if (me.lane == 31) me.work->sums[me.simd] = value;
  meet();
  ulong others = me.lane < SIMDS && (total || me.lane < me.simd) ? me.work->sums[me.lane] : 0;
  for (ushort apart = 16; apart > 0; apart /= 2) others += shuffled_xor(others, apart);
  meet();
  return total ? others : value + others;
}
#endif

// --- a row's logits

#if V % 4 == 0
INLINE float4 four_at(device const float *row, uint i) { return ((device const float4 *)row)[i]; }
INLINE int4 four_at(device const int *row, uint i) { return ((device const int4 *)row)[i]; }
INLINE uchar4 four_at(device const uchar *row, uint i) { return ((device const uchar4 *)row)[i]; }
#else  // behind the row's end its last again
INLINE uint4 indices(uint i) { return min(4 * i + uint4(0, 1, 2, 3), uint4(V - 1)); }
INLINE float4 four_at(device const float *row, uint i) {
  const uint4 at = indices(i);
  return float4(row[at.x], row[at.y], row[at.z], row[at.w]);
}
INLINE int4 four_at(device const int *row, uint i) {
  const uint4 at = indices(i);
  return int4(row[at.x], row[at.y], row[at.z], row[at.w]);
}
INLINE uchar4 four_at(device const uchar *row, uint i) {
  const uint4 at = indices(i);
  return uchar4(row[at.x], row[at.y], row[at.z], row[at.w]);
}
#endif

INLINE float4 adjusted(float4 x, thread const row &row, uint i) {
#if PENALIZED
  if (row.seen) {
    const int4 seen = four_at(row.seen, i);
    const uchar4 prompted = four_at(row.prompted, i);
    for (int j = 0; j < 4; j++) x[j] = penalized(x[j], seen[j], prompted[j], row.asks);
  }
#endif
#if BIASED
  if (row.bias) x += four_at(row.bias, i);
#endif
  return x;
}

// visit.see(order, token) for every token of the span.
template <typename visitor> INLINE void for_each_logit(thread const row &row, span span, thread visitor &visit) {
  for (uint i = span.first; i < FOURS; i += AHEAD * span.stride) {
    float4 x[AHEAD];
    for (uint n = 0; n < AHEAD; n++)
      if (i + n * span.stride < FOURS) x[n] = four_at(row.logits, i + n * span.stride);
    for (uint n = 0; n < AHEAD; n++) {
      const uint from = i + n * span.stride;
      if (from >= FOURS) break;
      const float4 y = adjusted(x[n], row, from);
      for (uint j = 0; j < 4; j++)
        if (V % 4 == 0 || 4 * from + j < V) visit.see(order_of(y[j]), 4 * from + j);
    }
  }
}

struct chooser {  // the best token from `floor` on; NO_NUMBER once a NaN has been seen
  line asks;
  uint floor;
  bool noisy;
  choice best;
  void see(uint order, uint token) {
    if (order == NO_NUMBER) best.order = NO_NUMBER;
    if (order < floor || best.order == NO_NUMBER) return;
    best = better(best, choice_of(SAMPLED && noisy ? order_of(perturbed(of_order(order), token, asks)) : order, token));
  }
};

INLINE chooser chooser_from(uint floor, thread const row &row) {
  chooser all;
  all.asks = row.asks, all.floor = floor, all.noisy = row.asks.inverse_temperature != 0.0f, all.best = nothing();
  return all;
}

INLINE choice best_of(thread const row &row, span span, uint floor) {  // this thread's
  chooser all = chooser_from(floor, row);
  for_each_logit(row, span, all);
  return all.best;
}

#if FILTERED
struct maximum {
  uint most;
  void see(uint order, uint) { most = max(most, order); }
};

INLINE uint highest_of(thread const row &row, span span) {  // of this thread's logits: LOWEST if it has none, NO_NUMBER if one is a NaN
  maximum all;
  all.most = LOWEST;
  for_each_logit(row, span, all);
  return all.most;
}
#endif

#if SEARCHED
// --- a search for a threshold

struct weigher {  // what a logit weighs: its probability relative to the peak's, or 1
  float peak, inverse;
  bool by_probability;
  ulong of(uint order) const { return by_probability ? probability(of_order(order), peak, inverse) : 1; }
};

INLINE weigher ones() {
  weigher one;
  one.peak = one.inverse = 0.0f, one.by_probability = false;
  return one;
}

struct numbers {  // those to search: the first `length` of the list, or the whole row
  bool listed;
  uint length;
};

template <typename visitor> INLINE void for_each(numbers those, thread const row &row, place me, thread visitor &visit) {
  if (those.listed) {
    for (uint i = me.at; i < those.length; i += THREADS) visit.see(me.work->orders[i], me.work->tokens[i]);
  } else {
    span all;
    all.first = me.at, all.stride = THREADS;
    for_each_logit(row, all, visit);
  }
}

struct counter {  // puts what lies within a range into its bin
  threadgroup workspace *work;
  uint from, width, shift;
  weigher weigh;
  void see(uint order, uint) {
    if (order - from > width) return;
    const uint bin = (order - from) >> shift;
    const ulong weight = weigh.of(order);
    const uint parts[3] = {uint(weight) & 0x3FFF, uint(weight >> 14) & 0x3FFF, uint(weight >> 28)};
    for (uint k = 0; k < 3; k++)
      if (parts[k]) atomic_fetch_add_explicit(&work->bins[k][bin], parts[k], memory_order_relaxed);
  }
};

INLINE ulong weight_of_bin(uint bin, place me) {
  ulong weight = 0;
  for (uint k = 0; k < 3; k++) weight += ulong(atomic_load_explicit(&me.work->bins[k][bin], memory_order_relaxed)) << (14 * k);
  return weight;
}

// Leaves of the range the bin in which the sum from above reaches `share`; false if it does in none. Afterwards `above` is what the
// higher bins weigh together with what was above before.
INLINE bool narrow(thread uint &low, thread uint &high, uint shift, thread ulong &above, ulong share, place me) {
  const uint bin = BINS - 1 - me.at;
  const ulong weight = weight_of_bin(bin, me);
  if (me.at == 0) me.work->bin = -1;
  const ulong reached = above + sum_of_group(weight, false, me);
  if (reached >= share && reached - weight < share) me.work->bin = int(bin), me.work->above = reached - weight;
  meet();
  const int found = me.work->bin;
  if (found >= 0) {
    above = me.work->above;
    low += uint(found) << shift;
    high = min(high, low + ((1u << shift) - 1));
  }
  return found >= 0;
}

// `low` and `high` become the largest number in their range such that those from it to `high` weigh `share` together; false if all
// weigh less. With fewer rounds than EXACT a range may remain that holds the number.
INLINE bool search(numbers those, thread const row &row, weigher weigh, thread uint &low, thread uint &high, ulong share, int rounds,
                   place me) {
  ulong above = 0;
  for (int round = 0; round == 0 || (round < rounds && low < high); round++) {
    counter count;
    count.work = me.work, count.from = low, count.width = high - low, count.weigh = weigh;
    count.shift = uint(max(0, 32 - BIN_BITS - int(clz(high - low))));
    for (uint k = 0; k < 3; k++) atomic_store_explicit(&me.work->bins[k][me.at], 0u, memory_order_relaxed);
    meet();
    for_each(those, row, me, count);
    meet();
    if (!narrow(low, high, count.shift, above, share, me)) return false;
  }
  return true;
}

// --- the list of a row

// From where on logits are listed: as far down as the row's filters may need, if they need little. Otherwise it is a guess.
INLINE uint border_of(uint most, uint lowest, uint peak, uint floor, thread const row &row, place me) {
  if (V <= CAPACITY) return floor;
  const int wanted = TOP_K && row.asks.top_k < MOST_MAXIMA ? row.asks.top_k : MOST_MAXIMA;
  me.work->orders[me.at] = most;
  me.work->tokens[me.at] = 0;
  meet();
  numbers maxima;
  maxima.listed = true, maxima.length = THREADS;
  uint low = lowest, high = peak;
  search(maxima, row, ones(), low, high, ulong(wanted), 2, me);
  return max(low, floor);
}

struct gatherer {  // lists what reaches the border; sums what logits from `low` on weigh
  threadgroup workspace *work;
  uint border, low;
  bool weighed;
  weigher weigh;
  ulong total;
  void see(uint order, uint token) {
    if (order >= border) {
      const uint at = atomic_fetch_add_explicit(&work->listed, 1u, memory_order_relaxed);
      if (at < CAPACITY) work->orders[at] = order, work->tokens[at] = token;
    }
    if (weighed && order >= low) total += weigh.of(order);
  }
};

INLINE uint listed_by(place me) { return atomic_load_explicit(&me.work->listed, memory_order_relaxed); }

// This thread's sum; the list is in the workspace.
INLINE ulong gather(thread const row &row, span span, uint border, bool weighed, uint low, weigher weigh, place me) {
  gatherer all;
  all.work = me.work, all.border = border, all.low = low, all.weighed = weighed, all.weigh = weigh, all.total = 0;
  if (me.at == 0) atomic_store_explicit(&me.work->listed, 0u, memory_order_relaxed);
  meet();
  for_each_logit(row, span, all);
  meet();
  return all.total;
}

INLINE weigher weigher_of(uint peak, thread const row &row) {
  weigher by_probability;
  by_probability.peak = of_order(peak), by_probability.inverse = row.asks.inverse_temperature, by_probability.by_probability = true;
  return by_probability;
}

struct adder {
  uint low;
  weigher weigh;
  ulong total;
  void see(uint order, uint) { total += order >= low ? weigh.of(order) : 0; }
};

INLINE bool limited(thread const row &row) { return TOP_K && row.asks.top_k < V; }
INLINE bool shared_out(thread const row &row) { return TOP_P && row.asks.top_p < 1 << 30; }

// Where the probability of a token is less than 2^-40, or `floor`.
INLINE uint weightless_of(uint peak, uint floor, thread const row &row) {
  const uint weightless = order_of(of_order(peak) - 28.0f / row.asks.inverse_temperature);  // e^-28 is less than 2^-40
  return weightless == NO_NUMBER ? floor : max(weightless, floor);
}

INLINE uint floor_of_top_k(found found, numbers in_list, numbers in_row, thread const row &row, place me) {
  const bool held = in_list.length <= CAPACITY;  // else the list has gaps
  uint low = found.border, high = found.peak;
  bool reached = held && search(in_list, row, ones(), low, high, ulong(row.asks.top_k), EXACT, me);
  if (!reached && !(held && found.border == found.floor)) {
    low = LOWEST, high = found.peak;
    reached = search(in_row, row, ones(), low, high, ulong(row.asks.top_k), EXACT, me);
  }
  return reached ? max(low, found.floor) : found.floor;
}

INLINE uint floor_of_top_p(found found, uint floor, numbers in_list, numbers in_row, thread const row &row, place me) {
  const bool held = in_list.length <= CAPACITY;
  const uint least = weightless_of(found.peak, floor, row);
  if (least >= found.peak) return least;
  adder weights;
  weights.low = least, weights.total = 0, weights.weigh = weigher_of(found.peak, row);
  ulong total = found.total;
  if (limited(row)) {
    for_each(held && found.border <= least ? in_list : in_row, row, me, weights);
    total = sum_of_group(weights.total, true, me);
  }
  const ulong share = share_of(total, row.asks.top_p);
  uint low = max(found.border, least), high = found.peak;
  if (!(held && search(in_list, row, weights.weigh, low, high, share, EXACT, me))) {
    low = least, high = found.peak;
    search(in_row, row, weights.weigh, low, high, share, EXACT, me);
  }
  return low;
}

// This thread's best of those that top_k and top_p let live.
INLINE choice choose(found found, thread const row &row, place me) {
  numbers in_list, in_row;
  in_list.listed = true, in_list.length = listed_by(me), in_row.listed = false, in_row.length = 0;
  uint floor = found.floor;
  if (limited(row)) floor = floor_of_top_k(found, in_list, in_row, row, me);
  if (shared_out(row)) floor = floor_of_top_p(found, floor, in_list, in_row, row, me);
  chooser all = chooser_from(floor, row);
  for_each(in_list.length <= CAPACITY && found.border <= floor ? in_list : in_row, row, me, all);
  return all.best;
}
#endif

#if FILTERED
INLINE bool searched(thread const row &row) {
  return SEARCHED && row.asks.inverse_temperature != 0.0f &&
         ((TOP_K && row.asks.top_k < V) || (TOP_P && row.asks.top_p < 1 << 30));
}
INLINE bool filtered(thread const row &row) {
  return searched(row) || (MIN_P && row.asks.inverse_temperature != 0.0f && row.asks.min_p > -INFINITY);
}
// Whether a row's token is drawn from a list. Rows with a NaN, or nothing above -inf, need none.
INLINE bool listed(uint peak, thread const row &row) { return searched(row) && peak != NO_NUMBER && peak != LOWEST; }

#if STAGE != DRAW
// Peak and floor, by the largest logits of every thread. `lowest`: the least of them.
INLINE found range_of(uint most, thread uint &lowest, thread const row &row, place me) {
  found range;
  range.peak = lowest = most, range.border = range.floor = LOWEST, range.total = 0;
  range_of_group(lowest, range.peak, me);
  if (MIN_P && row.asks.min_p > -INFINITY) range.floor = order_of(of_order(range.peak) + row.asks.min_p);
  return range;
}
#endif
#endif

#if SEARCHED && (STAGE == WHOLE || STAGE == GATHER)
// The border, the list and the total: the whole row's, or a part's.
INLINE void fill(thread found &found, uint most, uint lowest, thread const row &row, span mine, place me) {
  const bool weighed = shared_out(row) && !limited(row);
  found.border = border_of(most, lowest, found.peak, found.floor, row, me);
  const uint least = weighed ? weightless_of(found.peak, found.floor, row) : 0;
  found.total = gather(row, mine, found.border, weighed, least, weigher_of(found.peak, row), me);
  if (weighed) found.total = sum_of_group(found.total, true, me);
}
#endif

// --- from part to part, by way of the scratch

#if STAGE == LOOK
// THREADS maxima of a row, each of PARTS neighbours' logits.
INLINE void look(device meeting &meeting, thread const row &row, span mine, uint part, place me) {
  uint most = highest_of(row, mine);
  for (ushort apart = PARTS / 2; apart > 0; apart /= 2) most = max(most, simd_shuffle_xor(most, apart));
  if (me.at % PARTS == 0) meeting.maxima[(part * THREADS + me.at) / PARTS] = most;
  if (part == 0 && me.at == 0) atomic_store_explicit(&meeting.listed, 0u, memory_order_relaxed);
}
#endif

#if STAGE == GATHER && SEARCHED
// The list and the sum of this part.
INLINE void hand_over(device meeting &meeting, found found, uint part, place me) {
  const uint mine = listed_by(me);
  if (me.at == 0) {
    me.work->base = atomic_fetch_add_explicit(&meeting.listed, mine, memory_order_relaxed);
    meeting.totals[part] = found.total;
    if (part == 0) meeting.border = found.border, meeting.floor = found.floor;
  }
  meet();
  const uint base = me.work->base;
  for (uint i = me.at; i < min(mine, uint(CAPACITY)) && base + i < CAPACITY; i += THREADS)
    meeting.list[2 * (base + i)] = me.work->orders[i], meeting.list[2 * (base + i) + 1] = me.work->tokens[i];
}
#endif

#if STAGE == DRAW && SEARCHED
// The lists and sums of all parts.
INLINE found take_over(device meeting &meeting, place me) {
  const uint length = atomic_load_explicit(&meeting.listed, memory_order_relaxed);
  found found;
  found.peak = meeting.peak, found.border = meeting.border, found.floor = meeting.floor, found.total = 0;
  for (uint part = 0; part < PARTS; part++) found.total += meeting.totals[part];
  for (uint i = me.at; i < min(length, uint(CAPACITY)); i += THREADS)
    me.work->orders[i] = meeting.list[2 * i], me.work->tokens[i] = meeting.list[2 * i + 1];
  if (me.at == 0) atomic_store_explicit(&me.work->listed, length, memory_order_relaxed);
  meet();
  return found;
}
#endif

// --- the stages: this thread's best

#if STAGE == WHOLE
INLINE choice best_of_whole(thread const row &row, span all, place me) {
  uint floor = LOWEST;
#if FILTERED
  if (filtered(row)) {
    uint lowest, most = highest_of(row, all);
    found found = range_of(most, lowest, row, me);
    floor = found.floor;
#if SEARCHED
    if (listed(found.peak, row)) {
      fill(found, most, lowest, row, all, me);
      return choose(found, row, me);
    }
#endif
  }
#endif
  return best_of(row, all, floor);
}
#endif

#if STAGE == GATHER
// For the scratch: the part's best token, or its list.
INLINE void gather_part(device meeting &meeting, thread const row &row, span mine, uint part, place me) {
  uint floor = LOWEST;
#if FILTERED
  if (filtered(row)) {
    uint lowest;
    const uint most = meeting.maxima[me.at];
    found found = range_of(most, lowest, row, me);
    floor = found.floor;
    if (part == 0 && me.at == 0) meeting.peak = found.peak;
#if SEARCHED
    if (listed(found.peak, row)) {
      fill(found, most, lowest, row, mine, me);
      hand_over(meeting, found, part, me);
      return;
    }
#endif
  }
#endif
  const choice best = best_of_group(best_of(row, mine, floor), me);
  if (me.at == 0) meeting.orders[part] = best.order, meeting.tokens[part] = best.token;
}
#endif

#if STAGE == DRAW
INLINE choice best_of_parts(device meeting &meeting, thread const row &row, place me) {
#if SEARCHED
  if (searched(row) && listed(meeting.peak, row)) return choose(take_over(meeting, me), row, me);
#endif
  return me.at < PARTS ? choice_of(meeting.orders[me.at], meeting.tokens[me.at]) : nothing();
}
#endif

// --- writing

INLINE void finish(choice best, thread const row &row, device int &token, device line &asked) {  // in one thread
  const int drawn = token_of(best);
  token = drawn;
  if (SAMPLED) asked.position = row.asks.position + 1;
#if PENALIZED
  if (row.seen) row.seen[drawn > 0 ? drawn : 0] += 1;
#endif
}

INLINE row row_of(device const float *logits, device const line &asks) {
  row row;
  row.logits = logits, row.bias = nullptr, row.seen = nullptr, row.prompted = nullptr, row.asks = asks;
  return row;
}

#if PENALIZED
#define SEEN_ARGUMENT device int *seen,
#define PROMPTED_ARGUMENT device const uchar *prompted,
#else
#define SEEN_ARGUMENT
#define PROMPTED_ARGUMENT
#endif
#if BIASED
#define BIAS_ARGUMENT device const float *bias,
#else
#define BIAS_ARGUMENT
#endif

[[max_total_threads_per_threadgroup(THREADS)]] kernel void sample(
    device int *tokens, device line *lines, device meeting *scratch, SEEN_ARGUMENT device const float *logits, PROMPTED_ARGUMENT
    BIAS_ARGUMENT device const int *count, uint3 group [[threadgroup_position_in_grid]], uint at [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup workspace work;
  const uint b = group.y, part = group.x;
  if (b >= uint(count[0])) return;
  place me;
  me.work = &work, me.at = at, me.lane = lane, me.simd = simd;
  row row = row_of(logits + ulong(b) * V, lines[b]);
#if PENALIZED
  const ulong table = ulong(row.asks.seen_row) * V;
  if (row.asks.seen_row != NEUTRAL_ROW) row.seen = seen + table, row.prompted = prompted + table;
#endif
#if BIASED
  if (row.asks.bias_row != NEUTRAL_ROW) row.bias = bias + ulong(row.asks.bias_row) * V;
#endif
  span mine;
  mine.first = part * THREADS + at, mine.stride = PARTS * THREADS;
#if STAGE == LOOK
  if (filtered(row)) look(scratch[b], row, mine, part, me);
#elif STAGE == GATHER
  gather_part(scratch[b], row, mine, part, me);
#else
#if STAGE == WHOLE
  choice best = best_of_whole(row, mine, me);
#else
  choice best = best_of_parts(scratch[b], row, me);
#endif
  best = best_of_group(best, me);
  threadgroup_barrier(mem_flags::mem_device);  // all have read the line, and what has been seen
  if (at == 0) finish(best, row, tokens[b], lines[b]);
#endif
}
