// The crew: threads that run a list of kernels together, and the loop in which they wait for the next list. A shared library of its own;
// the threads are Python's, and stay in `pool_work` without its lock.
//
// A list is int64 words, for each kernel: address, kind, number of arguments, place of the core number, number of cores, arguments.
//   TEAM    one of ours: all lanes call it, each with its own team as the last argument
//   CORES   generated for several cores: any lane calls it once for each core number
//   ALONE   generated for one core: lane 0 calls it; neighbours in the list need no meeting between them
// One list at a time: whoever posts holds a lock until `pool_go` has returned.
#include "thread_team.h"

enum { TEAM, CORES, ALONE };
enum { MOST_ARGUMENTS = 64, MOST_LANES = 64 };

struct shared {
  struct thread_pool crew;
  _Alignas(64) int posted;  // lists so far; a worker waits for it to change
  int quit;
  long count, times;        // kernels of the list that was posted last, and how often it is run
  const int64_t *list;
  _Alignas(64) char asleep[MOST_LANES];  // 1: this worker goes back to Python to sleep; whoever makes it 0 decides whether it must be woken
};

typedef void (*kernel)(int64_t, ...);

static void invoke(int64_t address, int64_t n, const int64_t *a) {
  // a callee takes what it declares and leaves the rest; few sizes keep this short
#define A4(i) a[i], a[i + 1], a[i + 2], a[i + 3]
#define A16(i) A4(i), A4(i + 4), A4(i + 8), A4(i + 12)
  kernel call = (kernel)address;
  if (n <= 8) ((void (*)(long, long, long, long, long, long, long, long))call)(A4(0), A4(4));
  else if (n <= 16) ((void (*)(long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long))call)(A16(0));
  else ((void (*)(long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long,
                  long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long,
                  long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long,
                  long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long))call)(
      A16(0), A16(16), A16(32), A16(48));
}

static void run(const struct team *team, const int64_t *list, long count) {
  int64_t a[MOST_ARGUMENTS] = {0};
  for (long i = 0; i < count; i++) {
    int64_t address = list[0], kind = list[1], n = list[2], place = list[3], cores = list[4];
    list += 5;
    for (int j = 0; j < n; j++) a[j] = list[j];
    list += n;
    if (kind == TEAM) {
      a[n] = (int64_t)team;
      invoke(address, n + 1, a);
    } else if (kind == CORES) {
      for (int core = next(team); core < cores; core = next(team)) {
        a[place] = core;
        invoke(address, n, a);
      }
    } else if (team->lane == 0) {
      invoke(address, n, a);
    }
    if (kind != ALONE || i + 1 == count || list[1] != ALONE) meet(team);
  }
}

static uint64_t clock_now(void) {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t t;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t));
  return t;
#else
  static uint64_t t;
  return t++;
#endif
}

// Ticks of that clock in so many microseconds. x86 does not say how fast its counter is; 2 to 5 in a nanosecond are usual.
static uint64_t ticks(long microseconds) {
#if defined(__aarch64__)
  uint64_t rate;
  __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(rate));
  return rate * microseconds / 1000000;
#else
  return 3000ull * microseconds;
#endif
}

// A worker's life: waits for a list, spinning for about `patience` microseconds, and runs it. Returns the number of the last list it ran
// when it wants to sleep, -1 when the crew is dismissed. Called again with that number it goes on.
long pool_work(struct shared *shared, long lane, long lanes, long seen, long patience) {
  struct team team = {(int)lane, (int)lanes, &shared->crew};
  const uint64_t enough = ticks(patience);
  for (;;) {
    uint64_t start = clock_now();
    while (__atomic_load_n(&shared->posted, __ATOMIC_ACQUIRE) == (int)seen) {
      for (int i = 0; i < 16; i++) relax();
      if (clock_now() - start < enough) continue;
      // either the poster sees that this worker sleeps, or the worker sees what was posted, or both: then one of them takes the 1 away
      __atomic_store_n(&shared->asleep[lane], 1, __ATOMIC_SEQ_CST);
      if (__atomic_load_n(&shared->posted, __ATOMIC_SEQ_CST) == (int)seen) return seen;
      if (!__atomic_exchange_n(&shared->asleep[lane], 0, __ATOMIC_SEQ_CST)) return seen;
    }
    if (shared->quit) return -1;
    seen++;
    for (long i = shared->times; i > 0; i--) run(&team, shared->list, shared->count);
  }
}

// Post a list to be run `times` times, or with times < 0 the crew's dismissal; returns the set of workers that must be woken, as bits.
uint64_t pool_post(struct shared *shared, long lanes, const int64_t *list, long count, long times) {
  shared->list = list;
  shared->count = count;
  shared->times = times;
  shared->quit = times < 0;
  __atomic_add_fetch(&shared->posted, 1, __ATOMIC_SEQ_CST);
  uint64_t wake = 0;
  for (long lane = 1; lane < lanes; lane++)
    if (__atomic_exchange_n(&shared->asleep[lane], 0, __ATOMIC_SEQ_CST)) wake |= 1ull << lane;
  return wake;
}

// Take part in the posted list as lane 0; back when all of it has run.
void pool_go(struct shared *shared, long lanes) {
  struct team team = {0, (int)lanes, &shared->crew};
  for (long i = shared->times; i > 0; i--) run(&team, shared->list, shared->count);
}
