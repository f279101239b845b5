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
#include "site.cuh"

constexpr int THREADS = 256;

#define SITE_ARGUMENTS EACH_RANK(u8 *site),
#define SITES {EACH_RANK(site)}

// Thread R meets rank R, and those after it theirs. A template and not a loop: where a loop is unrolled late, the sites are left in memory.
template <int R> DEVICE void meet_rank(u8 *const (&sites)[WORLD], const u32 *shared, u32 turn) {
  if constexpr (R < WORLD) {
    if (R != RANK && threadIdx.x == R) {
      store_release(&((Site *)sites[R])->met[RANK][blockIdx.x], turn + 1);
      const u32 *word = &((const Site *)sites[RANK])->met[R][blockIdx.x];
      // `shared` is not 0: a rank has ended or hangs, and no kernel waits any more; results are undefined. It is far away
      for (u32 looks = 1; (int)(load_acquire(word) - (turn + 1)) < 0; looks++) {
        if (looks % 64 == 0 && load_acquire(shared)) break;
        pause();
      }
    }
    meet_rank<R + 1>(sites, shared, turn);
  }
}

// Meets the same block of all other ranks: what each wrote before is then readable by `load_fresh`. Called by all threads.
DEVICE void meet(u8 *const (&sites)[WORLD], const u32 *shared, u32 turn) {
  fence_system();
  __syncthreads();
  meet_rank<0>(sites, shared, turn);
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
