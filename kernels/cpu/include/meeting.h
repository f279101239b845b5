// Where the ranks of a group meet: shared memory of WORLD processes, of which this one is RANK. At its start is `struct meeting`; after its
// 4096 bytes come two places in turn for sums of each rank, [2][WORLD][PLACE] float32, and the logits [LOGITS] float32.
//
// A rank counts its meetings; it has met the others once their counts have reached its own. Two places in turn save a second meeting: a
// rank writes into a place again only after the meeting in between, which every rank enters after it has read the place.
#pragma once
#include "thread_team.h"

struct meeting {
  _Alignas(64) int given_up;  // not 0: a rank has ended or hangs, and no kernel waits any more; results are undefined
  struct {
    _Alignas(64) unsigned met;
  } ranks[8];
};

enum { MEETING_BYTES = 4096 };

// Called by all threads of this rank's team, after all of them have written what the other ranks read. `turn` is the value of this rank's
// count before the meeting.
static inline void meet(struct meeting *meeting, unsigned turn, const struct thread_team *team) {
  barrier(team);
  if (team->thread == 0) {
    __atomic_store_n(&meeting->ranks[RANK].met, turn + 1, __ATOMIC_RELEASE);
    for (int r = 0; r < WORLD; r++) {
      for (int spins = 0; (int)(__atomic_load_n(&meeting->ranks[r].met, __ATOMIC_ACQUIRE) - (turn + 1)) < 0; spins++) {
        if (__atomic_load_n(&meeting->given_up, __ATOMIC_RELAXED)) break;
        relax();
        if (spins > 500) yield();
      }
    }
  }
  barrier(team);
}

static inline unsigned turn_of(const struct meeting *meeting) { return __atomic_load_n(&meeting->ranks[RANK].met, __ATOMIC_RELAXED); }
