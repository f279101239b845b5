// The memory of a launch: which bytes exist, which shared bytes are written, and which accesses are unordered. Part of core.cpp.
//
// Races are found by happens-before (Lamport clocks; the cells and the rule of the last write and the last reads are those of FastTrack,
// Flanagan and Freund 2009). Each 4 bytes have a cell with the last write and the last reads since. A thread's clock advances at each
// release. Barriers set the clocks of all participants to one number above all of theirs; accesses below it (`base`) are ordered. So the clocks of
// other threads are kept only where fences and atomics (or barriers of some lanes) synchronize: VectorClock.

enum Kind : u8 { NOWHERE, GLOBAL, SHARED };

struct Range {
  u64 low, size;
  Kind kind;
  bool writable;
  const char *name;
  u8 *state;    // ByteState of each byte of shared memory
  Cell *cells;  // of each 4 bytes, from low & ~3 on; 0: races are not checked
  Pool *pool;
  u64 read;  // bytes
};
enum ByteState : u8 { NEVER_WRITTEN = 0, WRITTEN = 1, PENDING = 2 };

struct Cell {
  u32 write_actor, write_clock, read_actor, read_clock, write_site, read_site;
};
enum : u32 { MANY_READERS = 0xFFFFFFFEu, SPLIT = 0xFFFFFFFDu, ALL_THREADS = 1024 };

// All reads of a cell since its last write, if more than one counts: by block (a list), by warp.
struct Readers {
  u32 block_actor, next;  // (block + 1) << 11
  struct {
    u32 clock, lanes;
  } warp[1];  // warp_count of them
};

static Range ranges[64];
static u32 range_count;
static Range *last_ranges[256];  // by site in the code
static Range no_range;
static Pool launch_pool;

// ---------------------------------------------------------------- vector clocks

static u64 key_of(u32 block_actor, u32 thread) { return (u64)block_actor << 32 | thread; }

static void merge_clock(VectorClock *k, u64 key, u32 clock) {
  u32 low = 0, high = k->count;
  while (low < high) {
    u32 middle = (low + high) / 2;
    if (k->key[middle] < key)
      low = middle + 1;
    else
      high = middle;
  }
  if (low < k->count && k->key[low] == key) {
    if (k->clock[low] < clock) k->clock[low] = clock;
    return;
  }
  if (k->count == k->room) {
    k->room = k->room ? k->room * 2 : 8;
    k->key = (u64 *)realloc(k->key, k->room * sizeof(u64));
    k->clock = (u32 *)realloc(k->clock, k->room * sizeof(u32));
  }
  memmove(k->key + low + 1, k->key + low, (k->count - low) * sizeof(u64));
  memmove(k->clock + low + 1, k->clock + low, (k->count - low) * sizeof(u32));
  k->key[low] = key, k->clock[low] = clock, k->count++;
}

static void merge_clocks(VectorClock *into, const VectorClock *from) {
  for (u32 i = 0; i < from->count; i++) merge_clock(into, from->key[i], from->clock[i]);
}

static u32 clock_of(const VectorClock *k, u64 key) {
  u32 low = 0, high = k->count;
  while (low < high) {
    u32 middle = (low + high) / 2;
    if (k->key[middle] < key)
      low = middle + 1;
    else
      high = middle;
  }
  return low < k->count && k->key[low] == key ? k->clock[low] : 0;
}

static bool has_clock(const Thread *t, u32 actor, u32 clock) {
  u32 block = actor & ~2047u, thread = actor >> 1 & 1023;
  const VectorClock *both[] = {&t->clocks, &t->block->clocks};
  for (const VectorClock *k : both)
    if (k->count && (clock_of(k, key_of(block, thread)) > clock || clock_of(k, key_of(block, ALL_THREADS)) > clock)) return true;
  return false;
}

// Clocks, set by barriers, below which every access is ordered; separate for shared and for other memory.
static inline u32 block_base(const Thread *t, Kind kind) { return kind == SHARED ? t->block->base : t->block->base_device; }
static inline u32 warp_base(const Thread *t, Kind kind) { return kind == SHARED ? t->warp->base : t->warp->base_device; }

// Whether that access to memory of a kind is ordered before everything that `t` does now.
static inline bool in_order(const Thread *t, u32 actor, u32 clock, Kind kind) {
  u32 differs = actor ^ t->actor;
  if (differs < 2) return true;  // the thread itself
  if (differs < 2048) {          // its block
    if (clock < block_base(t, kind)) return true;
    if (differs < 64 && clock < warp_base(t, kind)) return true;
  }
  return has_clock(t, actor, clock);
}

