// The pairs of rows and experts by expert: which places of the products' x each expert has, and the tasks that these are cut into
//
//   order    [T C + 7 min(X, T C)] int32   the pairs t C + c of expert 0, of 1, ..., those of each filled up to a multiple of 8 with -1; places
//                                          from tasks[0] on are unchanged
//   tasks    [2 + 3 N] int32               how many places and how many tasks there are; of each task its expert, its first group of eight places
//                                          and its groups, at most TASK. N is at most T C / (8 TASK) + min(X, T C)
//   chosen   [T, C] int32                  0 to X - 1
//   rows     [1] int32                     how many rows there are, 0 to T
//
// X <= 1024. The order of an expert's pairs is that in which threads arrive: nothing of it changes a pair's bits. The text does not depend on T.
//
// Launch: grid (1, 1, 1), 256 threads for X <= 256, 512 for X <= 512, otherwise 1024; no dynamic shared memory. One thread block counts, has a thread
// add up what comes before its expert, and then hands out places.
#include "gpu.cuh"

constexpr int THREADS = X <= 256 ? 256 : X <= 512 ? 512 : 1024, WARPS = THREADS / 32;
static_assert(X <= 1024, "list_experts: a thread has one expert at most");

DEVICE u64 sum_before(u64 own, u64 &all);
DEVICE void write_tasks(int *tasks, int expert, int first_group, int groups, int first_task);

extern "C" __global__ void __launch_bounds__(THREADS) list_experts(int *order, int *tasks, const int *chosen, const int *rows) {
  await_previous();
  static __shared__ int counts[X], next[X];
  const int thread = threadIdx.x, pairs = rows[0] * C;
  if (thread < X) counts[thread] = 0;
  __syncthreads();
#pragma unroll 4
  for (int p = thread; p < pairs; p += THREADS) atomicAdd(&counts[chosen[p]], 1);
  __syncthreads();

  const int count = thread < X ? counts[thread] : 0, groups = (count + 7) / 8;
  u64 all;  // groups, and tasks in the upper half
  const u64 before = sum_before((u64)((groups + TASK - 1) / TASK) << 32 | (u64)groups, all);
  const int first = (int)(u32)before;
  if (thread < X) next[thread] = first * 8;
  for (int place = first * 8 + count; place < (first + groups) * 8; place++) order[place] = -1;
  write_tasks(tasks, thread, first, groups, (int)(before >> 32));
  if (thread == 0) tasks[0] = (int)(u32)all * 8, tasks[1] = (int)(all >> 32);
  __syncthreads();
#pragma unroll 4
  for (int p = thread; p < pairs; p += THREADS) order[atomicAdd(&next[chosen[p]], 1)] = p;
}

DEVICE void write_tasks(int *tasks, int expert, int first_group, int groups, int first_task) {
  int *task = tasks + 2 + 3 * first_task;
  for (int group = 0; group < groups; group += TASK, task += 3) {
    task[0] = expert, task[1] = first_group + group;
    task[2] = groups - group < TASK ? groups - group : TASK;
  }
}

// The sum of `own` over the threads before this one, and over all.
DEVICE u64 sum_before(u64 own, u64 &all) {
  static __shared__ u64 warps[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 other = __shfl_up_sync(ALL_LANES, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  u64 before = sum - own;
  all = 0;
  for (int i = 0; i < WARPS; i++) {
    if (i < warp) before += warps[i];
    all += warps[i];
  }
  return before;
}
