// Collective operations of Metal's threads, atomics and number formats: the functions of include/metal, in terms of core.h.
#include "core.h"

extern "C" float exp2f(float);

enum { GROUP_PLACE, GROUPS, THREAD_PLACE, THREADS, GRID_PLACE, GRID_SIZE };
SHIM u32 metal_place(u32 which, u32 direction) {
  switch (which) {
    case GROUP_PLACE: return core_place(1, direction);
    case GROUPS: return core_place(3, direction);
    case THREAD_PLACE: return core_place(0, direction);
    case THREADS: return core_place(2, direction);
    case GRID_PLACE: return core_place(1, direction) * core_place(2, direction) + core_place(0, direction);
    default: return core_place(3, direction) * core_place(2, direction);
  }
}
static u32 thread_number() { return core_place(0, 0) + core_place(2, 0) * (core_place(0, 1) + core_place(2, 1) * core_place(0, 2)); }
static u32 threads_of_group() { return core_place(2, 0) * core_place(2, 1) * core_place(2, 2); }
enum { THREAD_INDEX, LANE_INDEX, SIMD_INDEX, LANE_COUNT, SIMD_COUNT };
SHIM u32 metal_number(u32 which) {
  switch (which) {
    case THREAD_INDEX: return thread_number();
    case LANE_INDEX: return thread_number() % LANES;
    case SIMD_INDEX: return thread_number() / LANES;
    case LANE_COUNT: return LANES;
    default: return (threads_of_group() + LANES - 1) / LANES;
  }
}

// ---------------------------------------------------------------- barriers

static u32 memory_of(u32 flags) { return (flags & 2 ? SHARED_MEMORY : 0) | (flags & 1 ? DEVICE_MEMORY : 0); }
SHIM void metal_barrier(bool simd, u32 flags, u32 line) {
  static const char *const names[2][4] = {{"threadgroup_barrier(mem_none)", "threadgroup_barrier(mem_device)",
                                           "threadgroup_barrier(mem_threadgroup)", "threadgroup_barrier(both)"},
                                          {"simdgroup_barrier(mem_none)", "simdgroup_barrier(mem_device)",
                                           "simdgroup_barrier(mem_threadgroup)", "simdgroup_barrier(both)"}};
  const char *name = names[simd][flags & 3];
  if (simd)
    core_lane_barrier_of(name, line, memory_of(flags), CALLER);
  else
    core_barrier_of(name, line, memory_of(flags), CALLER);
}

// ---------------------------------------------------------------- atomics, all relaxed

enum { ADD, SUB, MIN, MAX, EXCHANGE, AND, OR, XOR };
template <class T> static T combined(int what, T old, T value) {
  switch (what) {
    case ADD: return (T)((u32)old + (u32)value);
    case SUB: return (T)((u32)old - (u32)value);
    case MIN: return value < old ? value : old;
    case MAX: return old < value ? value : old;
    case AND: return old & value;
    case OR: return old | value;
    case XOR: return old ^ value;
    default: return value;
  }
}
// A store to device memory may reach other threadgroups late, and after later stores to other words: depending on the seed it waits here
// until some later atomic operation, at the latest until the launch ends. Its own threadgroup sees it at once. A read-modify-write operates
// on the newest value that has arrived.
struct LateStore {
  u32 *word, value, group;
};
static LateStore late[256];
static u32 late_count;
static u32 group_number() { return core_place(1, 0) + core_place(3, 0) * (core_place(1, 1) + core_place(3, 1) * core_place(1, 2)); }
static void arrive(u32 i) {
  *late[i].word = late[i].value;
  late[i] = late[--late_count];
}
static void end_late(bool failed) {
  while (late_count && !failed) arrive(late_count - 1);
  late_count = 0;
}
static int late_at(const void *p) {
  for (u32 i = 0; i < late_count; i++)
    if (late[i].word == p) return (int)i;
  return -1;
}
static void atomic_begins(void *p, u32 how, u64 site) {
  core_atomic(p, 4, how, site);
  if (late_count && (core_chance() & 7) == 0) arrive(core_chance() % late_count);
  int i = how & WRITE ? late_at(p) : -1;
  if (i >= 0 && (!(how & READ) || late[i].group == group_number())) arrive((u32)i);
}

