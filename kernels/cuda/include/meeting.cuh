// Where GPUs meet that share a model, one a process: memory of the host that all of them map, of which this one is RANK of WORLD. Its first
// word and its size before the places are those of kernels/cpu/include/meeting.h; after its 4096 bytes come two places in turn for the sums
// of each rank, [2][WORLD][PLACE] float32.
//
// A launch takes ROOM numbers of each rank at a time, in rounds. Block b of a rank writes its numbers of a round into the rank's place, says so
// in its word, and waits for the words of block b of all others: a block needs nothing of other blocks, since block b of each rank has the
// same numbers. So the grid is the same in all ranks, and no larger than MAX_BLOCKS, which are resident at once on any GPU.
//
// A word holds the number of the last round that its block has met in; rounds are counted over all launches, in `turns`. Two places in turn
// save a second meeting: a block writes into a place again only after the meeting in between, which other ranks enter after they have read
// that place: the same block of the same launch, or all blocks of the launches before.
#pragma once
#include "gpu.cuh"

constexpr int MEETING_BYTES = 4096, MAX_BLOCKS = 64, THREADS = 256;
constexpr int ROOM = PLACE / 4;  // of a place, in fours
static_assert(PLACE % 4 == 0, "meeting: PLACE must be a multiple of 4");

struct Meeting {
  u32 given_up;  // not 0: a rank has ended or hangs, and no kernel waits any more; results are undefined
  u32 rest[255];
  u32 met[8][MAX_BLOCKS];  // at byte 1024: the CPU's ranks meet in the words before
};
static_assert(sizeof(Meeting) <= MEETING_BYTES, "meeting: too many blocks");

// The places of all ranks in a round.
DEVICE float4 *places_of(u8 *shared, u32 turn) { return (float4 *)(shared + MEETING_BYTES) + (u64)(turn % 2) * WORLD * ROOM; }

// Meets the same block of all other ranks: what each wrote before is then readable by `load_fresh`. Called by all threads.
DEVICE void meet(u8 *shared, u32 turn) {
  Meeting *meeting = (Meeting *)shared;
  const int block = blockIdx.x, rank = threadIdx.x;
  fence_system();
  __syncthreads();
  if (rank == RANK) store_release(&meeting->met[RANK][block], turn + 1);
  if (rank < WORLD && rank != RANK)
    while ((int)(load_acquire(&meeting->met[rank][block]) - (turn + 1)) < 0 && !load_acquire(&meeting->given_up)) pause();
  __syncthreads();
}

// Counts the `rounds` of a launch; `turns` [2] uint32 is the GPU's own, of which the second word is zero between launches. Called by all
// threads at their end.
DEVICE void end_rounds(u32 *turns, u32 turn, u32 rounds) {
  __syncthreads();
  if (threadIdx.x != 0 || arrive(turns + 1) != gridDim.x - 1) return;
  turns[1] = 0;
  turns[0] = turn + rounds;
}
