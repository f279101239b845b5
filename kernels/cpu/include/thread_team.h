// How a kernel runs on several cores. All threads of a team call the kernel function at the same time, and the function divides the work:
//
//     for (int unit = next_unit(team); unit < units; unit = next_unit(team)) ...   // each unit goes to the next free thread
//     barrier(team);                                                               // no thread continues before all have arrived
//
// `next_unit` counts up from 0 again after every `barrier`. There is a barrier before the first line of every kernel and one after its
// last. A team of one thread costs nothing: `barrier` returns at once.
#pragma once
#include <stdint.h>

struct thread_pool {         // what the threads share; each word that is written often has a cache line of its own
  _Alignas(64) int ticket;   // the next unit
  _Alignas(64) int arrived;  // threads that wait in `barrier`
  _Alignas(64) int turn;     // completed barriers
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

// Let another thread have this core. Without it, threads that outnumber the free cores wait for each other a time slice at every barrier.
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

static inline void barrier(const struct thread_team *team) {
  struct thread_pool *pool = team->pool;
  int turn = __atomic_load_n(&pool->turn, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&pool->arrived, 1, __ATOMIC_ACQ_REL) == team->threads) {
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
