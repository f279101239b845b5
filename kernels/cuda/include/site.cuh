// Memory of a rank's GPU, or of the host, that the GPUs of other ranks have mapped: the words of `Site`, by which they meet (meeting.cuh), then
// two places in turn for numbers of the rank, [2][PLACE] float32.
#pragma once
#include "each_rank.cuh"
#include "gpu.cuh"

constexpr int MAX_BLOCKS = 64;
constexpr int ROOM = PLACE / 4;  // of a place, in fours
static_assert(PLACE % 4 == 0, "site: PLACE must be a multiple of 4");

struct Site {
  u32 met[8][MAX_BLOCKS];  // by rank and block, written by that rank
};
constexpr int SITE_WORDS = sizeof(Site);

// The place of a site in a round.
DEVICE float4 *place_of(u8 *site, u32 turn) { return (float4 *)(site + SITE_WORDS) + (u64)(turn % 2) * ROOM; }
