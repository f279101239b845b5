// logits = rmsnorm(x[row_index]) . weight^T, and the index of the largest, for up to eight rows
//
//   logits     [N, V] float32
//   best       [N] int32         the index of the largest logit, the lowest of equals; -1 if a logit is NaN or none is above -inf
//   state      [2 N + 1] uint32, 8-byte aligned: a 64-bit key for every n, then a counter. All 0 between launches
//   x          [T, E] float32
//   norm       [E] float32       RMS norm's weights; EPS is inside the root
//   weight     tiles (product.cuh) of WEIGHT, [V, E], V rounded up to a multiple of 16
//   row_index  [N] int32         the row of x from which n is computed; without it (INDEXED 0), n itself
//   count      [1] int32         number of n, 0 to N = TOKENS; outputs of later n are not touched
//
// E % 32 == 0, any V. The norm in the order of norm.cuh, products in that of product.cuh.
//
// Unit of work (stream.cuh): TILES tiles. A few thread blocks stay resident and take unit after unit, so that x is normed once in each. A
// logit and its index form a key of 64 bits (order.h); every block's largest key goes to `state` by an atomic maximum, whose result does
// not depend on the order of arrival, and the last block to arrive writes `best` and clears the state. The launcher computes
//
//     pieces = ceil(E / 512); PIECE_WARPS = even(pieces, 8); TILES = TILE_WARPS = min(4, 16 / PIECE_WARPS)
//     block = 32 * PIECE_WARPS * TILE_WARPS; grid = min(ceil(V / 16 / TILES), multiprocessors * max(1, 512 / block))
//     shared as for norm_gate_up_silu.cu
//
// with even(pieces, max) = ceil(pieces / ceil(pieces / max)).
#define I E
#define ALL_TILES ((V + 15) / 16)
#define UNITS ((ALL_TILES + TILES - 1) / TILES)
#include "order.h"
#include "stream.cuh"

#ifndef INDEXED
#define INDEXED 1
#endif
#if INDEXED
#define INDEX_ARGUMENT const int *row_index,
#else
#define INDEX_ARGUMENT
#endif

constexpr int OUTPUTS = TILES * 16;                                  // of a unit, for a token
constexpr int RESULTS = (OUTPUTS * TOKENS + THREADS - 1) / THREADS;  // of a unit that a thread finishes

DEVICE void finish_unit(float *logits, u64 (&largest)[RESULTS], const float *sums, int unit, int count);
DEVICE void finish_best(int *best, u64 *state, const u64 (&largest)[RESULTS], u64 *keys, int count);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    norm_head(float *logits, int *best, u64 *state, const float *x, const float *norm, const u8 *weight, INDEX_ARGUMENT const int *count) {
#if !INDEXED
  const int *row_index = nullptr;
#endif
  DYNAMIC_SHARED(memory);
  static __shared__ u64 keys[TOKENS];
  const SharedMemory shared = shared_memory_at(memory);
  Ring ring;
  Walk walk = first_run();
  stage_norm(shared, norm);
  load_first(ring, walk, weight);
  await_previous();
  const InputRows rows = {x, row_index, count[0], I};
  if (rows.count <= 0) return;

  stage_x(shared, rows);
  prepare_normed(shared, rows, EPS);
  const Columns columns = columns_at(shared.prepared, STEPS);
  u64 largest[RESULTS] = {};
  for (int unit = blockIdx.x; unit < UNITS; unit += gridDim.x) {
    multiply_unit(ring, walk, weight, columns, unit, shared.sums);
    if (unit + (int)gridDim.x >= UNITS) begin_next();
    __syncthreads();
    finish_unit(logits, largest, shared.sums, unit, rows.count);
    if (unit + (int)gridDim.x < UNITS) __syncthreads();  // before the next unit's sums
  }
  finish_best(best, state, largest, keys, rows.count);
}

DEVICE int tile_of(int unit, int i) { return unit * TILES + i; }

// Writes a unit's logits; `largest` are the largest keys of each of the thread's results so far, whose token is the same for every unit.
DEVICE void finish_unit(float *logits, u64 (&largest)[RESULTS], const float *sums, int unit, int count) {
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    const int e = i * THREADS + threadIdx.x, token = e / OUTPUTS, v = unit * OUTPUTS + e % OUTPUTS;
    if (token >= count || v >= V) continue;
    const float y = sum_of_pieces(sums, e % OUTPUTS / 16, token, v % 16);
    logits[(s64)token * V + v] = y;
    const u64 key = y != y ? NAN_KEY : key_of(y, v);
    if (key > largest[i]) largest[i] = key;
  }
}

// Merges the block's keys into the state; the last block of all writes the result. `keys` [TOKENS] in shared memory.
DEVICE void finish_best(int *best, u64 *state, const u64 (&largest)[RESULTS], u64 *keys, int count) {
  static __shared__ bool last;
  if (threadIdx.x < TOKENS) keys[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    if (largest[i]) atomicMax(&keys[(i * THREADS + threadIdx.x) / OUTPUTS], largest[i]);
  }
  __syncthreads();
  if ((int)threadIdx.x < count) atomicMax(&state[threadIdx.x], keys[threadIdx.x]);
  __syncthreads();
  u32 *counter = (u32 *)(state + TOKENS);
  if (threadIdx.x == 0) last = arrive(counter) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  if ((int)threadIdx.x < count) best[threadIdx.x] = token_of_key(atomicExch(&state[threadIdx.x], 0ull));
  if (threadIdx.x == 0) *counter = 0;
}