// Adds what `t` can release now: its own accesses, and everything that is ordered before them.
static void add_history(const Thread *t, VectorClock *history) {
  u32 block = t->actor & ~2047u;
  merge_clock(history, key_of(block, ALL_THREADS), t->block->base);
  if (t->warp->base > t->block->base)
    for (u32 lane = 0; lane < LANES; lane++) merge_clock(history, key_of(block, t->index - t->lane + lane), t->warp->base);
  merge_clock(history, key_of(block, t->index), t->now + 1);
  merge_clocks(history, &t->block->clocks);
  merge_clocks(history, &t->clocks);
}

static void order_in_warp(Warp *warp, Thread *first, u32 mask, u32 memory) {
  if (mask == warp->alive) {
    u32 clock = 0;
    bool has_clocks = false;
    for (u32 rest = mask; rest; rest &= rest - 1) {
      Thread *t = first + __builtin_ctz(rest);
      if (t->now > clock) clock = t->now;
      has_clocks |= t->clocks.count != 0;
    }
    clock++;
    if (memory & SHARED_MEMORY) warp->base = clock;
    if (memory & DEVICE_MEMORY) warp->base_device = clock;
    for (u32 rest = mask; rest; rest &= rest - 1) first[__builtin_ctz(rest)].now = clock;
    if (!has_clocks) return;
  }
  VectorClock all = {0, 0, 0, 0};
  for (u32 rest = mask; rest; rest &= rest - 1) {
    Thread *t = first + __builtin_ctz(rest);
    merge_clocks(&all, &t->clocks);
    if (mask != warp->alive) merge_clock(&all, key_of(t->actor & ~2047u, t->index), ++t->now);
  }
  for (u32 rest = mask; rest; rest &= rest - 1) merge_clocks(&first[__builtin_ctz(rest)].clocks, &all);
  free(all.key), free(all.clock);
}

// ---------------------------------------------------------------- fences and atomics

struct SyncAddress {  // an address at which atomics synchronize; of one block, or (owner 0) of all
  u64 address;
  u32 owner;
  VectorClock clock;
};
static SyncAddress *sync_addresses;
static u32 sync_count, sync_room;

static u32 sync_slot(const SyncAddress *all, u32 room, u64 address, u32 owner) {
  u32 at = (u32)(((address ^ (u64)owner << 32) * 0x9E3779B97F4A7C15ull) >> 32) & (room - 1);
  while (all[at].address && (all[at].address != address || all[at].owner != owner)) at = (at + 1) & (room - 1);
  return at;
}

static VectorClock *clock_of_address(u64 address, u32 owner) {
  if (sync_count * 2 >= sync_room) {
    u32 room = sync_room ? sync_room * 2 : 64;
    SyncAddress *fresh = (SyncAddress *)calloc(room, sizeof(SyncAddress));
    for (u32 i = 0; i < sync_room; i++)
      if (sync_addresses[i].address) fresh[sync_slot(fresh, room, sync_addresses[i].address, sync_addresses[i].owner)] = sync_addresses[i];
    free(sync_addresses);
    sync_addresses = fresh, sync_room = room;
  }
  SyncAddress *m = &sync_addresses[sync_slot(sync_addresses, sync_room, address, owner)];
  if (!m->address) m->address = address, m->owner = owner, sync_count++;
  return &m->clock;
}

void core_fence(bool device) {
  Thread *t = current;
  if (!launch->races) return;
  merge_clocks(&t->clocks, &t->acquirable_block), t->acquirable_block.count = 0;
  if (device) merge_clocks(&t->clocks, &t->acquirable), t->acquirable.count = 0;
  VectorClock *history = device ? &t->released : &t->released_block;
  history->count = 0;
  add_history(t, history);
  t->now++;
}

static void synchronize(Thread *t, u64 address, u32 how, bool shared) {
  u32 block = t->actor & ~2047u;
  if (!shared) {
    VectorClock *device = clock_of_address(address, 0);
    merge_clocks(&t->acquirable, device);
    if (how & WRITE) merge_clocks(device, &t->released);
  }
  VectorClock *own = clock_of_address(address, block);
  merge_clocks(&t->acquirable_block, own);
  if (how & WRITE) merge_clocks(own, &t->released), merge_clocks(own, &t->released_block);
}

