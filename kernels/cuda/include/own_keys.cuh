// The keys of a rank, where WORLD ranks divide contexts, of which this is RANK: a block of tables and slots is S tokens of each rank, in
// order, and each rank has its own S in its pool (kernels/cpu/include/cache.h). With WORLD 1 all keys are this one's.
#pragma once
#include "each_rank.cuh"
#include "gpu.cuh"

constexpr int TABLE_TOKENS = S * WORLD;  // of a block of tables and slots

// The place in this rank's pool of a slot; negative where there is none.
DEVICE int own_slot(int slot) {
  if (WORLD == 1 || slot < 0) return slot;
  const int at = slot % TABLE_TOKENS;
  return at / S == RANK ? slot / TABLE_TOKENS * S + at % S : -1;
}

// How many of the first `tokens` of a sequence are this rank's.
DEVICE int own_of(int tokens) {
  if (WORLD == 1) return tokens;
  return tokens / TABLE_TOKENS * S + min(max(tokens % TABLE_TOKENS - RANK * S, 0), S);
}
