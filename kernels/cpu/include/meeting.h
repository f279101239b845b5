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
    int sleeping;  // ranks that wait for `met` in the system
  } ranks[8];
};

enum { MEETING_BYTES = 4096 };

// How long a rank sleeps before it looks at `given_up` again: the process that writes it wakes no one.
static const struct futex_timeout LOOK_AGAIN = {0, 20000000};

// Until rank `r` has met as often as `turn` says. As threads at a barrier, ranks that have cores are a few microseconds apart, and one that
// waits for longer sleeps.
static inline void await_rank(struct meeting *meeting, int r, unsigned turn) {
  const uint64_t start = clock_now(), enough = clock_ticks(SPIN_MICROSECONDS);
  unsigned *word = &meeting->ranks[r].met;
  for (;;) {
    unsigned met = 0;
    for (int i = 0; i < 32; i++) {
      met = __atomic_load_n(word, __ATOMIC_ACQUIRE);
      if ((int)(met - turn) >= 0 || __atomic_load_n(&meeting->given_up, __ATOMIC_RELAXED)) return;
      relax();
    }
    if (clock_now() - start < enough) continue;
    __atomic_add_fetch(&meeting->ranks[r].sleeping, 1, __ATOMIC_SEQ_CST);
    futex(word, FUTEX_WAIT, met, &LOOK_AGAIN);
    __atomic_sub_fetch(&meeting->ranks[r].sleeping, 1, __ATOMIC_RELAXED);
  }
}

// Called by all threads of this rank's team, after all of them have written what the other ranks read. `turn` is the value of this rank's
// count before the meeting.
static inline void meet(struct meeting *meeting, unsigned turn, const struct thread_team *team) {
  barrier(team);
  if (team->thread == 0) {
    __atomic_store_n(&meeting->ranks[RANK].met, turn + 1,
                     __ATOMIC_SEQ_CST);  // before `sleeping` is read: or neither side would see the other
    if (__atomic_load_n(&meeting->ranks[RANK].sleeping, __ATOMIC_SEQ_CST)) futex(&meeting->ranks[RANK].met, FUTEX_WAKE, WORLD, 0);
    for (int r = 0; r < WORLD; r++) await_rank(meeting, r, turn + 1);
  }
  barrier(team);
}

static inline unsigned turn_of(const struct meeting *meeting) { return __atomic_load_n(&meeting->ranks[RANK].met, __ATOMIC_RELAXED); }
