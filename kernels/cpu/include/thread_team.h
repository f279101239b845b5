// How a kernel runs on several cores. All threads of a team call the kernel function at the same time, and the function divides the work:
//
//     for (int unit = next_unit(team); unit < units; unit = next_unit(team)) ...   // each unit goes to the next free thread
//     barrier(team);                                                               // no thread continues before all have arrived
//
// `next_unit` counts up from 0 again after every `barrier`. There is a barrier before the first line of every kernel and one after its
// last. A team of one thread costs nothing: `barrier` returns at once.
#pragma once
#include <stdint.h>

// Functions of a kernel that are called seldom: each kernel has them, and they took a tenth of its compilation. Not `cold`, which would put
// them into a section of their own: a jump from one section to another is a relocation that tinygrad's loader lacks on Arm.
#if defined(__clang__)
#define SELDOM static __attribute__((noinline, minsize))
#else
#define SELDOM static __attribute__((noinline))
#endif

enum { MAX_THREADS = 64 };

struct thread_pool {         // what the threads share; each word that is written often has a cache line of its own
  _Alignas(64) int ticket;   // the next unit
  _Alignas(64) int arrived;  // threads that wait in `barrier`
  _Alignas(64) int turn;     // completed barriers
  int sleeping;              // threads that wait for `turn` in the system
  _Alignas(64) struct {
    int mark;             // 1 + what the processor says of the core
    int core;             // 1 + the number of the core, 0: unknown
  } places[MAX_THREADS];  // of each thread, written when it comes to another core
};

struct thread_team {  // one thread's view of its team
  int thread, threads;
  struct thread_pool *pool;
};

static inline int next_unit(const struct thread_team *team) { return __atomic_fetch_add(&team->pool->ticket, 1, __ATOMIC_RELAXED); }

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Ticks of a counter that also counts while the thread does not run. Without one every call is a tick.
static inline uint64_t clock_now(void) {
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

// Ticks of that clock in a number of microseconds. x86 does not say how fast its counter is; 2 to 5 in a nanosecond are usual.
static inline uint64_t clock_ticks(long microseconds) {
#if defined(__aarch64__)
  uint64_t rate;
  __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(rate));
  return rate * microseconds / 1000000;
#else
  return 3000ull * microseconds;
#endif
}

// Linux: sleep while `*word` is `value`, for `most` if it is not null; wake `value` threads that sleep so. The words of other
// processes are not private. Elsewhere a thread that would sleep spins.
enum { FUTEX_WAIT = 0, FUTEX_WAKE = 1, FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };
struct futex_timeout {
  long seconds, nanoseconds;
};
static inline void futex(void *word, long what, long value, const struct futex_timeout *most) {
#if defined(__linux__) && defined(__x86_64__)
  register long timeout __asm__("r10") = (long)most;
  long call = 202;
  __asm__ volatile("syscall" : "+a"(call) : "D"(word), "S"(what), "d"(value), "r"(timeout) : "rcx", "r11", "memory");
#elif defined(__linux__) && defined(__aarch64__)
  register long call __asm__("x8") = 98;
  register long address __asm__("x0") = (long)word;
  register long a1 __asm__("x1") = what;
  register long a2 __asm__("x2") = value;
  register long timeout __asm__("x3") = (long)most;
  __asm__ volatile("svc 0" : "+r"(address) : "r"(call), "r"(a1), "r"(a2), "r"(timeout) : "memory");
#endif
}

