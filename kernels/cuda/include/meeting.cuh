// Where GPUs meet that share a model, one a process, of which this one is RANK of WORLD. Each rank has a site, which the others have mapped:
// memory of its GPU, or, where a GPU cannot reach that of another, memory of the host. A site has the words of `Site`, then two places in
// turn for numbers of its rank, [2][PLACE] float32. `shared` is memory of the host: its first word is that of kernels/cpu/include/meeting.h.
//
// A launch takes ROOM numbers of each rank at a time, in rounds. Block b of a rank writes its numbers of a round into its own site, says so
// in a word of each other site, and waits for the words of block b of all others in its own: it looks at its own memory, and a block needs
// nothing of other blocks, since block b of each rank has the same numbers. So the grid is the same in all ranks, and no larger than
// MAX_BLOCKS, which are resident at once on any GPU.
//
// A word holds the number of the last round that a block has met in; rounds are counted over all launches, in `turns`. Two places in turn
// save a second meeting: a block writes into a place again only after the meeting in between, which other ranks enter after they have read
// that place: the same block of the same launch, or all blocks of the launches before.
#pragma once
#include "gpu.cuh"

constexpr int MAX_BLOCKS = 64, THREADS = 256;
constexpr int ROOM = PLACE / 4;  // of a place, in fours
static_assert(PLACE % 4 == 0, "meeting: PLACE must be a multiple of 4");

struct Site {
  u32 met[8][MAX_BLOCKS];  // by rank and block, written by that rank
};
constexpr int SITE_WORDS = sizeof(Site);

#if WORLD == 2
#define SITE_ARGUMENTS u8 *site0, u8 *site1,
#define SITES {site0, site1}
#elif WORLD == 4
#define SITE_ARGUMENTS u8 *site0, u8 *site1, u8 *site2, u8 *site3,
#define SITES {site0, site1, site2, site3}
#else
#define SITE_ARGUMENTS u8 *site0, u8 *site1, u8 *site2, u8 *site3, u8 *site4, u8 *site5, u8 *site6, u8 *site7,
#define SITES {site0, site1, site2, site3, site4, site5, site6, site7}
#endif
static_assert(WORLD == 2 || WORLD == 4 || WORLD == 8, "meeting: as many sites as ranks");

// The place of a site in a round.
DEVICE float4 *place_of(u8 *site, u32 turn) { return (float4 *)(site + SITE_WORDS) + (u64)(turn % 2) * ROOM; }

// Meets the same block of all other ranks: what each wrote before is then readable by `load_fresh`. Called by all threads.
DEVICE void meet(u8 *const (&sites)[WORLD], const u32 *shared, u32 turn) {
  const int block = blockIdx.x;
  fence_system();
  __syncthreads();
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    if (r == RANK || threadIdx.x != r) continue;
    store_release(&((Site *)sites[r])->met[RANK][block], turn + 1);
    const u32 *word = &((const Site *)sites[RANK])->met[r][block];
    // `shared` is not 0: a rank has ended or hangs, and no kernel waits any more; results are undefined. It is far away
    for (u32 looks = 1; (int)(load_acquire(word) - (turn + 1)) < 0; looks++) {
      if (looks % 64 == 0 && load_acquire(shared)) break;
      pause();
    }
  }
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