// A read-modify-write that changes nothing, by a value that the compiler knows: LLVM's InstCombine (isIdempotentRMW) has turned those into
// plain loads, and no rule says that a plain load that is repeated ever returns another value. Depending on the seed, a threadgroup gets the
// value that it read first for as long as it reads the word by such operations only.
struct StaleWord {
  u32 *word, value, group;
};
static StaleWord stale[256];
static u32 stale_count;
static void end_stale(bool) { stale_count = 0; }
static int stale_at(const void *p) {
  for (u32 i = 0; i < stale_count; i++)
    if (stale[i].word == p && stale[i].group == group_number()) return (int)i;
  return -1;
}
static bool changes_nothing(int what, bool is_signed, u32 value) {
  switch (what) {
    case ADD:
    case SUB:
    case OR:
    case XOR: return value == 0;
    case AND: return value == 0xFFFFFFFFu;
    case MIN: return value == (is_signed ? 0x7FFFFFFFu : 0xFFFFFFFFu);
    case MAX: return value == (is_signed ? 0x80000000u : 0);
    default: return false;
  }
}
SHIM u32 metal_atomic_load(const void *p);
static u32 stale_load(void *p) {
  const u32 fresh = metal_atomic_load(p);
  const int i = stale_at(p);
  if (i >= 0) return stale[i].value;
  if (!core_is_shared(p) && stale_count < sizeof stale / sizeof *stale && core_chance() & 1) {
    stale[stale_count++] = {(u32 *)p, fresh, group_number()};
    core_at_end(end_stale);
  }
  return fresh;
}
static void forget_stale(const void *p) {
  const int i = stale_at(p);
  if (i >= 0) stale[i] = stale[--stale_count];
}

SHIM u32 metal_atomic(int what, bool is_signed, void *p, u32 value, bool known) {
  if (known && changes_nothing(what, is_signed, value)) return stale_load(p);
  atomic_begins(p, READ | WRITE, CALLER);
  forget_stale(p);
  u32 old = *(u32 *)p;
  *(u32 *)p = is_signed ? (u32)combined<int>(what, (int)old, (int)value) : combined<u32>(what, old, value);
  return old;
}
static u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
static float float_of(u32 x) { return __builtin_bit_cast(float, x); }
SHIM float metal_atomic_add(void *p, float value, bool minus, bool known) {
  if (known && bits_of(value) == (minus ? 0 : 0x80000000u)) return float_of(stale_load(p));
  atomic_begins(p, READ | WRITE, CALLER);
  forget_stale(p);
  float old = *(float *)p;
  *(float *)p = minus ? old - value : old + value;
  return old;
}
SHIM bool metal_atomic_compare(void *p, void *expected, u32 value) {
  atomic_begins(p, READ | WRITE, CALLER);
  forget_stale(p);
  u32 old = *(u32 *)p, wanted = *(u32 *)expected;
  *(u32 *)expected = old;
  // "weak": it may fail spuriously
  static u32 turns;
  if (old != wanted || ++turns % 7 == 0) return false;
  *(u32 *)p = value;
  return true;
}
SHIM u32 metal_atomic_load(const void *p) {
  atomic_begins((void *)p, READ, CALLER);
  int i = late_at(p);
  return i >= 0 && late[i].group == group_number() ? late[i].value : *(u32 *)p;
}
SHIM void metal_atomic_store(void *p, u32 value) {
  atomic_begins(p, WRITE, CALLER);
  forget_stale(p);
  if (core_is_shared(p) || core_chance() & 1) {
    *(u32 *)p = value;
    return;
  }
  if (late_count == sizeof late / sizeof *late) arrive(core_chance() % late_count);
  late[late_count++] = {(u32 *)p, value, group_number()};
  core_at_end(end_late);
}

