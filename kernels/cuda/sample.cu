// token = argmax of the logits of a row after its penalties, bias, min_p, top_k, top_p, temperature and noise
//
//   tokens    [B] int32           the lowest id among equals; -1 if a logit is NaN or none is above -inf
//   params    [B] SampleParams    (params.h) what each row asks for; if SAMPLED, its position is incremented
//   scratch   SCRATCH_BYTES, 8-byte aligned, all zeros before and after
//   seen      [R, V] int32        if PENALIZED: how often each token is in a row's output; + 1 for the drawn one, for 0 if it is -1
//   logits    [B, V] float32
//   prompted  [R, V] uint8        if PENALIZED: whether a token is in a row's prompt
//   bias      [R, V] float32      if BIASED: added to the logits after the penalties
//   count     [1] int32           number of rows, at most B
//
// SAMPLED, TOP_K, TOP_P, MIN_P, PENALIZED, BIASED (0 or 1) say what at least one row needs; a row that does not need it skips it. Row
// NEUTRAL_ROW of `seen` and `bias` means none and is neither read nor written. V up to 2^18; rows of logits, seen and bias are 16-byte
// aligned if V is a multiple of 4.
//
// Launch: grid (PARTS, B), block THREADS (a power of two, 64 to 1024; 1024 is intended). PARTS, a power of two up to 32, thread blocks
// share a row: as many as keep PARTS * B within the number of multiprocessors (twice that without filters) and PARTS within V / 4096. With
// filters (TOP_K, TOP_P or MIN_P) and PARTS > 1 the kernel is launched twice, STAGE LOOK and then STAGE DRAW; otherwise once, STAGE WHOLE.
// SCRATCH_BYTES is 0 if PARTS is 1; else B * (32 + (filters ? 4 * THREADS + 8 * (CAPACITY + 1) : 0)).
//
// A row without filters is read once. With top_k or top_p it is read twice. First every thread finds the largest of its logits: from the
// k-th of those on there are at least k logits, and hardly more. Then the logits from there on are gathered in shared memory, and, for
// top_p, all are weighed. The exact thresholds are searched and the token is drawn in that list. Only where it is too short or too long
// (flat distributions, a k of thousands) one thread block reads the whole row again, a few times.
//
// Every score is one float32 expression of one token (sampling.h); everything that is summed over tokens is integer. So no bit depends on
// how a row is divided, and tokens are those of kernels/cpu/sample.c and tinyvllm/ops/sample.py. Thresholds by counting in bins of the
// bits: radix select as in Alabi et al., "Fast k-selection algorithms for graphics processing units" (2012).
#include "sampling.h"

#define WHOLE 0
#define LOOK 1
#define DRAW 2
#define FILTERED (TOP_K || TOP_P || MIN_P)
#define SEARCHED (TOP_K || TOP_P)
#define PARTS (FILTERED && STAGE == WHOLE ? 1 : (int)gridDim.x)

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
  BIN_BITS = 6 + (THREADS > 64) + (THREADS > 128) + (THREADS > 256) + (THREADS > 512),
  FEW = PENALIZED || BIASED ? 1 : 2,  // vectors that are loaded before the first is used
  MANY = PENALIZED || BIASED ? 1 : 4,
  EXACT_ROUNDS = (31 + BIN_BITS) / BIN_BITS,  // after which a search has certainly ended at one number
  MAX_MAXIMA = THREADS / 16 * 15,             // 2.8 * THREADS logits of random order reach this many of the maxima
};

static_assert(1 << BIN_BITS == THREADS, "sample: THREADS must be 64, 128, 256, 512 or 1024");
static_assert(CAPACITY + 1 >= THREADS, "sample: the list must have room for a number of every thread");
static_assert(V <= 1 << 18, "sample: V must be at most 2^18, which keeps the sums in the bins within 32 bits");
static_assert(STAGE == WHOLE || FILTERED, "sample: stages are for filters in several parts");

#include "sample_block.cuh"
#include "sample_row.cuh"
#if SEARCHED
#include "sample_filter.cuh"
#endif

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