#if defined(__linux__) && defined(__x86_64__)
static inline long system_call(long call, long a, long b, long c) {
  __asm__ volatile("syscall" : "+a"(call) : "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return call;
}
enum { SCHED_SETAFFINITY = 203, SCHED_GETAFFINITY = 204, GETCPU = 309 };
#endif

// Note on which core this thread is. Linux has the number of the core in a register that programs may read, in 10 nanoseconds; whether a
// virtual machine has it, too, the system is asked once a change. Elsewhere the core stays unknown.
static inline void note_core(const struct thread_team *team) {
#if defined(__linux__) && defined(__x86_64__)
  unsigned mark, core = 0;
  __asm__ volatile("rdtscp" : "=c"(mark) : : "rax", "rdx");
  if (__atomic_load_n(&team->pool->places[team->thread].mark, __ATOMIC_RELAXED) == (int)mark + 1) return;
  const int known = system_call(GETCPU, (long)&core, 0, 0) == 0 && core == (mark & 0xfff);
  __atomic_store_n(&team->pool->places[team->thread].mark, (int)mark + 1, __ATOMIC_RELAXED);
  __atomic_store_n(&team->pool->places[team->thread].core, known ? (int)core + 1 : 0, __ATOMIC_RELAXED);
#endif
}

// Whether another thread of the team was last seen on this one's core.
SELDOM int shares_core(const struct thread_team *team) {
  const int own = __atomic_load_n(&team->pool->places[team->thread].core, __ATOMIC_RELAXED);
  for (int t = 0; own && t < team->threads; t++)
    if (t != team->thread && __atomic_load_n(&team->pool->places[t].core, __ATOMIC_RELAXED) == own) return 1;
  return 0;
}

// Move this thread to a core where no other one of the team was seen, if it may run on one: whether it has. The set of cores that it may run
// on is as before afterwards. The system balances numbers of threads and not their meetings: next to other processes it may leave two
// threads of a team on one core for as long as they run.
SELDOM int move_to_free_core(const struct thread_team *team) {
#if defined(__linux__) && defined(__x86_64__)
  unsigned long allowed[16] = {0}, free[16], any = 0;  // bits of 1,024 cores
  if (system_call(SCHED_GETAFFINITY, 0, sizeof(allowed), (long)allowed) <= 0) return 0;
  for (int i = 0; i < 16; i++) free[i] = allowed[i];
  for (int t = 0; t < team->threads; t++) {
    const int core = __atomic_load_n(&team->pool->places[t].core, __ATOMIC_RELAXED) - 1;
    if (core >= 0 && core < 1024) free[core / 64] &= ~(1ul << core % 64);
  }
  for (int i = 0; i < 16; i++) any |= free[i];
  if (!any || system_call(SCHED_SETAFFINITY, 0, sizeof(free), (long)free)) return 0;
  system_call(SCHED_SETAFFINITY, 0, sizeof(allowed), (long)allowed);
  note_core(team);
  return 1;
#else
  return 0;
#endif
}

// Until `turn` has passed. Threads that have cores are a few microseconds apart. One that waits for longer waits for a thread whose core
// another process has: it sleeps, so that its own core's other process runs now, and it goes first when it wakes. With `yield` instead, steps
// next to a process on each core took half as long again (decision 52). A spin of 50 microseconds ends early on an idle virtual machine.
// A thread that spins on the core that another one of its team needs keeps that one from coming: it moves, or sleeps after the first turns.
enum { SPIN_MICROSECONDS = 100 };
SELDOM void await_turn(const struct thread_team *team, int turn) {
  struct thread_pool *pool = team->pool;
  const uint64_t start = clock_now();
  uint64_t enough = 0;
  for (;;) {
    for (int i = 0; i < 32; i++) {
      if (__atomic_load_n(&pool->turn, __ATOMIC_ACQUIRE) != turn) return;
      relax();
    }
    if (!enough) enough = shares_core(team) && !move_to_free_core(team) ? 1 : clock_ticks(SPIN_MICROSECONDS);
    if (clock_now() - start < enough) continue;
    __atomic_add_fetch(&pool->sleeping, 1, __ATOMIC_SEQ_CST);
    futex(&pool->turn, FUTEX_WAIT_PRIVATE, turn, 0);
    __atomic_sub_fetch(&pool->sleeping, 1, __ATOMIC_RELAXED);
  }
}

static __attribute__((noinline)) void barrier(const struct thread_team *team) {
  struct thread_pool *pool = team->pool;
  int turn = __atomic_load_n(&pool->turn, __ATOMIC_RELAXED);
  if (team->threads > 1) note_core(team);
  if (__atomic_add_fetch(&pool->arrived, 1, __ATOMIC_ACQ_REL) == team->threads) {
    __atomic_store_n(&pool->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->ticket, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->turn, turn + 1, __ATOMIC_SEQ_CST);  // before `sleeping` is read: or neither side would see the other
    if (__atomic_load_n(&pool->sleeping, __ATOMIC_SEQ_CST)) futex(&pool->turn, FUTEX_WAKE_PRIVATE, 64, 0);
  } else {
    await_turn(team, turn);
  }
}

#if !__STDC_HOSTED__
// A kernel's object file is linked with nothing, and compilers call these to copy structures whatever the flags say.
__attribute__((visibility("hidden"))) void *memcpy(void *to, const void *from, unsigned long count) {
  for (unsigned long i = 0; i < count; i++) ((char *)to)[i] = ((const char *)from)[i];
  return to;
}
__attribute__((visibility("hidden"))) void *memset(void *to, int value, unsigned long count) {
  for (unsigned long i = 0; i < count; i++) ((char *)to)[i] = (char)value;
  return to;
}
#endif