// ---------------------------------------------------------------- lanes

static const u32 EVERY_LANE = 0xFFFFFFFFu;

// Up to four numbers of a lane, each in a word.
struct Numbers {
  u32 count, result[4], by, filling[4];
  const u32 *value;
  int how;
  const char *name;
};

enum {
  SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, ROTATE_UP, ROTATE_DOWN, BROADCAST, FIRST, FILL_UP, FILL_DOWN, QUAD_BROADCAST, QUAD_XOR
};
static int source(const Numbers *n, int lane, u32 mask, u64 site) {
  int by = (int)n->by;
  if (by > 31) core_fault(site, "%s by %u: expected 0 to 31", n->name, n->by);
  switch (n->how) {
    case SHUFFLE:
    case BROADCAST: return by;
    case SHUFFLE_XOR: return lane ^ by;
    case SHUFFLE_UP: return lane < by ? lane : lane - by;
    case FILL_UP: return lane < by ? -1 : lane - by;
    case SHUFFLE_DOWN: return lane + by >= LANES ? lane : lane + by;
    case FILL_DOWN: return lane + by >= LANES ? -1 : lane + by;
    case ROTATE_UP: return (lane - by) & 31;
    case ROTATE_DOWN: return (lane + by) & 31;
    case QUAD_BROADCAST: return (lane & ~3) + (by & 3);
    case QUAD_XOR: return lane ^ (by & 3);
    default: return __builtin_ctz(mask);
  }
}
static void shuffle(void **theirs, u32 mask, u64 site) {
  for (int lane = 0; lane < LANES; lane++) {
    if (!(mask >> lane & 1)) continue;
    Numbers *n = (Numbers *)theirs[lane];
    const Numbers *first = (const Numbers *)theirs[__builtin_ctz(mask)];
    if (n->how == BROADCAST && n->by != first->by)
      core_fault(site, "%s needs the same lane number in all lanes, got %u and %u", n->name, first->by, n->by);
    int from = source(n, lane, mask, site);
    if (from >= 0 && !(mask >> from & 1)) core_fault(site, "%s: lane %d reads lane %d, which has returned", n->name, lane, from);
    for (u32 i = 0; i < n->count; i++) n->result[i] = from < 0 ? n->filling[i] : ((Numbers *)theirs[from])->value[i];
  }
}
SHIM void metal_shuffle(const char *name, int how, u32 *values, u32 count, u32 by, const u32 *filling, u32 line) {
  u32 copy[4];
  Numbers mine;
  mine.count = count, mine.by = by, mine.how = how, mine.name = name, mine.value = copy;
  for (u32 i = 0; i < count; i++) copy[i] = values[i], mine.filling[i] = filling ? filling[i] : 0;
  core_together(name, EVERY_LANE, line, ALIVE_ALIGNED, &mine, shuffle, CALLER);
  for (u32 i = 0; i < count; i++) values[i] = mine.result[i];
}

struct Ballot {
  bool vote;
  u32 result;
};
static void ballot(void **theirs, u32 mask, u64) {
  u32 all = 0;
  for (int lane = 0; lane < LANES; lane++)
    if (mask >> lane & 1) all |= (u32)((Ballot *)theirs[lane])->vote << lane;
  for (int lane = 0; lane < LANES; lane++)
    if (mask >> lane & 1) ((Ballot *)theirs[lane])->result = all;
}
SHIM u32 metal_ballot(const char *name, bool vote, u32 line) {
  Ballot mine = {vote, 0};
  core_together(name, EVERY_LANE, line, ALIVE_ALIGNED, &mine, ballot, CALLER);
  return mine.result;
}

