// sample: the list of the logits that top_k and top_p may keep, their exact thresholds, and the draw.
//
// Constants: those of sample_search.h.
#pragma once
#include "sample_search.h"

#define MAX_WANTED (THREADS / 16 * 15)  // that many of the threads' maxima are reached by 2.8 * THREADS logits of random order

static_assert(CAPACITY + 1 >= THREADS, "sample: the list holds one number of every thread for a while");

struct Bounds {                  // orders of a row
  uint peak, list_floor, floor;  // the largest logit, the lowest that is listed, min_p's threshold
  ulong total;                   // the weight of all logits from top_p's lower end on, if there is no top_k
};

INLINE bool has_top_k(thread const Row &row) { return TOP_K && row.params.top_k < V; }
INLINE bool has_top_p(thread const Row &row) { return TOP_P && row.params.top_p < TOP_P_ONE; }

#if SEARCHED
// The lowest order that is listed: as low as the row's filters may need, if they need little. Otherwise it is a guess.
INLINE uint list_floor_of(uint max_order, uint lowest, uint peak, uint floor, thread const Row &row, Worker self) {
  if (V <= CAPACITY) return floor;
  const int wanted = TOP_K && row.params.top_k < MAX_WANTED ? row.params.top_k : MAX_WANTED;
  self.work->orders[self.index] = max_order;
  self.work->tokens[self.index] = 0;
  sync_threads();
  Searched maxima;
  maxima.listed = true, maxima.length = THREADS;
  uint low = lowest, high = peak;
  search(maxima, row, unit_weights(), low, high, ulong(wanted), 2, self);
  return max(low, floor);
}

struct ListVisitor {  // lists orders from list_floor on; sums the weights of those from `low` on
  threadgroup Workspace *work;
  uint list_floor, low;
  bool weighed;
  Weights weights;
  ulong total;
  void visit(uint order, uint token) {
    if (order >= list_floor) {
      const uint at = atomic_fetch_add_explicit(&work->listed, 1u, memory_order_relaxed);
      if (at < CAPACITY) work->orders[at] = order, work->tokens[at] = token;
    }
    if (weighed && order >= low) total += weights.of(order);
  }
};

INLINE uint listed_by(Worker self) { return atomic_load_explicit(&self.work->listed, memory_order_relaxed); }

// Lists a span. Returns this thread's sum.
INLINE ulong list_span(thread const Row &row, Span span, uint list_floor, bool weighed, uint low, Weights weights, Worker self) {
  ListVisitor visitor;
  visitor.work = self.work, visitor.list_floor = list_floor, visitor.low = low, visitor.weighed = weighed;
  visitor.weights = weights, visitor.total = 0;
  if (self.index == 0) atomic_store_explicit(&self.work->listed, 0u, memory_order_relaxed);
  sync_threads();
  for_each_logit(row, span, visitor);
  sync_threads();
  return visitor.total;
}

// The order below which the probability of a token is less than 2^-40, or `floor`.
INLINE uint weightless_floor(uint peak, uint floor, thread const Row &row) {
  const uint weightless = order_or_nan(weightless_below(float_from_order(peak), row.params.inverse_temperature));
  return weightless == NAN_ORDER ? floor : max(weightless, floor);
}

// Sets list_floor and total, and fills the list: of the whole row, or of a part.
INLINE void fill_list(thread Bounds &bounds, uint max_order, uint lowest, thread const Row &row, Span span, Worker self) {
  const bool weighed = has_top_p(row) && !has_top_k(row);
  bounds.list_floor = list_floor_of(max_order, lowest, bounds.peak, bounds.floor, row, self);
  const uint low = weighed ? weightless_floor(bounds.peak, bounds.floor, row) : 0;
  bounds.total = list_span(row, span, bounds.list_floor, weighed, low, probability_weights(bounds.peak, row), self);
  if (weighed) bounds.total = sum_of_group(bounds.total, true, self);
}

// --- thresholds