// ---------------------------------------------------------------- cells

static u32 pool_allocate(Pool *pool, u32 words) {
  if (pool->used + words > pool->room) {
    u32 room = pool->room ? pool->room * 2 : 1 << 14;
    while (room < pool->used + words) room *= 2;
    pool->at = (u64 *)realloc(pool->at, (u64)room * 8);
    if (!pool->at) core_fault(0, "the emulator is out of memory for its records");
    pool->room = room;
  }
  if (!pool->used) pool->used = 1;
  u32 at = pool->used;
  pool->used += words;
  memset(pool->at + at, 0, words * 8ull);
  return at;
}

static void describe(char *text, u32 room, u64 address);

static void race(Thread *t, u64 address, u32 how, u64 site, u32 actor, u32 site_there, bool wrote) {
  char other[96];
  u32 used = name_thread(other, sizeof other, actor >> 1 & 1023);
  if ((actor ^ t->actor) >= 2048) snprintf(other + used, sizeof other - used, " of block %u", (actor >> 11) - 1);
  char where[160];
  describe(where, sizeof where, address);
  launch->other_site = launch->image + site_there;
  const char *does = how & WRITE ? how & ATOMIC ? "updates" : "writes" : "reads";
  core_fault(site, "race: it %s %s while %s %s it, with no barrier or fence between", does, where, other, wrote ? "writes" : "reads");
}

static void record_reader(Range *r, Cell *c, Thread *t) {
  u32 block = t->actor & ~2047u, words = 1 + warp_count;
  if (c->read_actor != MANY_READERS) {
    u32 at = pool_allocate(r->pool, words);
    Readers *first = (Readers *)(r->pool->at + at);
    u32 w = (c->read_actor >> 1 & 1023) / LANES;
    first->block_actor = c->read_actor & ~2047u;
    first->warp[w].clock = c->read_clock, first->warp[w].lanes = 1u << (c->read_actor >> 1 & 31);
    c->read_actor = MANY_READERS, c->read_clock = at;
  }
  Readers *head = (Readers *)(r->pool->at + c->read_clock);
  if (head->block_actor != block) {
    u32 at = pool_allocate(r->pool, words);
    head = (Readers *)(r->pool->at + at);
    head->block_actor = block, head->next = c->read_clock;
    c->read_clock = at;
  }
  auto &own = head->warp[t->index / LANES];
  if (own.clock < block_base(t, r->kind) || own.clock < warp_base(t, r->kind)) own.lanes = 0;
  own.clock = own.clock > t->now ? own.clock : t->now;
  own.lanes |= 1u << t->lane;
}

static void check_readers(Range *r, Cell *c, Thread *t, u64 address, u32 how, u64 site) {
  for (u32 at = c->read_clock; at;) {
    Readers *one = (Readers *)(r->pool->at + at);
    for (u32 w = 0; w < warp_count; w++)
      for (u32 lanes = one->warp[w].lanes; lanes; lanes &= lanes - 1) {
        u32 actor = one->block_actor | (w * LANES + __builtin_ctz(lanes)) << 1;
        if (!in_order(t, actor, one->warp[w].clock, r->kind)) race(t, address, how, site, actor, c->read_site, false);
      }
    at = one->next;
  }
}

static void record_access(Range *r, Cell *c, Thread *t, u64 address, u32 how, u64 site) {
  u32 actor = t->actor | (how & ATOMIC ? 1 : 0);
  if (how & WRITE) {
    if (c->write_actor == actor && c->write_clock == t->now && !c->read_actor) return;
    if (c->write_actor && !(how & ATOMIC && c->write_actor & 1) && !in_order(t, c->write_actor, c->write_clock, r->kind))
      race(t, address, how, site, c->write_actor, c->write_site, true);
    if (c->read_actor == MANY_READERS)
      check_readers(r, c, t, address, how, site);
    else if (c->read_actor && !in_order(t, c->read_actor, c->read_clock, r->kind))
      race(t, address, how, site, c->read_actor, c->read_site, false);
    c->write_actor = actor, c->write_clock = t->now, c->write_site = (u32)(site - launch->image);
    c->read_actor = 0;
    return;
  }
  if (c->read_actor == actor && c->read_clock == t->now) return;
  if (c->write_actor && !(how & ATOMIC && c->write_actor & 1) && !in_order(t, c->write_actor, c->write_clock, r->kind))
    race(t, address, how, site, c->write_actor, c->write_site, true);
  if (how & ATOMIC) return;  // atomic reads are not remembered
  if (!c->read_actor || (c->read_actor != MANY_READERS && in_order(t, c->read_actor, c->read_clock, r->kind)))
    c->read_actor = actor, c->read_clock = t->now;
  else
    record_reader(r, c, t);
  c->read_site = (u32)(site - launch->image);
}

