// out = the sum of all ranks' parts + bias + residual: the end of a product whose columns are divided among WORLD ranks
//
//   out       [T, O] float32   does not alias part
//   turns     [2] uint32       meeting.cuh
//   site0...  meeting.cuh: the sites of all ranks; this one writes its part into its own
//   shared    [1] uint32       meeting.cuh
//   part      [T, O] float32   this rank's columns of the product
//   bias      [O] float32, if BIAS; with BIAS_PITCH = O [T, O], a row's own (lora_bias.cu)
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        how many rows there are, 0 to T; further rows of out are unchanged. The same in all ranks
//
// O % 4 == 0. Parts are added in a tree over the ranks, (0 + 1) + (2 + 3) and so on, then bias, then residual: the bits depend on WORLD,
// not on the other rows. The text does not depend on T.
//
// Launch: grid (BLOCKS, 1, 1), 256 threads, no dynamic shared memory. BLOCKS = ceil(T O / 1024), at most 64; the same in all ranks. Unit of
// work: a thread has four numbers at a time.
#include "meeting.cuh"
#include "params.h"

static_assert(O % 4 == 0, "all_reduce: O must be a multiple of 4");

#include "addends.cuh"

// Four numbers of each rank.
struct Parts {
  float4 of[WORLD];
};
constexpr int LOADS = WORLD == 8 ? 2 : 4;  // fours of a rank that a thread has under way: one takes a microsecond or two

DEVICE Parts parts_at(u8 *const (&sites)[WORLD], u32 turn, int at, float4 own);
DEVICE float4 sum_of_ranks(Parts parts);
DEVICE float4 sum(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce(float *out, u32 *turns, SITE_ARGUMENTS const u32 *shared,
                                                                    const float *part, BIAS_ARGUMENT RESIDUAL_ARGUMENT const int *rows) {
  await_previous();
#if !BIAS
  const float *bias = nullptr;
#endif
#if !RESIDUAL
  const float *residual = nullptr;
#endif
  u8 *const sites[WORLD] = SITES;
  const u32 turn = turns[0];
  const int count = rows[0] * (O / 4), first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  const int rounds = (count + ROOM - 1) / ROOM;
  const float4 *own = (const float4 *)part;
  for (int round = 0; round < rounds; round++) {
    const int start = round * ROOM, size = min(ROOM, count - start);
    float4 *place = place_of(sites[RANK], turn + round);
    for (int i = first; i < size; i += step) place[i] = own[start + i];
    meet(sites, shared, turn + round);
    for (int base = first; base < size; base += LOADS * step) {
      Parts parts[LOADS];
#pragma unroll
      for (int j = 0; j < LOADS; j++) {
        const int i = min(base + j * step, size - 1);
        parts[j] = parts_at(sites, turn + round, i, own[start + i]);
      }
#pragma unroll
      for (int j = 0; j < LOADS; j++) {
        const int at = start + base + j * step, column = at % (O / 4);
        if (at >= start + size) break;
        float4 y = sum_of_ranks(parts[j]);
        if (BIAS) y = sum(y, ((const float4 *)bias)[BIAS_PITCH ? at : column]);
        if (RESIDUAL) y = sum(y, ((const float4 *)residual)[at]);
        ((float4 *)out)[at] = y;
      }
    }
  }
  end_rounds(turns, turn, rounds);
}

// Those of this rank are `own`.
DEVICE Parts parts_at(u8 *const (&sites)[WORLD], u32 turn, int at, float4 own) {
  Parts parts;
#pragma unroll
  for (int r = 0; r < WORLD; r++) parts.of[r] = r == RANK ? own : load_fresh(place_of(sites[r], turn) + at);
  return parts;
}

DEVICE float4 sum_of_ranks(Parts parts) {
#pragma unroll
  for (int apart = 1; apart < WORLD; apart *= 2)
#pragma unroll
    for (int r = 0; r < WORLD; r += 2 * apart) parts.of[r] = sum(parts.of[r], parts.of[r + apart]);
  return parts.of[0];
}