DEVICE void finish(u64 key, const Row &row, int *token, SampleParams *params);
DEVICE bool is_last_part(Workspace &work, u64 &key, Meeting *meeting);

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(int *tokens, SampleParams *params, u8 *scratch, SEEN_ARGUMENT const float *logits,
           PROMPTED_ARGUMENT BIAS_ARGUMENT const int *count) {
  await_previous();
  static __shared__ Workspace work;
  const int part = blockIdx.x, b = blockIdx.y, B = gridDim.y;
  if (b >= count[0]) return;
  Row row = {logits + (s64)b * V, 0, 0, 0, params[b]};
#if PENALIZED
  const s64 table = (s64)row.params.seen_row * V;
  if (row.params.seen_row != NEUTRAL_ROW) row.seen = seen + table, row.prompted = prompted + table;
#endif
#if BIASED
  if (row.params.bias_row != NEUTRAL_ROW) row.bias = bias + (s64)row.params.bias_row * V;
#endif
  const Span span = {part * THREADS + (int)threadIdx.x, PARTS * THREADS};
  Meeting *meeting = (Meeting *)scratch + b;
  float floor = MINUS_INFINITY;  // of min_p
  u64 key = 0;                   // of this thread's best token
  bool no_token = false;         // as a logit is NaN, or all are -inf
#if FILTERED
  u32 *maxima = (u32 *)(scratch + 32 * (s64)B) + (s64)b * THREADS;  // orders of the largest logits of all threads of all parts, merged
  const bool warm = row.params.inverse_temperature != 0.0f;
  const bool top_k = TOP_K && row.params.top_k < V, top_p = TOP_P && row.params.top_p < TOP_P_ONE;
  const bool min_p = MIN_P && row.params.min_p > MINUS_INFINITY, searched = warm && (top_k || top_p);
  if (searched || (warm && min_p)) {
    u32 largest = STAGE == DRAW ? maxima[threadIdx.x] : max_order_of(row, span);
#if STAGE == LOOK
    for (int distance = PARTS / 2; distance > 0; distance /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    if (threadIdx.x % PARTS == 0) maxima[(part * THREADS + threadIdx.x) / PARTS] = largest;
#else
    u32 lowest = largest, peak = largest;
    block_min_max(lowest, peak, work);
    if (min_p) floor = float_from_order(peak) + row.params.min_p;
    no_token = peak == NAN_ORDER || peak == MIN_ORDER;
#if SEARCHED
    if (searched && !no_token) {
      const bool weighed = top_p && !top_k;
      const Weigher weigher = {float_from_order(peak), row.params.inverse_temperature, true};
      const float weightless = weightless_below(weigher.peak, weigher.inverse), least = weightless > floor ? weightless : floor;
      const u32 from = list_from(work, largest, lowest, peak, order_of(floor), row.params);
      u64 total = gather(work, row, span, from, weighed, least, weigher);
      if (weighed) total = block_sum(total, work, true);
      if (PARTS > 1) {
        u64 *list = (u64 *)(scratch + (32 + 4 * THREADS) * (s64)B) + (s64)b * (CAPACITY + 1);
        if (!collect_parts(work, meeting, list, total)) return;
        maxima[threadIdx.x] = 0;
      }
      key = block_max(draw(work, row, {peak, from, floor, total}), work);
      if (threadIdx.x == 0) finish(key, row, tokens + b, params + b);
      return;
    }
#endif
#endif
  }
  if (STAGE == LOOK) return;
#endif
  if (!no_token) key = best_of(row, span, floor);
  key = block_max(key, work);
  if (!is_last_part(work, key, meeting)) return;
#if FILTERED
  if (PARTS > 1) maxima[threadIdx.x] = 0;
#endif
  if (threadIdx.x == 0) finish(key, row, tokens + b, params + b);
}

// In one thread: writes the token of the key, and advances the row.
DEVICE void finish(u64 key, const Row &row, int *token, SampleParams *params) {
  const int drawn = token_of_key(key);
  *token = drawn;
  if (SAMPLED) params->position = row.params.position + 1;
  if (PENALIZED && row.seen) row.seen[drawn > 0 ? drawn : 0] += 1;
}

// Whether this is the last part of the row to arrive; its thread 0 then has the best key of all.
DEVICE bool is_last_part(Workspace &work, u64 &key, Meeting *meeting) {
  if (PARTS == 1) return true;
  if (threadIdx.x == 0) {
    atomicMax(&meeting->best, key);
    work.is_last = arrive(&meeting->arrived) == PARTS - 1;
    if (work.is_last) {
      key = meeting->best;
      meeting->best = 0, meeting->arrived = 0;
    }
  }
  __syncthreads();
  return work.is_last;
}