static u32 copy_readers(Pool *pool, u32 from) {
  if (!from) return 0;
  u32 words = 1 + warp_count, at = pool_allocate(pool, words);
  memcpy(pool->at + at, pool->at + from, words * 8);
  u32 next = copy_readers(pool, ((Readers *)(pool->at + from))->next);
  ((Readers *)(pool->at + at))->next = next;
  return at;
}

// Accesses to a part of a word split its cell, one for each byte, until a whole word is written again.
static void record_bytes(Range *r, Cell *c, Thread *t, u64 address, u32 from, u32 to, u32 how, u64 site) {
  if (c->write_actor != SPLIT) {
    Cell whole = *c;
    u32 at = pool_allocate(r->pool, 12);
    for (u32 i = 0; i < 4; i++) {
      if (whole.read_actor == MANY_READERS && i) whole.read_clock = copy_readers(r->pool, whole.read_clock);
      ((Cell *)(r->pool->at + at))[i] = whole;
    }
    c->write_actor = SPLIT, c->write_clock = at;
  }
  for (u32 i = from; i < to; i++) {
    Cell part = ((Cell *)(r->pool->at + c->write_clock))[i];  // the pool may move
    record_access(r, &part, t, address - address % 4 + i, how, site);
    ((Cell *)(r->pool->at + c->write_clock))[i] = part;
  }
  if (how & WRITE && to - from == 4) {
    Cell part = ((Cell *)(r->pool->at + c->write_clock))[0];
    *c = part;
  }
}

static void record_range(Range *r, Thread *t, u64 address, u32 size, u32 how, u64 site) {
  Cell *c = r->cells + (address / 4 - r->low / 4);
  while (size) {
    u32 from = address % 4, to = from + size < 4 ? from + size : 4;
    if (to - from == 4 && c->write_actor != SPLIT)
      record_access(r, c, t, address, how, site);
    else
      record_bytes(r, c, t, address, from, to, how, site);
    address += to - from, size -= to - from, c++;
  }
}

// ---------------------------------------------------------------- addresses

static void describe(char *text, u32 room, u64 address) {
  const Range *best = 0;
  u64 nearest = 1 << 20;
  bool after = false;
  for (u32 i = 0; i < range_count; i++) {
    const Range *r = &ranges[i];
    if (address - r->low < r->size) {
      snprintf(text, room, "byte %llu of %s", address - r->low, r->name);
      return;
    }
    if (!r->low) continue;  // no shared memory is declared
    u64 far = address < r->low ? r->low - address : address - (r->low + r->size);
    if (far < nearest) nearest = far, best = r, after = address >= r->low;
  }
  if (best && after)
    snprintf(text, room, "byte %llu of %s, which has %llu bytes", address - best->low, best->name, best->size);
  else if (best)
    snprintf(text, room, "%llu bytes before the start of %s", nearest, best->name);
  else
    snprintf(text, room, "the address %#llx, which is in no array", address);
}

static Range *find_range(Thread *t, u64 address, u32 size, u32 how, u64 site) {
  for (u32 i = 0; i < range_count; i++) {
    Range *r = &ranges[i];
    u64 offset = address - r->low;
    if (offset < r->size && size <= r->size - offset) return r;
  }
  // the kernel's own constants; its variables in shared memory are a range
  if (!(how & WRITE) && address >= (u64)image_start() && address + size <= (u64)image_stop()) return 0;
  char where[200];
  for (u32 i = 0; i < range_count; i++)
    if (address < ranges[i].low && address + size > ranges[i].low) address = ranges[i].low - 1;
  for (u32 i = 0; i < range_count; i++)
    if (address - ranges[i].low < ranges[i].size) address = ranges[i].low + ranges[i].size;  // the first byte out of bounds
  describe(where, sizeof where, address);
  core_fault(site, "out of bounds: %s %u bytes of which one is %s", how & WRITE ? "writes" : "reads", size, where);
}

