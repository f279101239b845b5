// token = argmax of a row's logits after its parameters: penalties, bias, min_p, top_k, top_p, temperature, noise
//
//   tokens    [B] int32           the lowest id among equals; -1 if a logit is NaN or none is above -inf
//   params    [B, 12] int32       the parameters of each row (params.h: SampleParams); if SAMPLED, its position is incremented
//   scratch   [B] struct Scratch  SCRATCH_BYTES a row, 8-byte aligned; any bytes before, any bytes after. Not used if STAGE is WHOLE
//   seen      [R, V] int32        if PENALIZED: how often each token is in a row's output; incremented for the drawn one (for 0 if -1)
//   logits    [B, V] float32
//   prompted  [R, V] uint8        if PENALIZED: whether a token is in a row's prompt
//   bias      [R, V] float32      if BIASED: added to the logits after the penalties
//   count     [1] int32           number of valid rows, at most B
//
// SAMPLED, TOP_K, TOP_P, MIN_P, PENALIZED, BIASED (0 or 1) say what at least one row needs; a row that does not need it skips it. Row
// NEUTRAL_ROW of `seen` and `bias` belongs to such rows and is neither read nor written. V up to 2^18; rows of logits, seen and bias on a
// border of 16 bytes if V is a multiple of 4, rows of prompted on one of 4.
//
// THREADS, a power of two, 64 to 1024; the host takes 512. PARTS threadgroups, a power of two up to 32, share a row. One part is one
// launch, STAGE WHOLE, grid (1, B). Several parts are launches one after another, each of which reads what the last one wrote to scratch:
//   LOOK    grid (PARTS, B)   if TOP_K, TOP_P or MIN_P: the largest logits of each thread
//   GATHER  grid (PARTS, B)   each part's best token, or the list of the tokens that may be drawn, and their weight
//   DRAW    grid (1, B)       the token. Without TOP_K and TOP_P, THREADS may be 32 here
// SCRATCH_BYTES = 16 * PARTS + 16 + (TOP_K | TOP_P | MIN_P ? 4 * THREADS + 8 * (CAPACITY + 1) : 0). No threadgroup waits for another: Metal
// 3 has no fence for that.
//
// A row without filters is read once, with top_k or top_p twice. First every thread finds the largest of its logits: at least k logits
// reach the k-th of those, and hardly more. Then the logits that reach it are listed in threadgroup memory, and, for top_p, all are
// weighed. The exact thresholds are searched and the token is drawn in that list. Only where it proves too short or too long (flat
// distributions, a k of thousands) one threadgroup reads the whole row again, a few times.
//
// Every score is one float32 expression of one token (sampling.h); all sums over tokens are integer. So no bit depends on how a row is
// divided, and tokens are those of kernels/cpu/sample.c and tinyvllm/ops/sample.py. Logits are compared by their order bits, not as floats:
// a GPU that flushes subnormal numbers to zero then still ranks them. Only where arithmetic itself meets a subnormal number (a penalty or a
// bias of less than 1e-37 apart) may it round otherwise than the CPU.
#define WHOLE 0
#define LOOK 1
#define GATHER 2
#define DRAW 3

#ifndef THREADS
#define THREADS 512
#endif
#ifndef CAPACITY
#define CAPACITY 2047  // of the list
#endif
#define FILTERED (TOP_K || TOP_P || MIN_P)

#include "sample_filters.h"

static_assert(PARTS >= 1 && PARTS <= 32 && (PARTS & (PARTS - 1)) == 0, "sample: PARTS must be a power of two up to 32");
static_assert((STAGE == WHOLE) == (PARTS == 1) && (STAGE != LOOK || FILTERED), "sample: stages are for several parts, LOOK for filters");

struct Scratch {  // what the parts of a row leave for the next launch
  ulong totals[PARTS];
  uint orders[PARTS], tokens[PARTS];  // the best of each part
  atomic_uint listed;
  uint peak, list_floor, floor;  // as in struct Bounds
#if FILTERED
  uint maxima[THREADS];
  uint list[2 * (CAPACITY + 1)];  // order bits and tokens
#endif
};

#if STAGE == LOOK
INLINE void find_maxima(device Scratch &scratch, thread const Row &row, Span span, uint part, Worker self);
#elif STAGE == GATHER
INLINE void gather_part(device Scratch &scratch, thread const Row &row, Span span, uint part, Worker self);
#elif STAGE == WHOLE
INLINE Candidate best_of_row(thread const Row &row, Span span, Worker self);
#else
INLINE Candidate best_of_parts(device Scratch &scratch, thread const Row &row, Worker self);
#endif
INLINE Row row_of(device const float *logits, device const SampleParams &params);
INLINE void write_token(Candidate best, thread const Row &row, device int &token, device SampleParams &params);

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
    device int *tokens, device SampleParams *params, device Scratch *scratch, SEEN_ARGUMENT device const float *logits,
    PROMPTED_ARGUMENT BIAS_ARGUMENT device const int *count, uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup Workspace work;
  const uint b = group.y, part = group.x;
  if (b >= uint(count[0])) return;
  Worker self;
  self.work = &work, self.index = index, self.lane = lane, self.simd = simd;
  Row row = row_of(logits + ulong(b) * V, params[b]);
#if PENALIZED
  const ulong table = ulong(row.params.seen_row) * V;
  if (row.params.seen_row != NEUTRAL_ROW) row.seen = seen + table, row.prompted = prompted + table;
#endif
#if BIASED
  if (row.params.bias_row != NEUTRAL_ROW) row.bias = bias + ulong(row.params.bias_row) * V;
