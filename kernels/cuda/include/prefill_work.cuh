// Which rows a thread block of attention_prefill computes: SPAN query positions of a sequence, with the query heads of a KV head.
#pragma once
#include "attention.cuh"
#include "rank_rows.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int SPAN = WARPS * 16 / G;

static_assert(SPAN >= 1, "attention_prefill: H / K must be at most the rows of a thread block");

// The pools that the keys are in: with WORLD 1 one, else one of each rank, in shared memory.
#if WORLD == 1
typedef const uint4 *Pools;
#define POOL_ARGUMENTS const uint4 *cache,
#define POOLS cache
#define ROWS_ARGUMENT
#define ROWS_POINTER nullptr
DEVICE const uint4 *pool_of(Pools pools, int) { return pools; }
#else
typedef const uint4 *const *Pools;
struct PoolArguments {
  const uint4 *of[WORLD];
};
#define POOL_ARGUMENTS EACH_RANK(const uint4 *cache),
#define POOLS held_pools({{EACH_RANK(cache)}})
#define ROWS_ARGUMENT const int *step_rows,
#define ROWS_POINTER step_rows
// Called by all threads.
DEVICE Pools held_pools(const PoolArguments &pools) {
  static __shared__ const uint4 *held[WORLD];
#pragma unroll
  for (int r = 0; r < WORLD; r++)
    if (threadIdx.x == 0) held[r] = pools.of[r];
  __syncthreads();
  return held;
}
// That of the keys of a stage, which are one rank's.
DEVICE const uint4 *pool_of(Pools pools, int start) { return pools[start / S % WORLD]; }
#endif

// The work of this thread block: `count` query positions from `position` on; the first of them is row `row` of the batch.
struct Work {
  const int *table;
  int head, row, position, count, context;
};

// The keys that the thread block's rows see.
DEVICE int first_key(const Work &work) { return first_visible(work.position); }
DEVICE int end_key(const Work &work) { return work.position + work.count; }

// Positions of a lane's two rows, and of the first and last row of its warp.
struct WarpRows {
  int position[2];
  int low, high;  // high is -1 where the warp has no rows
};

// Sequences first to end - 1 have units(b) consecutive units each. Finds the sequence b of `unit`, and how many units come before b's. Done
// by the whole warp for one unit; false if there is no such unit.
template <typename Units> DEVICE bool find_sequence(int unit, int first, int end, Units units, int &b, int &before) {
  const int lane = threadIdx.x % 32;
  before = 0;
  for (int base = first; base < end; base += 32) {
    const int owner = find_lane(unit, base + lane < end ? units(base + lane) : 0, before);
    b = base + owner;
    if (owner >= 0) return true;
  }
  return false;
}

// False if the grid has more thread blocks than there is work.
DEVICE bool find_work(Work &work, const int *block_tables, const int *context_lens, const int *query_starts, const int *chunks) {
  int b, before;
  const int first = chunks[0], end = first + chunks[1];
  const auto spans = [=](int i) { return (query_starts[i + 1] - query_starts[i] + SPAN - 1) / SPAN; };
  if (!find_sequence(blockIdx.x, first, end, spans, b, before)) return false;
  const int queries = query_starts[b + 1] - query_starts[b];
  const int skipped = (spans(b) - 1 - ((int)blockIdx.x - before)) * SPAN;
  work.table = block_tables + (s64)b * M;
  work.head = blockIdx.y / HALVES;
  work.row = query_starts[b] + skipped;
  work.context = context_lens[b];
  work.position = work.context - queries + skipped;
  work.count = min(SPAN, queries - skipped);
  return true;
}

// Whether some of the rows are those that this rank computes. `step_rows`: all of the step, if WORLD > 1.
DEVICE bool is_own(const Work &work, const int *step_rows) {
  if (WORLD == 1) return true;
  return work.row < first_row_of(RANK + 1, step_rows[0]) && work.row + work.count > first_row_of(RANK, step_rows[0]);
}

DEVICE int row_of_lane(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

// The lane's row r in q or out; null if there is no such row.
template <typename Number> DEVICE Number *row_pointer(Number *rows, const Work &work, int r) {
  const int row = row_of_lane(r);
  return row < work.count * G ? rows + ((s64)(work.row + row / G) * H + work.head * G + row % G) * D : nullptr;
}

DEVICE WarpRows rows_of_warp(const Work &work) {
  const int first = threadIdx.x / 32 * 16, rows = work.count * G;
  const int high = first < rows ? work.position + (min(first + 16, rows) - 1) / G : -1;
  return {{work.position + row_of_lane(0) / G, work.position + row_of_lane(1) / G}, work.position + first / G, high};
}
