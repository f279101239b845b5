// Runs the blocks of one launch: a fiber for every thread, scheduled by a seeded generator, `resident` blocks at a time, in seeded
// order. memory.h, which is part of this file, checks memory accesses.
#include "core.h"

extern "C" {
void *malloc(unsigned long);
void *calloc(unsigned long, unsigned long);
void *realloc(void *, unsigned long);
void free(void *);
void *memcpy(void *, const void *, unsigned long);
void *memset(void *, int, unsigned long);
void *memmove(void *, const void *, unsigned long);
int strcmp(const char *, const char *);
int snprintf(char *, unsigned long, const char *, ...);
int vsnprintf(char *, unsigned long, const char *, __builtin_va_list);
}

#define EXPORT extern "C" __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))
#define ALL 0xFFFFFFFFu
#define RARE(x) __builtin_expect(!!(x), 0)
#define MAX_DYNAMIC (228 * 1024)
#define STACK (128 * 1024)

// Shared memory: dynamic, given by the launch, and static, declared by the kernel (a section of the image).
HIDDEN extern "C" unsigned char gpu_dynamic[];
alignas(1024) unsigned char gpu_dynamic[MAX_DYNAMIC];
#ifdef __APPLE__
extern u8 static_start[] __asm("section$start$__DATA$gpu_shared"), static_stop[] __asm("section$end$__DATA$gpu_shared");
static const u8 *image_start() { return 0; }
static const u8 *image_stop() { return 0; }
#else
extern "C" HIDDEN u8 __start_gpu_shared[] __attribute__((weak)), __stop_gpu_shared[] __attribute__((weak)), __ehdr_start[], etext[];
#define static_start __start_gpu_shared
#define static_stop __stop_gpu_shared
static const u8 *image_start() { return __ehdr_start; }
static const u8 *image_stop() { return etext; }  // constants come before the code
#endif

struct MemoryRange {  // emulate.py: _MemoryRange
  u64 low, size;
  const char *name;
  u32 writable, pad;
  u64 read;  // bytes, by all threads; bytes that are read twice count twice
};
struct Launch {  // emulate.py: _Launch
  void *entry;
  const u64 *arguments;
  MemoryRange *ranges;
  u8 *stacks;
  char *error;
  u64 stacks_size, seed, accesses, site, other_site, image;
  u32 argument_count, range_count, error_size, shared, races, resident, awaits;
  u32 grid[3], block[3];
};

// For each thread (block, thread), sorted by key: its accesses with a smaller clock are ordered before. Thread number ALL_THREADS means all
// threads of the block.
struct VectorClock {
  u64 *key;
  u32 *clock;
  u32 count, room;
};

struct Copy {
  u8 *to;
  const u8 *from;
  u64 site;
  u32 size, group;
};

enum State : u8 { CAN_RUN, AT_BARRIER, AT_COLLECTIVE, RETURNED };

struct Block;
struct Warp {
  u32 ready, waiting, alive;  // lanes
  u32 base, base_device;      // accesses with smaller clocks are ordered for all lanes: in shared memory, in other memory
};

struct Thread {
  void *sp;
  u64 stack_low;
  Block *block;
  Warp *warp;
  u32 index, lane, place[3];
  State state;
  bool waited;  // for the kernel before; true from the start in kernels that do not wait
  u32 aligned;
  // what it waits for
  const char *what;
  u32 line, mask, vote;
  void *mine;
  Act act;  // run by the lane that completes the group, which may be one that returns
  // order: `actor` identifies an access by block + 1, thread, and a bit for atomics
  u32 actor, now;
  VectorClock clocks, released, released_block, acquirable, acquirable_block;
  Copy *copies;
  u32 first_copy, copy_count, copy_room, group;
};

struct Pool {  // memory for lists of readers, addressed by an index of 8 bytes; 0 is null
  u64 *at;
  u32 used, room;
};
struct Cell;