// Reductions of int, uint or float. Halves of the group at a time, so that every lane has the same bits; the GPU's order is not
// documented.
enum { SUM, PRODUCT, MINIMUM, MAXIMUM, ALL_BITS, ANY_BIT, ODD_BITS, SUM_BEFORE, SUM_WITH, PRODUCT_BEFORE, PRODUCT_WITH };
enum { UINT, INT, FLOAT, HALF, BFLOAT };
struct Reduction {
  u32 count, result[4], value[4];
  int what, type, width;
};
template <class T> static T joined(int what, T a, T b) {
  switch (what) {
    case SUM: return a + b;
    case PRODUCT: return a * b;
    case MINIMUM: return a != a || b < a ? b : a;
    default: return a != a || a < b ? b : a;
  }
}
SHIM u16 metal_to_f16(float x);
SHIM u16 metal_to_bf16(float x);
SHIM float metal_from_f16(u16 x);
static u32 join(const Reduction *r, int what, u32 a, u32 b) {
  switch (what) {
    case ALL_BITS: return a & b;
    case ANY_BIT: return a | b;
    case ODD_BITS: return a ^ b;
  }
  if (r->type == INT) return (u32)joined<int>(what, (int)a, (int)b);
  if (r->type == UINT) return joined<u32>(what, a, b);
  float c = joined<float>(what, float_of(a), float_of(b));
  if (r->type == HALF) c = metal_from_f16(metal_to_f16(c));
  if (r->type == BFLOAT) c = float_of((u32)metal_to_bf16(c) << 16);
  return bits_of(c);
}
static void reduce_segment(void **theirs, u32 lanes, u32 i) {
  Reduction *first = (Reduction *)theirs[__builtin_ctz(lanes)];
  u32 value[LANES];
  bool valid[LANES];
  for (int lane = 0; lane < LANES; lane++) {
    valid[lane] = lanes >> lane & 1;
    if (valid[lane]) value[lane] = ((Reduction *)theirs[lane])->value[i];
  }
  for (int by = LANES / 2; by; by /= 2)
    for (int lane = 0; lane < by; lane++) {
      if (valid[lane] && valid[lane + by])
        value[lane] = join(first, first->what, value[lane], value[lane + by]);
      else if (valid[lane + by])
        value[lane] = value[lane + by], valid[lane] = true;
    }
  for (u32 rest = lanes; rest; rest &= rest - 1) ((Reduction *)theirs[__builtin_ctz(rest)])->result[i] = value[0];
}
static void scan(void **theirs, u32 mask, u32 i) {
  Reduction *first = (Reduction *)theirs[__builtin_ctz(mask)];
  bool sums = first->what == SUM_BEFORE || first->what == SUM_WITH, with = first->what == SUM_WITH || first->what == PRODUCT_WITH;
  u32 so_far = sums ? 0 : first->type >= FLOAT ? bits_of(1.0f) : 1;
  for (u32 rest = mask; rest; rest &= rest - 1) {
    Reduction *r = (Reduction *)theirs[__builtin_ctz(rest)];
    u32 next = join(first, sums ? SUM : PRODUCT, so_far, r->value[i]);
    r->result[i] = with ? next : so_far;
    so_far = next;
  }
}
static void reduce(void **theirs, u32 mask, u64) {
  Reduction *first = (Reduction *)theirs[__builtin_ctz(mask)];
  for (u32 i = 0; i < first->count; i++) {
    if (first->what >= SUM_BEFORE) {
      scan(theirs, mask, i);
      continue;
    }
    for (int start = 0; start < LANES; start += first->width) {
      u32 lanes = first->width == LANES ? mask : mask & ((1u << first->width) - 1) << start;
      if (lanes) reduce_segment(theirs, lanes, i);
    }
  }
}
SHIM void metal_reduce(const char *name, int what, int type, u32 *values, u32 count, u32 width, u32 line) {
  Reduction mine;
  mine.count = count, mine.what = what, mine.type = type, mine.width = (int)width;
  for (u32 i = 0; i < count; i++) mine.value[i] = values[i];
  core_together(name, EVERY_LANE, line, ALIVE_ALIGNED, &mine, reduce, CALLER);
  for (u32 i = 0; i < count; i++) values[i] = mine.result[i];
}

