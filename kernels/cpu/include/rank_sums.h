// The sums of all ranks, which each has left in its place of the shared memory (meeting.h).
#pragma once
#include "lanes.h"
#include "meeting.h"

#define UNIT_COLUMNS 512  // of a row: the threads share one row of a decode, too

// The places of all ranks in the meeting that `turn` counts.
static inline float *places_of(uint8_t *shared, unsigned turn) {
  return (float *)(shared + MEETING_BYTES) + (long)(turn % 2) * WORLD * PLACE;
}

// `count` numbers, a multiple of 16, from `own` into this rank's place; threads take turns.
static inline void write_sums(float *places, const float *own, long count, const struct thread_team *team) {
  float *place = places + (long)RANK * PLACE;
  for (long first = (long)next_unit(team) * UNIT_COLUMNS; first < count; first = (long)next_unit(team) * UNIT_COLUMNS) {
    const long end = first + UNIT_COLUMNS < count ? first + UNIT_COLUMNS : count;
    for (long at = first; at < end; at += 16) v16_store(place + at, v16_load(own + at));
  }
}

// Sixteen numbers of all ranks, added in the tree of slices.h.
static inline v16 sum_of_ranks(const float *places, long at) {
  v16 sums[WORLD];
  UNROLL for (int r = 0; r < WORLD; r++) sums[r] = v16_load(places + (long)r * PLACE + at);
  UNROLL for (int apart = 1; apart < WORLD; apart *= 2) UNROLL for (int r = 0; r < WORLD; r += 2 * apart) sums[r] =
      v16_add(sums[r], sums[r + apart]);
  return sums[0];
}