struct Block {
  u32 number, place[3], threads_alive, arrived, warps, ready_warps, base, base_device, votes, last_warp;
  u32 memory;  // which memory the pending barrier orders
  bool whole;  // whether it needs all threads, none of which may have returned
  Thread *threads;
  Warp warp[LANES];
  VectorClock clocks;
  u8 *saved, *state;  // copy of shared memory while another block runs; ByteState of its bytes (static, then dynamic)
  Cell *cells;
  Pool pool;
};

static Launch *launch;
static Thread *current;
static u64 stack_low;  // of the current thread
static Block *current_block;
static Block *blocks;  // resident
static u32 resident, running;
static u32 thread_count, warp_count, static_size, shared_size;
static u64 order;
static void *launcher_sp;
static u32 idle_turns, pauses;
static bool failed;

static u32 chance() {
  order ^= order << 13, order ^= order >> 7, order ^= order << 17;
  return (u32)((order * 0x2545F4914F6CDD1Dull) >> 32);
}

u32 core_chance() { return chance(); }

static void (*at_end)(bool failed);
void core_at_end(void (*act)(bool failed)) { at_end = act; }

// ---------------------------------------------------------------- faults

SHIM void core_switch(void **saved, void *to);

static void end_launch() {
  void *never;
  failed = true;
  core_switch(&never, launcher_sp);
  __builtin_unreachable();
}

static int name_thread(char *text, u32 room, u32 thread) {
  const u32 *b = launch->block;
  if (b[1] * b[2] == 1) return snprintf(text, room, "thread %u", thread);
  return snprintf(text, room, "thread %u (%u,%u,%u)", thread, thread % b[0], thread / b[0] % b[1], thread / b[0] / b[1]);
}

void core_fault(u64 site, const char *format, ...) {
  char *text = launch->error;
  u32 room = launch->error_size, used = 0;
  if (current) {
    used = name_thread(text, room, current->index);
    used += snprintf(text + used, room - used, " of block %u: ", current_block->number);
  }
  __builtin_va_list rest;
  __builtin_va_start(rest, format);
  vsnprintf(text + used, room - used, format, rest);
  __builtin_va_end(rest);
  launch->site = site;
  end_launch();
  __builtin_unreachable();
}

#include "memory.h"

// ---------------------------------------------------------------- fibers

#define SYMBOL_TEXT(x) #x
#define SYMBOL_OF(x) SYMBOL_TEXT(x)
#define SYMBOL SYMBOL_OF(__USER_LABEL_PREFIX__)