INLINE uint floor_of_top_k(Bounds bounds, Searched in_list, Searched in_row, thread const Row &row, Worker self) {
  const bool complete = in_list.length <= CAPACITY;  // otherwise the list has gaps
  uint low = bounds.list_floor, high = bounds.peak;
  bool reached = complete && search(in_list, row, unit_weights(), low, high, ulong(row.params.top_k), EXACT, self);
  if (!reached && !(complete && bounds.list_floor == bounds.floor)) {
    low = MIN_ORDER, high = bounds.peak;
    reached = search(in_row, row, unit_weights(), low, high, ulong(row.params.top_k), EXACT, self);
  }
  return reached ? max(low, bounds.floor) : bounds.floor;
}

struct WeightVisitor {  // sums the weights of orders from `low` on
  uint low;
  Weights weights;
  ulong total;
  void visit(uint order, uint) { total += order >= low ? weights.of(order) : 0; }
};

INLINE uint floor_of_top_p(Bounds bounds, uint floor, Searched in_list, Searched in_row, thread const Row &row, Worker self) {
  const bool complete = in_list.length <= CAPACITY;
  const uint lowest = weightless_floor(bounds.peak, floor, row);
  if (lowest >= bounds.peak) return lowest;
  WeightVisitor visitor;
  visitor.low = lowest, visitor.total = 0, visitor.weights = probability_weights(bounds.peak, row);
  ulong total = bounds.total;
  if (has_top_k(row)) {
    for_each(complete && bounds.list_floor <= lowest ? in_list : in_row, row, self, visitor);
    total = sum_of_group(visitor.total, true, self);
  }
  const ulong share = share_of(total, row.params.top_p);
  uint low = max(bounds.list_floor, lowest), high = bounds.peak;
  if (!(complete && search(in_list, row, visitor.weights, low, high, share, EXACT, self))) {
    low = lowest, high = bounds.peak;
    search(in_row, row, visitor.weights, low, high, share, EXACT, self);
  }
  return low;
}

// This thread's best of the tokens that top_k and top_p keep.
INLINE Candidate draw_filtered(Bounds bounds, thread const Row &row, Worker self) {
  Searched in_list, in_row;
  in_list.listed = true, in_list.length = listed_by(self), in_row.listed = false, in_row.length = 0;
  uint floor = bounds.floor;
  if (has_top_k(row)) floor = floor_of_top_k(bounds, in_list, in_row, row, self);
  if (has_top_p(row)) floor = floor_of_top_p(bounds, floor, in_list, in_row, row, self);
  BestVisitor visitor = best_from(floor, row);
  for_each(in_list.length <= CAPACITY && bounds.list_floor <= floor ? in_list : in_row, row, self, visitor);
  return visitor.best;
}
#endif

// --- which rows need all this

INLINE bool is_searched(thread const Row &row) { return row.params.inverse_temperature != 0.0f && (has_top_k(row) || has_top_p(row)); }
INLINE bool is_filtered(thread const Row &row) {
  return is_searched(row) || (MIN_P && row.params.inverse_temperature != 0.0f && row.params.min_p > -INFINITY);
}
// Whether a row's token is drawn from a list. Rows with a NaN, or nothing above -inf, need none.
INLINE bool is_listed(uint peak, thread const Row &row) { return is_searched(row) && peak != NAN_ORDER && peak != MIN_ORDER; }

// Peak and min_p's floor, from the largest logit of every thread. `lowest`: the least of these.
INLINE Bounds bounds_of(uint max_order, thread uint &lowest, thread const Row &row, Worker self) {
  Bounds bounds;
  bounds.peak = lowest = max_order, bounds.list_floor = bounds.floor = MIN_ORDER, bounds.total = 0;
  range_of_group(lowest, bounds.peak, self);
  if (MIN_P && row.params.min_p > -INFINITY) bounds.floor = order_or_nan(float_from_order(bounds.peak) + row.params.min_p);
  return bounds;
}