// ---------------------------------------------------------------- numbers

SHIM u16 metal_to_bf16(float x) {
  u32 b = bits_of(x);
  if ((b & 0x7FFFFFFFu) > 0x7F800000u) return (u16)(b >> 16 | 0x40);
  return (u16)((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
SHIM u16 metal_to_f16(float x) {
  u32 b = bits_of(x), sign = b >> 16 & 0x8000, size = b & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return (u16)(sign | 0x7E00);
  if (size >= 0x477FF000u) return (u16)(sign | 0x7C00);  // 65520 and more
  if (size < 0x38800000u) {                              // subnormal: to a multiple of 2^-24
    float scaled = float_of(size) * 16777216.0f;         // exact
    u32 whole = (u32)scaled;
    float rest = scaled - (float)whole;
    whole += rest > 0.5f || (rest == 0.5f && whole & 1);
    return (u16)(sign | whole);
  }
  u32 rounded = size + 0xFFF + (size >> 13 & 1);
  return (u16)(sign | (rounded - 0x38000000u) >> 13);
}
SHIM float metal_from_f16(u16 x) {
  u32 sign = (u32)(x & 0x8000) << 16, size = x & 0x7FFF;
  if (size < 0x400) return float_of(sign | bits_of((float)size * 5.9604644775390625e-8f));
  if (size >= 0x7C00) return float_of(sign | 0x7F800000u | (size & 0x3FF) << 13);
  return float_of(sign | ((size << 13) + 0x38000000u));
}
// A double to float so that a second rounding, to fewer digits, is right: inexact results get an odd last bit.
static float odd_float(double x) {
  float f = (float)x;
  if ((double)f == x || x != x || f - f != 0.0f) return f;
  u32 b = bits_of(f);
  bool away = (double)f > x == x > 0.0;
  if (away) b--;
  return float_of(b | 1);
}
SHIM u16 metal_double_to_f16(double x) { return metal_to_f16(odd_float(x)); }

// What the compiler calls where the processor lacks the instruction.
SHIM float __extendhfsf2(_Float16 x) { return metal_from_f16(__builtin_bit_cast(u16, x)); }
SHIM _Float16 __truncsfhf2(float x) { return __builtin_bit_cast(_Float16, metal_to_f16(x)); }
SHIM _Float16 __truncdfhf2(double x) { return __builtin_bit_cast(_Float16, metal_double_to_f16(x)); }
SHIM __bf16 __truncsfbf2(float x) { return __builtin_bit_cast(__bf16, metal_to_bf16(x)); }
SHIM __bf16 __truncdfbf2(double x) { return __builtin_bit_cast(__bf16, metal_to_bf16(odd_float(x))); }

SHIM float metal_fast_exp2(float x) {
  float power = exp2f(x);
  return power < 1.17549435e-38f ? 0.0f : power;  // NaN stays NaN
}

// ---------------------------------------------------------------- matrices

// Two numbers of each lane: of row `row_of`, columns `column_of` and the next. Apple's specification does not promise that; code that writes
// to thread_elements(), such as MLX, relies on it, and it is the same on every GPU so far.
#ifdef OTHER_MATRIX_LAYOUT
static int row_of(int lane) { return lane / 4; }
static int column_of(int lane) { return lane % 4 * 2; }
#else
static int row_of(int lane) { return (lane >> 2 & 4) + (lane >> 1 & 3); }
static int column_of(int lane) { return (lane >> 2 & 2) * 2 + (lane & 1) * 2; }
#endif

static u32 size_of(int type) { return type >= HALF ? 2 : 4; }
static float number_at(const u8 *p, int type) {
  if (type == FLOAT) return *(const float *)p;
  u16 x = *(const u16 *)p;
  return type == HALF ? metal_from_f16(x) : float_of((u32)x << 16);
}
static void put_number(u8 *p, int type, float x) {
  if (type == FLOAT)
    *(float *)p = x;
  else
    *(u16 *)p = type == HALF ? metal_to_f16(x) : metal_to_bf16(x);
}

struct Move {
  Thread *thread;
  u8 *elements, *memory;
  s64 stride, column, row;
  int type;
  bool transposed, store;
};
// Which lane reads or writes which number is not specified: here never the lane that holds it, and another for reading than for writing.
static void move(void **theirs, u32, u64 site) {
  const Move *first = (const Move *)theirs[0];
  for (int lane = 1; lane < LANES; lane++) {
    const Move *m = (const Move *)theirs[lane];
    if (m->memory != first->memory || m->stride != first->stride || m->column != first->column || m->row != first->row)
      core_fault(site, "a matrix needs the same address in all lanes of a SIMD group; lane 0 has %p and a row length of %lld, lane %d %p and %lld",
                 first->memory, first->stride, lane, m->memory, m->stride);
  }
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 2; i++) {
      Move *m = (Move *)theirs[lane];
      u32 size = size_of(m->type);
      s64 row = row_of(lane), column = column_of(lane) + i;
      if (m->transposed) {
        s64 swap = row;
        row = column, column = swap;
      }
      u8 *place = m->memory + ((m->row + row) * m->stride + m->column + column) * size;
      u8 *held = m->elements + i * size;
      if ((u64)place % size) core_fault(site, "misaligned: a matrix at %p; expected a multiple of %u", place, size);
      core_access(((Move *)theirs[(lane + (m->store ? 5 : 9)) % LANES])->thread, place, size, m->store ? WRITE : READ, site);
      for (u32 k = 0; k < size; k++) (m->store ? place : held)[k] = (m->store ? held : place)[k];
    }
}
SHIM void metal_move(bool store, int type, void *elements, const void *memory, u64 stride, u64 column, u64 row, bool transposed, u32 line) {
  Move mine = {core_current(), (u8 *)elements, (u8 *)memory, (s64)stride, (s64)column, (s64)row, type, transposed, store};
  core_together(store ? "simdgroup_store" : "simdgroup_load", EVERY_LANE, line, ALL_ALIGNED, &mine, move, CALLER);
}

struct Product {
  u8 *d;
  const u8 *a, *b, *c;
  int type_d, type_a, type_b;
};
typedef float F8 __attribute__((ext_vector_type(8)));
static void gather(void **theirs, const u8 *Product::*which, int type, float (*into)[8]) {
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 2; i++)
      into[row_of(lane)][column_of(lane) + i] = number_at(((Product *)theirs[lane])->*which + i * size_of(type), type);
}
// Products and sums in float32, k ascending; the GPU's order is not documented.
static void multiply(void **theirs, u32, u64) {
  const Product *first = (const Product *)theirs[0];
  float a[8][8], b[8][8], c[8][8];
  gather(theirs, &Product::a, first->type_a, a);
  gather(theirs, &Product::b, first->type_b, b);
  if (first->c) gather(theirs, &Product::c, first->type_d, c);
  for (int row = 0; row < 8; row++) {
    F8 sum = 0.0f, line;
    if (first->c) __builtin_memcpy(&sum, c[row], 32);
    for (int k = 0; k < 8; k++) {
      __builtin_memcpy(&line, b[k], 32);
      sum = __builtin_elementwise_fma((F8)a[row][k], line, sum);
    }
    __builtin_memcpy(c[row], &sum, 32);
  }
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 2; i++)
      put_number(((Product *)theirs[lane])->d + i * size_of(first->type_d), first->type_d, c[row_of(lane)][column_of(lane) + i]);
}
SHIM void metal_multiply(void *d, int type_d, const void *a, int type_a, const void *b, int type_b, const void *c, u32 line) {
  Product mine = {(u8 *)d, (const u8 *)a, (const u8 *)b, (const u8 *)c, type_d, type_a, type_b};
  core_together(c ? "simdgroup_multiply_accumulate" : "simdgroup_multiply", EVERY_LANE, line, ALL_ALIGNED, &mine, multiply, CALLER);
}
