// How a kernel runs on several cores. Every kernel function is run by all lanes of a team at once, each on a thread of its own, and says
// itself who does what:
//
//     for (int unit = next(team); unit < units; unit = next(team)) ...   // units go to whoever is free
//     meet(team);                                                        // nobody goes on before all have come here
//
// `next` counts up from 0 again after every `meet`. There is a `meet` before the first line of every kernel and one behind its last.
// A team of one lane costs nothing: `meet` returns at once.
#pragma once
#include <stdint.h>

#if !__STDC_HOSTED__
// A kernel's object stands alone, and compilers make calls to these out of copies of structures whatever they are told.
__attribute__((visibility("hidden"))) void *memcpy(void *to, const void *from, unsigned long count) {
  for (unsigned long i = 0; i < count; i++) ((char *)to)[i] = ((const char *)from)[i];
  return to;
}
__attribute__((visibility("hidden"))) void *memset(void *to, int value, unsigned long count) {
  for (unsigned long i = 0; i < count; i++) ((char *)to)[i] = (char)value;
  return to;
}
#endif

struct thread_pool {         // what the lanes share; each word that is written often has a cache line of its own
  _Alignas(64) int ticket;   // the next unit
  _Alignas(64) int arrived;  // lanes that wait in `meet`
  _Alignas(64) int turn;     // completed meets
};

struct team {
  int lane, lanes;
  struct thread_pool *pool;
};

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Let another thread have this core. Without it, lanes that outnumber the free cores wait for each other a time slice at every meeting.
static inline void yield(void) {
#if defined(__linux__) && defined(__x86_64__)
  long sched_yield = 24;
  __asm__ volatile("syscall" : "+a"(sched_yield) : : "rcx", "r11", "memory");
#elif defined(__linux__) && defined(__aarch64__)
  register long sched_yield __asm__("x8") = 124;
  register long result __asm__("x0");
  __asm__ volatile("svc 0" : "=r"(result) : "r"(sched_yield) : "memory");
#endif
}

static inline int next(const struct team *team) { return __atomic_fetch_add(&team->pool->ticket, 1, __ATOMIC_RELAXED); }

static inline void meet(const struct team *team) {
  struct thread_pool *pool = team->pool;
  int turn = __atomic_load_n(&pool->turn, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&pool->arrived, 1, __ATOMIC_ACQ_REL) == team->lanes) {
    __atomic_store_n(&pool->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->ticket, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->turn, turn + 1, __ATOMIC_RELEASE);
  } else {
    for (int spins = 0; __atomic_load_n(&pool->turn, __ATOMIC_ACQUIRE) == turn; spins++) {
      relax();
      if (spins > 500) yield();
    }
  }
}
