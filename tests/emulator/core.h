// The interface of the emulator's core to the shims of GPU languages (cuda.h, cuda.cpp). The core implements threads, SIMD groups of 32
// ("warps"), blocks, barriers, collectives and memory, and is independent of any language.
//
// A language's shim consists of a header that is included before the kernel (qualifiers, built-in variables, intrinsics) and a .cpp that
// implements its collectives. The compiler instruments kernels (-fsanitize=thread, without its runtime), so that each of their loads and
// stores calls the core; shims and core are not instrumented.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long s64;
typedef unsigned long long u64;

#define SHIM extern "C" __attribute__((visibility("hidden")))
#define CALLER ((u64)__builtin_return_address(0))

enum { READ = 1, WRITE = 2, ATOMIC = 4 };
enum { LANES = 32, MAX_THREADS = 1024 };

struct Thread;

// The running thread, its position (`which` 0: thread in block, 1: block in grid) and the launch's extents (2: block, 3: grid).
SHIM Thread *core_current();
SHIM u32 core_lane(const Thread *thread);
SHIM u32 core_place(u32 which, u32 direction);

// Ends the launch with this error; the current thread and its block are added. `site`: an address in the kernel's code, or 0.
SHIM void core_fault(u64 site, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));

// A collective of a SIMD group. The caller waits until every lane of `mask` that has not returned has arrived with the same `what` and
// `mask` (and, if `aligned`, on the same source line: all 32 lanes, or those that have not returned); the last to arrive runs `act` once with the
// `mine` of every lane (0 for lanes that do not take part). It orders no memory.
typedef void (*Act)(void **theirs, u32 mask, u64 site);
// `line`: the source line, in the lower 20 bits; the upper bits distinguish calls in one line.
enum { ANYWHERE = 0, ALL_ALIGNED = 1, ALIVE_ALIGNED = 2 };
SHIM void core_together(const char *what, u32 mask, u32 line, u32 aligned, void *mine, Act act, u64 site);

// The barrier of the whole block; orders memory. Returns the number of threads that called it with a `vote` other than 0.
SHIM u32 core_barrier(const char *what, u32 line, u32 vote, u64 site);

// The barrier of the lanes of a mask; orders memory among them.
SHIM void core_lane_barrier(const char *what, u32 mask, u32 line, u64 site);

// Barriers that name the memory they order: of a whole block, no thread of which may have returned, and of a SIMD group.
enum { SHARED_MEMORY = 1, DEVICE_MEMORY = 2 };
SHIM void core_barrier_of(const char *what, u32 line, u32 memory, u64 site);
SHIM void core_lane_barrier_of(const char *what, u32 line, u32 memory, u64 site);

// Checks an access of a thread: bounds, written before read, races. Returns when the access is allowed.
SHIM void core_access(Thread *thread, const void *address, u32 size, u32 how, u64 site);

// As core_access; faults unless the address is in shared memory (or, !shared, in other memory).
SHIM void core_expect(const void *address, u32 size, u32 alignment, bool shared, const char *what, u64 site);

// Checks a relaxed atomic access, and propagates what fences before it released. The caller then does it.
SHIM void core_atomic(void *address, u32 size, u32 how, u64 site);
// `device`: for all threads of the launch, otherwise for those of the block.
SHIM void core_fence(bool device);
// The thread has waited for the kernel before this one: from now on it may write to memory that is not shared, and return.
SHIM void core_await_previous();
// Lets other threads run.
SHIM void core_yield();
// The same, for a thread that waits for another process: sleeps, and faults after minutes.
SHIM void core_pause();

// A pseudo-random number, determined by the seed.
SHIM u32 core_chance();
SHIM bool core_is_shared(const void *address);
// Registers a function to be called once when the launch ends, `failed` or not.
SHIM void core_at_end(void (*act)(bool failed));

// An asynchronous copy of `size` bytes to shared memory; zeros if `from` is null. Groups and waiting as for cp.async.
SHIM void core_copy(void *to, const void *from, u32 size, u64 site);
SHIM void core_copy_commit();
SHIM void core_copy_wait(u32 groups_left, u64 site);