#if defined(__x86_64__)
__asm__(".text\n.p2align 4\n" SYMBOL "core_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
static void *fresh_stack(u64 top, void (*start)()) {
  u64 *sp = (u64 *)(top & ~63ull) - 8;  // `start` is in place of a return address
  sp[6] = (u64)start;
  for (int i = 0; i < 6; i++) sp[i] = 0;
  sp[7] = 0;
  return sp;
}
#elif defined(__aarch64__)
__asm__(".text\n.p2align 4\n" SYMBOL "core_switch:\n"
        "sub sp, sp, #160\n"
        "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\n"
        "stp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
        "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\n"
        "ldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\nret\n");
static void *fresh_stack(u64 top, void (*start)()) {
  u64 *sp = (u64 *)(top & ~63ull) - 20;
  for (int i = 0; i < 20; i++) sp[i] = 0;
  sp[11] = (u64)start;
  return sp;
}
#else
#error "emulator: only x86-64 and arm64 are supported"
#endif

static const u64 CANARY = 0x5AFE57AC5AFE57ACull;

static u32 some_bit(u32 mask) {
  u32 by = chance() & 31;
  u32 turned = by ? mask >> by | mask << (32 - by) : mask;
  return (__builtin_ctz(turned) + by) & 31;
}

static void set_ready(Block *block, u32 warp, u32 lanes) {
  block->warp[warp].ready |= lanes;
  block->ready_warps |= 1u << warp;
}

static bool at_atomic;  // the order of blocks matters most at atomics

// The next thread to run: mostly a lane of the same warp, for locality; rarely of another block, as shared memory must then be exchanged.
static Thread *next_thread() {
  if (RARE(resident > 1) && (!current_block->ready_warps || (chance() & (at_atomic ? 3 : 1023)) == 0)) {
    u32 from = chance() % resident;
    for (u32 i = 0; i < resident; i++)
      if (blocks[(from + i) % resident].ready_warps) {
        switch_to_block(&blocks[(from + i) % resident]);
        break;
      }
  }
  at_atomic = false;
  if (!current_block->ready_warps) return 0;
  u32 w = current_block->last_warp;
  if (!current_block->warp[w].ready || (chance() & 15) == 0) w = current_block->last_warp = some_bit(current_block->ready_warps);
  Warp *warp = &current_block->warp[w];
  u32 lane = some_bit(warp->ready);
  warp->ready &= ~(1u << lane);
  if (!warp->ready) current_block->ready_warps &= ~(1u << w);
  return &current_block->threads[w * LANES + lane];
}

static void describe_deadlock();

static void fault_deadlock() {
  describe_deadlock();
  end_launch();
  __builtin_unreachable();
}

static void go_to(Thread *next, void **saved) {
  current = next;
  stack_low = next->stack_low;
  core_switch(saved, next->sp);
}

static void run_next() {
  Thread *self = current, *next = next_thread();
  if (RARE(!next)) fault_deadlock();
  if (next != self) go_to(next, &self->sp);
}

void core_yield() {
  if (++idle_turns > 1u << 22)
    core_fault(0, "waits for something that does not come: 4 million turns without a barrier, a collective or a return");
  Thread *self = current;
  set_ready(current_block, self->index / LANES, 1u << self->lane);
  at_atomic = true;
  run_next();
}

extern "C" int usleep(u32 microseconds);

void core_pause() {
  if (++pauses > 1u << 21) core_fault(0, "waits for another process, which does not come: 2 million pauses");
  usleep(50);
  idle_turns = 0;
  core_yield();
}

// Describes all waiting threads, in groups.
static void describe_deadlock() {
  char *text = launch->error;
  u32 room = launch->error_size, groups = 0;
  u32 used = snprintf(text, room, "block %u: no thread can continue:", current_block->number);
  for (u32 i = 0; i < thread_count && groups < 8; i++) {
    Thread *t = &current_block->threads[i];
    if (t->state == RETURNED) continue;
    bool described = false;
    for (u32 j = 0; j < i && !described; j++) {
      Thread *s = &current_block->threads[j];
      described = s->state == t->state && s->line == t->line && s->mask == t->mask && !strcmp(s->what, t->what);
    }
    if (described) continue;
    used += snprintf(text + used, room - used, groups++ ? ";" : "");
    for (u32 from = i; from < thread_count;) {
      u32 to = from;
      auto same = [&](u32 k) {
        Thread *s = &current_block->threads[k];
        return k < thread_count && s->state == t->state && s->line == t->line && s->mask == t->mask && !strcmp(s->what, t->what);
      };
      if (!same(from)) {
        from++;
        continue;
      }
      while (to + 1 < thread_count && same(to + 1)) to++;
      if (used < room - 64) used += snprintf(text + used, room - used, to > from ? " %u-%u" : " %u", from, to);
      from = to + 1;
    }
    if (used < room - 128) {
      used += snprintf(text + used, room - used, " wait at %s", t->what);
      if (t->state == AT_COLLECTIVE) used += snprintf(text + used, room - used, " of lanes %08x", t->mask);
      used += snprintf(text + used, room - used, ", line %u", t->line & 0xFFFFF);
    }
  }
  u32 returned = 0;
  for (u32 i = 0; i < thread_count; i++) returned += current_block->threads[i].state == RETURNED;
  if (returned && used < room - 64) snprintf(text + used, room - used, "; %u threads have returned", returned);
}

// ---------------------------------------------------------------- collectives and barriers

// Whether all lanes that `t` waits for have arrived. `need`: the lanes that take part.
static bool is_complete(const Thread *t, u32 *need) {
  Warp *warp = t->warp;
  *need = t->mask & warp->alive;
  if (t->aligned == ALL_ALIGNED && *need != ALL) return false;
  if (*need & ~warp->waiting) return false;
  const Thread *first = t - t->lane;
  for (u32 rest = *need; rest; rest &= rest - 1) {
    const Thread *other = first + __builtin_ctz(rest);
    if (other->mask != t->mask || (t->aligned && other->line != t->line)) return false;
    if (other->what != t->what && strcmp(other->what, t->what)) return false;
  }
  return true;
}

static void run_collective(Thread *t, u32 need, Act act, u64 site) {
  void *theirs[LANES];
  Thread *first = t - t->lane;
  for (u32 lane = 0; lane < LANES; lane++) theirs[lane] = need >> lane & 1 ? first[lane].mine : 0;
  if (act) act(theirs, need, site);
  for (u32 rest = need; rest; rest &= rest - 1) first[__builtin_ctz(rest)].state = CAN_RUN;
  t->warp->waiting &= ~need;
  idle_turns = 0;
}

static void join_collective(const char *what, u32 mask, u32 line, u32 aligned, void *mine, Act act, u64 site) {
  Thread *t = current;
  if (RARE(!(mask >> t->lane & 1)))
    core_fault(site, "is lane %u and calls %s with the mask %08x, which does not contain it", t->lane, what, mask);
  t->what = what, t->mask = mask, t->line = line, t->aligned = aligned, t->mine = mine, t->act = act;
  t->state = AT_COLLECTIVE;
  t->warp->waiting |= 1u << t->lane;
  u32 need;
  if (!is_complete(t, &need)) return run_next();
  run_collective(t, need, act, site);
  if (need & ~(1u << t->lane)) set_ready(current_block, t->index / LANES, need & ~(1u << t->lane));
}

void core_together(const char *what, u32 mask, u32 line, u32 aligned, void *mine, Act act, u64 site) {
  join_collective(what, mask, line, aligned, mine, act, site);
}

template <u32 memory> static void order_lanes(void **theirs, u32 mask, u64) {
  Thread *first = 0;
  for (u32 rest = mask; rest && !first; rest = 0) first = (Thread *)theirs[__builtin_ctz(rest)] - __builtin_ctz(rest);
  Warp *warp = first->warp;
  if (launch->races) order_in_warp(warp, first, mask, memory);
}

void core_lane_barrier(const char *what, u32 mask, u32 line, u64 site) {
  join_collective(what, mask, line, ANYWHERE, current, order_lanes<SHARED_MEMORY | DEVICE_MEMORY>, site);
}
void core_lane_barrier_of(const char *what, u32 line, u32 memory, u64 site) {
  static const Act acts[] = {0, order_lanes<SHARED_MEMORY>, order_lanes<DEVICE_MEMORY>, order_lanes<SHARED_MEMORY | DEVICE_MEMORY>};
  join_collective(what, ALL, line, ALIVE_ALIGNED, current, acts[memory], site);
}

// The last thread has arrived (or returned): all become ready, except `self`, which is running.
static void release_barrier(Block *block, Thread *self) {
  const Thread *first = 0;
  u32 clock = 0, votes = 0;
  if (block->whole && block->threads_alive != thread_count) fault_deadlock();
  for (u32 i = 0; i < thread_count; i++) {
    Thread *t = &block->threads[i];
    if (t->now > clock) clock = t->now;
    if (t->state != AT_BARRIER) continue;
    if (first && (first->line != t->line || strcmp(first->what, t->what))) fault_deadlock();
    first = t;
    votes += t->vote != 0;
  }
  clock++;
  if (block->memory & SHARED_MEMORY) block->base = clock;
  if (block->memory & DEVICE_MEMORY) block->base_device = clock;
  block->votes = votes;
  block->arrived = 0;
  for (u32 i = 0; i < thread_count; i++) {
    Thread *t = &block->threads[i];
    if (RARE(t->clocks.count)) merge_clocks(&block->clocks, &t->clocks), t->clocks.count = 0;
    t->now = clock;
    if (t->state != AT_BARRIER) continue;
    t->state = CAN_RUN;
    if (t != self) set_ready(block, i / LANES, 1u << t->lane);
  }
  idle_turns = 0;
}

static u32 join_barrier(const char *what, u32 line, u32 vote, u32 memory, bool whole) {
  Thread *t = current;
  current_block->memory = memory, current_block->whole = whole;
  t->what = what, t->line = line, t->vote = vote, t->mask = 0, t->state = AT_BARRIER;
  if (++current_block->arrived == current_block->threads_alive)
    release_barrier(current_block, t);
  else
    run_next();
  return t->block->votes;
}
u32 core_barrier(const char *what, u32 line, u32 vote, u64) {
  return join_barrier(what, line, vote, SHARED_MEMORY | DEVICE_MEMORY, false);
}
void core_barrier_of(const char *what, u32 line, u32 memory, u64) { join_barrier(what, line, 0, memory, true); }

// ---------------------------------------------------------------- threads and blocks

Thread *core_current() { return current; }
u32 core_lane(const Thread *thread) { return thread->lane; }
u32 core_place(u32 which, u32 direction) {
  if (which == 0) return current->place[direction];
  if (which == 1) return current_block->place[direction];
  return which == 2 ? launch->block[direction] : launch->grid[direction];
}

void core_await_previous() { current->waited = true; }

static void thread_returns() {
  Thread *t = current;
  if (*(u64 *)t->stack_low != CANARY) core_fault(0, "used more than %u bytes of stack", STACK);
  if (!t->waited) core_fault(0, "returns without having waited for the kernel before it");
  Warp *warp = t->warp;
  t->state = RETURNED;
  warp->alive &= ~(1u << t->lane);
  current_block->threads_alive--;
  idle_turns = 0;
  for (u32 rest = warp->waiting; rest;) {  // lanes that waited for this one
    Thread *other = t - t->lane + __builtin_ctz(rest);
    u32 need;
    if (is_complete(other, &need)) {
      Act act = other->act;
      current = other;  // attribute errors to the lane whose collective it is
      run_collective(other, need, act, 0);
      set_ready(current_block, t->index / LANES, need);
      rest &= ~need;
    } else {
      rest &= rest - 1;
    }
  }
  if (current_block->threads_alive) {
    if (current_block->arrived == current_block->threads_alive) release_barrier(current_block, 0);
  } else {
    running--;
    void *never;
    core_switch(&never, launcher_sp);
  }
  Thread *next = next_thread();
  if (!next) fault_deadlock();
  void *never;
  go_to(next, &never);
}

static void thread_starts() {
  const u64 *a = launch->arguments;
  typedef void Entry(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64,  // the maximum number of arguments; unused ones do no harm
                     u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);
  ((Entry *)launch->entry)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
                           a[17], a[18], a[19], a[20], a[21], a[22], a[23]);
  thread_returns();
}