static void fault_state(Thread *t, Range *r, u64 address, u32 size, u32 how, u64 site) {
  char where[200];
  u64 at = address;
  while (at < address + size && (how & WRITE ? r->state[at - r->low] != PENDING : r->state[at - r->low] == WRITTEN)) at++;
  describe(where, sizeof where, at);
  if (r->state[at - r->low] == NEVER_WRITTEN) core_fault(site, "never written: reads %s, which no thread of its block has written", where);
  const Thread *owner = 0;
  for (u32 i = 0; i < thread_count; i++) {
    const Thread *s = &current_block->threads[i];
    for (u32 k = s->first_copy; k < s->copy_count; k++)
      if (at - (u64)s->copies[k].to < s->copies[k].size) owner = s, launch->other_site = s->copies[k].site;
  }
  char name[96] = "another thread";
  if (owner == t)
    snprintf(name, sizeof name, "this thread");
  else if (owner)
    name_thread(name, sizeof name, owner->index);
  core_fault(site, "pending copy: %s %s, to which a copy of %s has not been waited for", how & WRITE ? "writes" : "reads", where, name);
}

static inline void check_state(Thread *t, Range *r, u64 address, u32 size, u32 how, u64 site) {
  u8 *state = r->state + (address - r->low);
  if (how & READ) {
    u8 bad = 0;
    for (u32 i = 0; i < size; i++) bad |= state[i] ^ WRITTEN;
    if (RARE(bad)) fault_state(t, r, address, size, READ, site);
  }
  if (how & WRITE) {
    u8 bad = 0;
    for (u32 i = 0; i < size; i++) bad |= state[i] & PENDING, state[i] = WRITTEN;
    if (RARE(bad)) {
      for (u32 i = 0; i < size; i++) state[i] = PENDING;
      fault_state(t, r, address, size, WRITE, site);
    }
  }
}

static inline Range *check_access(Thread *t, u64 address, u32 size, u32 how, u64 site) {
  Range **last = &last_ranges[(site ^ site >> 8) & 255];
  Range *r = *last;
  u64 offset = address - r->low;
  if (RARE(offset >= r->size || size > r->size - offset)) {
    r = find_range(t, address, size, how, site);
    if (!r) return 0;
    *last = r;
  }
  if (how & WRITE && RARE(!r->writable)) core_fault(site, "writes to %s, which is read-only", r->name);
  if (RARE(!t->waited) && how & WRITE && r->kind == GLOBAL) core_fault(site, "writes to %s before it waits for the kernel before it", r->name);
  if (r->state) check_state(t, r, address, size, how, site);
  if (r->cells) record_range(r, t, address, size, how & WRITE ? how & ~READ : how, site);
  return r;
}

static u64 accesses;

static inline void hook(const void *p, u32 size, u32 how, u64 site) {
  u64 address = (u64)p;
  if (address - stack_low < STACK) return;
  accesses++;
  Range *r = check_access(current, address, size, how, site);
  if (r && how & READ) r->read += size;
}

void core_access(Thread *thread, const void *address, u32 size, u32 how, u64 site) {
  if (thread == current && (u64)address - stack_low < STACK) return;
  accesses++;
  Range *r = size ? check_access(thread, (u64)address, size, how, site) : 0;
  if (r && how & READ) r->read += size;
}

void core_expect(const void *address, u32 size, u32 alignment, bool shared, const char *what, u64 site) {
  u64 a = (u64)address;
  bool is_shared = false;
  for (u32 i = 0; i < 2; i++) is_shared |= a - ranges[i].low < ranges[i].size;
  if (shared == is_shared && a % alignment == 0) return;
  char where[200];
  describe(where, sizeof where, a);
  if (shared != is_shared) core_fault(site, "%s needs an address in %s memory, got %s", what, shared ? "shared" : "global", where);
  core_fault(site, "misaligned: %s needs an address that is a multiple of %u, got %s", what, alignment, where);
  (void)size;
}

bool core_is_shared(const void *address) {
  return (u64)address - ranges[0].low < ranges[0].size || (u64)address - ranges[1].low < ranges[1].size;
}

void core_atomic(void *address, u32 size, u32 how, u64 site) {
  if ((chance() & 3) == 0) core_yield();  // first: the rest, with the caller's operation, is atomic
  if ((u64)address % size) core_fault(site, "misaligned: an atomic of %u bytes at %p", size, address);
  accesses++;
  Range *r = check_access(current, (u64)address, size, how | ATOMIC, site);
  if (r && how & READ) r->read += size;
  if (launch->races && r) synchronize(current, (u64)address, how, r->kind == SHARED);
}

