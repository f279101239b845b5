// top_k and top_p in sample.cu: lists the logits of a row that can pass the filters, and draws among those that do.
#pragma once
#include "sample_search.cuh"

// The order from which on logits are listed: as far down as the row's filters can reach, if they need few. Otherwise it is an estimate.
// `largest`: of this thread's logits; `lowest`, `peak`: of those of all threads.
DEVICE u32 list_from(Workspace &work, u32 largest, u32 lowest, u32 peak, u32 floor, const SampleParams &params) {
  if (V <= CAPACITY) return floor;
  const u64 wanted = TOP_K && params.top_k < MAX_MAXIMA ? params.top_k : MAX_MAXIMA;
  work.orders[threadIdx.x] = largest;
  __syncthreads();
  u32 low = lowest, high = peak;
  search(work, List{work.orders, THREADS}, Weigher{}, low, high, wanted, 2);
  return max(low, floor);
}

// Lists the logits from the order `from` on. Returns the weight of this thread's logits from `low` on, if `weighed`.
DEVICE u64 gather(Workspace &work, const Row &row, Span span, u32 from, bool weighed, float low, const Weigher &weigher) {
  u64 total = 0;
  if (threadIdx.x == 0) work.listed = 0;
  __syncthreads();
  for_each_logit<MANY>(row, span, [&](int token, float x) {
    const u32 order = order_of(x);
    if (order >= from) {
      const u32 i = atomicAdd(&work.listed, 1u);
      if (i < CAPACITY) work.orders[i] = order, work.tokens[i] = token;
    }
    if (weighed && x >= low) total += weight_of(weigher, x);
  });
  __syncthreads();
  return total;
}

// Collects the lists and sums of all parts in the last part to arrive; true in that one.
DEVICE bool collect_parts(Workspace &work, Meeting *meeting, u64 *list, u64 &total) {
  if (threadIdx.x == 0) {
    work.base = atomicAdd(&meeting->listed, work.listed);
    atomicAdd(&meeting->total, total);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < min(work.listed, (u32)CAPACITY) && work.base + i < CAPACITY; i += THREADS)
    list[work.base + i] = (u64)work.orders[i] << 32 | (u32)work.tokens[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    work.is_last = arrive(&meeting->arrived) == PARTS - 1;
    if (work.is_last) {
      work.listed = meeting->listed, work.above = meeting->total;
      meeting->listed = 0, meeting->total = 0, meeting->arrived = 0;
    }
  }
  __syncthreads();
  if (!work.is_last) return false;
  total = work.above;
  for (u32 i = threadIdx.x; i < min(work.listed, (u32)CAPACITY); i += THREADS)
    work.orders[i] = (u32)(list[i] >> 32), work.tokens[i] = (int)(u32)list[i], list[i] = 0;
  __syncthreads();
  return true;
}

// A row's list and what was found on the way.
struct Listed {
  u32 peak, from;  // orders: of the largest logit; from which on logits are listed
  float floor;     // of min_p
  u64 total;       // weight of all logits that top_p can keep, if there is no top_k
};

// The smallest logit that top_k keeps, at least `floor`.
DEVICE float top_k_floor(Workspace &work, const Row &row, const Listed &listed, bool complete, float floor) {
  const Weigher ones = {};
  const u32 lowest = order_of(listed.floor);
  u32 low = listed.from, high = listed.peak;
  bool reached = complete && search(work, List{work.orders, work.listed}, ones, low, high, row.params.top_k, EXACT_ROUNDS);
  if (!reached && !(complete && listed.from == lowest)) {
    low = MIN_ORDER, high = listed.peak;
    reached = search(work, WholeRow{row}, ones, low, high, row.params.top_k, EXACT_ROUNDS);
  }
  return reached && float_from_order(low) > floor ? float_from_order(low) : floor;
}

// The smallest logit that top_p keeps of those from `floor` on.
DEVICE float top_p_floor(Workspace &work, const Row &row, const Listed &listed, bool complete, float floor) {
  const Weigher weigher = {float_from_order(listed.peak), row.params.inverse_temperature, true};
  const List list = {work.orders, work.listed};
  const WholeRow whole_row = {row};
  const float weightless = weightless_below(weigher.peak, row.params.inverse_temperature);
  const float least = weightless > floor ? weightless : floor;
  if (!(least < weigher.peak)) return least;
  u64 total = listed.total;
  if (TOP_K && row.params.top_k < V) {
    total = 0;
    const auto add = [&](u32 order) { total += order >= order_of(least) ? weight_of(weigher, float_from_order(order)) : 0; };
    if (complete && listed.from <= order_of(least)) list.for_each(add);
    else whole_row.for_each(add);
    total = block_sum(total, work, true);
  }
  const u64 share = share_of(total, row.params.top_p);
  u32 low = max(listed.from, order_of(least)), high = listed.peak;
  if (!(complete && search(work, list, weigher, low, high, share, EXACT_ROUNDS))) {
    low = order_of(least), high = listed.peak;
    search(work, whole_row, weigher, low, high, share, EXACT_ROUNDS);
  }
  return float_from_order(low);
}

// The key of this thread's best token among those that top_k and top_p keep.
DEVICE u64 draw(Workspace &work, const Row &row, const Listed &listed) {
  const bool complete = work.listed <= CAPACITY;  // otherwise logits are missing in the list
  float floor = listed.floor;
  if (TOP_K && row.params.top_k < V) floor = top_k_floor(work, row, listed, complete, floor);
  if (TOP_P && row.params.top_p < TOP_P_ONE) floor = top_p_floor(work, row, listed, complete, floor);
  if (!complete || listed.from > order_of(floor)) return best_of(row, {(int)threadIdx.x, THREADS}, floor);
  u64 best = 0;
  for (u32 i = threadIdx.x; i < work.listed; i += THREADS)
    if (work.orders[i] >= order_of(floor)) {
      const int token = work.tokens[i];
      best = max(best, key_of(perturbed(float_from_order(work.orders[i]), token, row.params), token));
    }
  return best;
}