#endif
  Span span;
  span.first = part * THREADS + index, span.stride = PARTS * THREADS;
#if STAGE == LOOK
  if (is_filtered(row)) find_maxima(scratch[b], row, span, part, self);
#elif STAGE == GATHER
  gather_part(scratch[b], row, span, part, self);
#else
#if STAGE == WHOLE
  Candidate best = best_of_row(row, span, self);
#else
  Candidate best = best_of_parts(scratch[b], row, self);
#endif
  best = best_of_group(best, self);
  threadgroup_barrier(mem_flags::mem_device);  // all have read the parameters, and what was seen
  if (index == 0) write_token(best, row, tokens[b], params[b]);
#endif
}

INLINE Row row_of(device const float *logits, device const SampleParams &params) {
  Row row;
  row.logits = logits, row.bias = nullptr, row.seen = nullptr, row.prompted = nullptr, row.params = params;
  return row;
}

INLINE void write_token(Candidate best, thread const Row &row, device int &token, device SampleParams &params) {  // in one thread
  const int drawn = token_of(best);
  token = drawn;
  if (SAMPLED) params.position = row.params.position + 1;
#if PENALIZED
  if (row.seen) row.seen[drawn > 0 ? drawn : 0] += 1;
#endif
}

// --- the stages

#if STAGE == WHOLE
INLINE Candidate best_of_row(thread const Row &row, Span span, Worker self) {  // this thread's
  uint floor = MIN_ORDER;
#if FILTERED
  if (is_filtered(row)) {
    uint lowest, max_order = max_of_span(row, span);
    Bounds bounds = bounds_of(max_order, lowest, row, self);
    floor = bounds.floor;
#if SEARCHED
    if (is_listed(bounds.peak, row)) {
      fill_list(bounds, max_order, lowest, row, span, self);
      return draw_filtered(bounds, row, self);
    }
#endif
  }
#endif
  return best_of_span(row, span, floor);
}
#endif

#if STAGE == LOOK
// THREADS maxima of a row, each of PARTS neighbouring threads' logits.
INLINE void find_maxima(device Scratch &scratch, thread const Row &row, Span span, uint part, Worker self) {
  uint max_order = max_of_span(row, span);
  for (ushort apart = PARTS / 2; apart > 0; apart /= 2) max_order = max(max_order, simd_shuffle_xor(max_order, apart));
  if (self.index % PARTS == 0) scratch.maxima[(part * THREADS + self.index) / PARTS] = max_order;
  if (part == 0 && self.index == 0) atomic_store_explicit(&scratch.listed, 0u, memory_order_relaxed);
}
#endif

#if STAGE == GATHER
#if SEARCHED
// The list and the sum of this part to the scratch.
INLINE void write_list(device Scratch &scratch, Bounds bounds, uint part, Worker self) {
  const uint listed = listed_by(self);
  if (self.index == 0) {
    self.work->base = atomic_fetch_add_explicit(&scratch.listed, listed, memory_order_relaxed);
    scratch.totals[part] = bounds.total;
    if (part == 0) scratch.list_floor = bounds.list_floor, scratch.floor = bounds.floor;
  }
  sync_threads();
  const uint base = self.work->base;
  for (uint i = self.index; i < min(listed, uint(CAPACITY)) && base + i < CAPACITY; i += THREADS)
    scratch.list[2 * (base + i)] = self.work->orders[i], scratch.list[2 * (base + i) + 1] = self.work->tokens[i];
}
#endif

// The part's best token, or its list, to the scratch.
INLINE void gather_part(device Scratch &scratch, thread const Row &row, Span span, uint part, Worker self) {
  uint floor = MIN_ORDER;
#if FILTERED
  if (is_filtered(row)) {
    uint lowest;
    const uint max_order = scratch.maxima[self.index];
    Bounds bounds = bounds_of(max_order, lowest, row, self);
    floor = bounds.floor;
    if (part == 0 && self.index == 0) scratch.peak = bounds.peak;
#if SEARCHED
    if (is_listed(bounds.peak, row)) {
      fill_list(bounds, max_order, lowest, row, span, self);
      write_list(scratch, bounds, part, self);
      return;
    }
#endif
  }
#endif
  const Candidate best = best_of_group(best_of_span(row, span, floor), self);
  if (self.index == 0) scratch.orders[part] = best.order, scratch.tokens[part] = best.token;
}
#endif

#if STAGE == DRAW
#if SEARCHED
// The lists and sums of all parts from the scratch.
INLINE Bounds read_list(device Scratch &scratch, Worker self) {
  const uint length = atomic_load_explicit(&scratch.listed, memory_order_relaxed);
  Bounds bounds;
  bounds.peak = scratch.peak, bounds.list_floor = scratch.list_floor, bounds.floor = scratch.floor, bounds.total = 0;
  for (uint part = 0; part < PARTS; part++) bounds.total += scratch.totals[part];
  for (uint i = self.index; i < min(length, uint(CAPACITY)); i += THREADS)
    self.work->orders[i] = scratch.list[2 * i], self.work->tokens[i] = scratch.list[2 * i + 1];
  if (self.index == 0) atomic_store_explicit(&self.work->listed, length, memory_order_relaxed);
  sync_threads();
  return bounds;
}
#endif

INLINE Candidate best_of_parts(device Scratch &scratch, thread const Row &row, Worker self) {  // this thread's
#if SEARCHED
  if (is_searched(row) && is_listed(scratch.peak, row)) return draw_filtered(read_list(scratch, self), row, self);
#endif
  return self.index < PARTS ? make_candidate(scratch.orders[self.index], scratch.tokens[self.index]) : no_candidate();
}
#endif