static void start_block(Block *block, u32 number) {
  const u32 *g = launch->grid, *b = launch->block;
  block->number = number;
  block->place[0] = number % g[0], block->place[1] = number / g[0] % g[1], block->place[2] = number / g[0] / g[1];
  block->threads_alive = thread_count, block->arrived = 0, block->ready_warps = 0, block->last_warp = 0;
  block->base = block->base_device = 1;
  block->clocks.count = 0;
  for (u32 w = 0; w < warp_count; w++) block->warp[w] = Warp{0, 0, 0, 0, 0};
  for (u32 i = 0; i < thread_count; i++) {
    Thread *t = &block->threads[i];
    t->block = block, t->warp = &block->warp[i / LANES], t->index = i, t->lane = i % LANES;
    t->state = CAN_RUN, t->what = "", t->line = t->mask = 0;
    t->waited = !launch->awaits;
    t->place[0] = i % b[0], t->place[1] = i / b[0] % b[1], t->place[2] = i / b[0] / b[1];
    t->actor = (number + 1) << 11 | i << 1, t->now = 1;
    t->clocks.count = t->released.count = t->released_block.count = t->acquirable.count = t->acquirable_block.count = 0;
    t->first_copy = t->copy_count = t->group = 0;
    *(u64 *)t->stack_low = CANARY;
    // stack tops at different offsets in a page; otherwise all would share a few cache lines
    t->sp = fresh_stack(t->stack_low + STACK - 64 - i % 61 * 192, thread_starts);
    t->warp->alive |= 1u << t->lane;
    set_ready(block, i / LANES, 1u << t->lane);
  }
  reset_shared(block);
}