// ---------------------------------------------------------------- what the compiler calls

#define HOOKS(size)                                                                                \
  SHIM void __tsan_read##size(void *p) { hook(p, size, READ, CALLER); }                            \
  SHIM void __tsan_write##size(void *p) { hook(p, size, WRITE, CALLER); }                          \
  SHIM void __tsan_read_write##size(void *p) { hook(p, size, READ | WRITE, CALLER); }              \
  SHIM void __tsan_unaligned_read##size(void *p) { hook(p, size, READ, CALLER); }                  \
  SHIM void __tsan_unaligned_write##size(void *p) { hook(p, size, WRITE, CALLER); }                \
  SHIM void __tsan_unaligned_read_write##size(void *p) { hook(p, size, READ | WRITE, CALLER); }    \
  SHIM void __tsan_volatile_read##size(void *p) { volatile_hook(p, size, READ, CALLER); }                  \
  SHIM void __tsan_volatile_write##size(void *p) { volatile_hook(p, size, WRITE, CALLER); }                \
  SHIM void __tsan_unaligned_volatile_read##size(void *p) { volatile_hook(p, size, READ, CALLER); }        \
  SHIM void __tsan_unaligned_volatile_write##size(void *p) { volatile_hook(p, size, WRITE, CALLER); }

static void volatile_hook(void *p, u32 size, u32 how, u64 site) {
  if ((u64)p - stack_low >= STACK) core_atomic(p, size, how, site);
}
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
SHIM void __tsan_init() {}
SHIM void __tsan_func_entry(void *) {}
SHIM void __tsan_func_exit() {}
SHIM void *__tsan_memcpy(void *to, const void *from, u64 size) {
  if (size) hook(from, (u32)size, READ, CALLER), hook(to, (u32)size, WRITE, CALLER);
  return memcpy(to, from, size);
}
SHIM void *__tsan_memmove(void *to, const void *from, u64 size) {
  if (size) hook(from, (u32)size, READ, CALLER), hook(to, (u32)size, WRITE, CALLER);
  return memmove(to, from, size);
}
SHIM void *__tsan_memset(void *to, int value, u64 size) {
  if (size) hook(to, (u32)size, WRITE, CALLER);
  return memset(to, value, size);
}

// -fsanitize=alignment,array-bounds
struct SourcePlace {
  const char *file;
  u32 line, column;
};
struct TypeName {
  u16 kind, info;
  char name[1];
};
struct Misuse {
  SourcePlace place;
  const TypeName *type;
  u8 log_alignment, kind;
};
struct BadIndex {
  SourcePlace place;
  const TypeName *array, *index;
};
SHIM void __ubsan_handle_type_mismatch_v1(const Misuse *misuse, u64 address) {
  char where[200];
  describe(where, sizeof where, address);
  core_fault(CALLER, "misaligned: an access to %s as %s, which needs a multiple of %u", where, misuse->type->name,
             1u << misuse->log_alignment);
}
SHIM void __ubsan_handle_out_of_bounds(const BadIndex *bad, u64 index) {
  core_fault(CALLER, "out of bounds: index %lld of an array %s", (s64)index, bad->array->name);
}

// ---------------------------------------------------------------- asynchronous copies

void core_copy(void *to, const void *from, u32 size, u64 site) {
  Thread *t = current;
  core_expect(to, size, size, true, "a copy's destination", site);
  if (from) {
    if ((u64)from % size) core_expect(from, size, size, false, "a copy's source", site);
    core_access(t, from, size, READ, site);
  }
  Range *r = check_access(t, (u64)to, size, WRITE, site);
  memset(r->state + ((u64)to - r->low), PENDING, size);
  if (t->copy_count == t->copy_room) {
    t->copy_room = t->copy_room ? t->copy_room * 2 : 16;
    t->copies = (Copy *)realloc(t->copies, t->copy_room * sizeof(Copy));
  }
  t->copies[t->copy_count++] = Copy{(u8 *)to, (const u8 *)from, site, size, t->group};
  memset(to, 0xFF, size);
  if (chance() & 1) from ? memcpy(to, from, size) : memset(to, 0, size);  // it may complete early, but no kernel may rely on it
}

void core_copy_commit() { current->group++; }

