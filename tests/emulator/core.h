// The emulator's core: what shims of GPU languages (cuda.h, cuda.cpp) may ask of it. It knows threads, SIMD groups of 32 ("warps"), blocks,
// barriers, collectives and memory, and nothing of any language.
//
// A language's shim consists of a front header that kernels are compiled with (qualifiers, built-in variables, intrinsics) and a .cpp
// with the meaning of its collectives. Kernels are instrumented by the compiler (-fsanitize=thread, without its runtime), so that every
// load and store of theirs calls the core; shims and core are not instrumented.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long s64;
typedef unsigned long long u64;

#define SHIM extern "C" __attribute__((visibility("hidden")))
#define CALLER ((u64)__builtin_return_address(0))

enum { READ = 1, WRITE = 2, ATOMIC = 4 };
enum { LANES = 32, MOST_THREADS = 1024 };

struct Thread;

// The thread that runs, its places (index 0: thread in block, 1: block in grid) and the launch's extents (2: block, 3: grid).
SHIM Thread *core_current();
SHIM u32 core_lane(const Thread *thread);
SHIM u32 core_place(u32 which, u32 direction);

// End the launch with this error, which names the current thread and its block. `site`: an address in the kernel's code, or 0.
SHIM void core_fault(u64 site, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));

// A SIMD group does something together. The caller waits until every lane of `mask` that has not returned is here with the same `what` and
// `mask` (and, if `aligned`, on the same line of the source: all 32 of them, or those that have not returned); the last to come runs
// `act` once with everybody's `mine` (0 for lanes that are not there). No memory is ordered by it.
typedef void (*Act)(void **theirs, u32 mask, u64 site);
// `line`: of the source, in its lower 20 bits; what stands above tells places of one line apart.
enum { ANYWHERE = 0, ALL_ALIGNED = 1, ALIVE_ALIGNED = 2 };
SHIM void core_together(const char *what, u32 mask, u32 line, u32 aligned, void *mine, Act act, u64 site);

// The barrier of the whole block; memory is in order behind it. Returns how many threads came with a `vote` other than 0.
SHIM u32 core_barrier(const char *what, u32 line, u32 vote, u64 site);

// The barrier of the lanes of a mask; memory is in order among them.
SHIM void core_lane_barrier(const char *what, u32 mask, u32 line, u64 site);

// Barriers that name the memory they order: of a whole block, which no thread may have left, and of a SIMD group.
enum { SHARED_MEMORY = 1, DEVICE_MEMORY = 2 };
SHIM void core_barrier_of(const char *what, u32 line, u32 memory, u64 site);
SHIM void core_lane_barrier_of(const char *what, u32 line, u32 memory, u64 site);

// An access of a thread's: bounds, written before read, races. Returns when it may be done.
SHIM void core_access(Thread *thread, const void *address, u32 size, u32 how, u64 site);

// As core_access; faults unless the place is shared memory (or, !shared, memory that is not the block's).
SHIM void core_expect(const void *address, u32 size, u32 alignment, bool shared, const char *what, u64 site);

// Relaxed atomic access: checks it, and carries over what fences before it released. The caller then does it.
SHIM void core_atomic(void *address, u32 size, u32 how, u64 site);
// `device`: for all threads of the launch, otherwise for those of the block.
SHIM void core_fence(bool device);
// Let others run.
SHIM void core_yield();

// A number that the seed decides.
SHIM u32 core_chance();
SHIM bool core_is_shared(const void *address);
// Have it called once when the launch ends, `failed` or not.
SHIM void core_at_end(void (*act)(bool failed));

// A copy of `size` bytes to shared memory that goes on behind the thread's back; zeros without `from`. Groups and waiting are cp.async's.
SHIM void core_copy(void *to, const void *from, u32 size, u64 site);
SHIM void core_copy_commit();
SHIM void core_copy_wait(u32 groups_left, u64 site);