static void allocate_block(Block *block, u32 index) {
  memset(block, 0, sizeof(Block));
  block->threads = (Thread *)calloc(warp_count * LANES, sizeof(Thread));
  block->warps = warp_count;
  for (u32 i = 0; i < thread_count; i++) block->threads[i].stack_low = (u64)launch->stacks + (u64)(index * thread_count + i) * STACK;
  allocate_shared(block);
}

static void free_block(Block *block) {
  for (u32 i = 0; i < thread_count; i++) {
    Thread *t = &block->threads[i];
    VectorClock *all[] = {&t->clocks, &t->released, &t->released_block, &t->acquirable, &t->acquirable_block};
    for (VectorClock *k : all) free(k->key), free(k->clock);
    free(t->copies);
  }
  free(block->threads), free(block->clocks.key), free(block->clocks.clock);
  free_shared(block);
}

// Blocks in seeded order: with a step that is coprime to their number.
static u32 block_order(u32 i, u32 count, u32 start, u64 step) { return (u32)((start + i * step) % count); }
static u32 common_divisor(u32 a, u32 b) { return b ? common_divisor(b, a % b) : a; }

// Returns 0 on success, 1 if `error` was set.
EXPORT int core_launch(Launch *request) {
  launch = request;
  const u32 *g = launch->grid, *b = launch->block;
  thread_count = b[0] * b[1] * b[2], warp_count = (thread_count + LANES - 1) / LANES;
  u32 count = g[0] * g[1] * g[2];
  static_size = (u32)(static_stop - static_start);
  shared_size = static_size + launch->shared;
  resident = launch->resident < count ? launch->resident : count;
  launch->image = (u64)image_start();
  order = launch->seed * 0x9E3779B97F4A7C15ull + 0xD1B54A32D192ED03ull;
  failed = false, current = 0, idle_turns = pauses = 0, current_block = 0;
  for (int i = 0; i < 8; i++) chance();
  if (!allocate_memory()) return 1;
  blocks = (Block *)calloc(resident ? resident : 1, sizeof(Block));
  for (u32 i = 0; i < resident; i++) allocate_block(&blocks[i], i);
  u32 start = count ? chance() % count : 0, started = 0;
  u64 step = count ? chance() % count : 0;
  while (count && common_divisor((u32)step ? (u32)step : count, count) != 1 && count > 1) step = (step + 1) % count;
  running = 0;
  for (u32 i = 0; i < resident; i++, running++) {
    switch_to_block(&blocks[i]);
    start_block(current_block, block_order(started++, count, start, step));
  }
  while (running && !failed) {
    Thread *next = next_thread();
    if (!next) {  // possible with several blocks: the current one has ended, the others wait
      for (u32 i = 0; i < resident; i++)
        if (blocks[i].threads_alive) switch_to_block(&blocks[i]);
      describe_deadlock();
      failed = true;
      break;
    }
    go_to(next, &launcher_sp);
    current = 0;
    if (failed) break;
    if (started < count) start_block(current_block, block_order(started++, count, start, step)), running++;
  }
  current = 0;
  if (at_end) at_end(failed);
  at_end = 0;
  for (u32 i = 0; i < resident; i++) free_block(&blocks[i]);
  free(blocks);
  free_memory();
  return failed;
}

EXPORT u32 core_static_shared() { return (u32)(static_stop - static_start); }