void core_copy_wait(u32 groups_left, u64 site) {
  Thread *t = current;
  (void)site;
  u32 i = t->first_copy;
  for (; i < t->copy_count && t->copies[i].group + groups_left < t->group; i++) {
    Copy c = t->copies[i];
    Range *r = find_range(t, (u64)c.to, c.size, WRITE, c.site);
    memset(r->state + ((u64)c.to - r->low), WRITTEN, c.size);
    if (r->cells) record_range(r, t, (u64)c.to, c.size, WRITE, c.site);
    if (c.from)
      check_access(t, (u64)c.from, c.size, READ, c.site), memcpy(c.to, c.from, c.size);
    else
      memset(c.to, 0, c.size);
  }
  t->first_copy = i;
  if (i == t->copy_count) t->first_copy = t->copy_count = 0;
}

// ---------------------------------------------------------------- set-up

// Static and dynamic shared memory are the first two ranges; their state is that of the running block.
static void switch_to_block(Block *block) {
  if (current_block == block) return;
  if (current_block && current_block->saved) {
    memcpy(current_block->saved, static_start, static_size);
    memcpy(current_block->saved + static_size, gpu_dynamic, launch->shared);
  }
  if (block->saved) memcpy(static_start, block->saved, static_size), memcpy(gpu_dynamic, block->saved + static_size, launch->shared);
  current_block = block;
  ranges[0].state = block->state, ranges[1].state = block->state + static_size;
  ranges[0].cells = block->cells, ranges[1].cells = block->cells ? block->cells + static_size / 4 + 2 : 0;
  ranges[0].pool = ranges[1].pool = &block->pool;
}

static void allocate_shared(Block *block) {
  block->state = (u8 *)calloc(shared_size + 64, 1);
  if (resident > 1) block->saved = (u8 *)calloc(shared_size + 64, 1);
  if (launch->races) block->cells = (Cell *)calloc(shared_size / 4 + 8, sizeof(Cell));
}

static void reset_shared(Block *block) {
  memset(static_start, 0xFF, static_size);
  memset(gpu_dynamic, 0xFF, launch->shared);
  memset(block->state, NEVER_WRITTEN, shared_size);
  if (block->cells) memset(block->cells, 0, (shared_size / 4 + 8) * sizeof(Cell));
  block->pool.used = 0;
}

static void free_shared(Block *block) { free(block->state), free(block->saved), free(block->cells), free(block->pool.at); }

static void add_range(u64 low, u64 size, Kind kind, bool writable, const char *name) {
  Range *r = &ranges[range_count++];
  *r = Range{low, size, kind, writable, name, 0, 0, &launch_pool, 0};
  if (kind == GLOBAL && writable && launch->races) r->cells = (Cell *)calloc(size / 4 + 2, sizeof(Cell));
}

static bool allocate_memory() {
  if (launch->range_count > 62 || launch->argument_count > 24 || launch->shared > MAX_DYNAMIC || thread_count > MAX_THREADS ||
      (u64)resident * thread_count * STACK > launch->stacks_size) {
    snprintf(launch->error, launch->error_size,
             "the emulator runs at most 62 ranges of memory, 24 arguments, %d bytes of shared memory, 1024 threads", MAX_DYNAMIC);
    return false;
  }
  range_count = 0, accesses = 0, launch_pool.used = 0;
  add_range((u64)static_start, static_size, SHARED, true, "the shared memory that it declares");
  add_range((u64)gpu_dynamic, launch->shared, SHARED, true, "the shared memory of the launch");
  for (u32 i = 0; i < launch->range_count; i++) {
    const MemoryRange *one = &launch->ranges[i];
    add_range(one->low, one->size, GLOBAL, one->writable, one->name);
  }
  for (Range *&one : last_ranges) one = &no_range;
  return true;
}

static void free_memory() {
  launch->accesses = accesses;
  for (u32 i = 0; i < launch->range_count; i++) launch->ranges[i].read = ranges[range_count - launch->range_count + i].read;
  for (u32 i = 0; i < range_count; i++)
    if (ranges[i].kind == GLOBAL) free(ranges[i].cells);
  for (u32 i = 0; i < sync_room; i++) free(sync_addresses[i].clock.key), free(sync_addresses[i].clock.clock);
  free(sync_addresses), sync_addresses = 0, sync_count = sync_room = 0;
  free(launch_pool.at), launch_pool = Pool{0, 0, 0};
}
