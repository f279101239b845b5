// CUDA's collectives, atomics and number formats: the functions of cuda.h, implemented with core.h.
#include "core.h"

typedef u32 U4 __attribute__((ext_vector_type(4)));
typedef int S4 __attribute__((ext_vector_type(4)));
typedef float F4 __attribute__((ext_vector_type(4)));
typedef float F8 __attribute__((ext_vector_type(8)));
extern "C" float exp2f(float);

SHIM u32 cuda_place(u32 which, u32 direction) { return core_place(which, direction); }
SHIM void cuda_fence(bool device) { core_fence(device); }
SHIM void cuda_yield() { core_yield(); }
SHIM void cuda_pause() { core_pause(); }
SHIM void cuda_trap(u32 line) { core_fault(0, "__trap in line %u", line); }
SHIM u32 cuda_sync(const char *what, u32 vote, u32 line) { return core_barrier(what, line, vote, CALLER); }
SHIM void cuda_sync_warp(u32 mask, u32 line) { core_lane_barrier("__syncwarp", mask, line, CALLER); }

// ---------------------------------------------------------------- atomics

enum { ADD, MIN, MAX, EXCH, CAS, OR, AND, XOR, INC, DEC };

template <class T> static T combined(int what, T old, T value, T compare) {
  switch (what) {
    case ADD: return (T)((u64)old + (u64)value);
    case MIN: return value < old ? value : old;
    case MAX: return old < value ? value : old;
    case EXCH: return value;
    case CAS: return old == compare ? value : old;
    case OR: return old | value;
    case AND: return old & value;
    case XOR: return old ^ value;
    case INC: return old >= value ? 0 : old + 1;
    default: return old == 0 || old > value ? value : old - 1;
  }
}
template <class T> static T atomic_update(int what, T *p, T value, T compare, u64 site) {
  core_atomic(p, sizeof(T), READ | WRITE, site);
  T old = *p;
  *p = combined(what, old, value, compare);
  return old;
}
SHIM u32 cuda_atomic_u32(int what, u32 *p, u32 value, u32 compare) { return atomic_update(what, p, value, compare, CALLER); }
SHIM int cuda_atomic_s32(int what, int *p, int value) { return atomic_update(what, p, value, 0, CALLER); }
SHIM u64 cuda_atomic_u64(int what, u64 *p, u64 value, u64 compare) { return atomic_update(what, p, value, compare, CALLER); }
SHIM s64 cuda_atomic_s64(int what, s64 *p, s64 value) { return atomic_update(what, p, value, (s64)0, CALLER); }
SHIM float cuda_atomic_add_float(float *p, float value) {
  core_atomic(p, 4, READ | WRITE, CALLER);
  float old = *p;
  *p = old + value;
  return old;
}
SHIM double cuda_atomic_add_double(double *p, double value) {
  core_atomic(p, 8, READ | WRITE, CALLER);
  double old = *p;
  *p = old + value;
  return old;
}

// Of words that other processes read and write, too, in an order that they must see.
SHIM void cuda_store_word(u32 *p, u32 value) {
  core_fence(true);
  core_atomic(p, 4, WRITE, CALLER);
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
}
SHIM u32 cuda_load_word(const u32 *p) {
  core_atomic((void *)p, 4, READ, CALLER);
  const u32 value = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  core_fence(true);
  return value;
}

// ---------------------------------------------------------------- lanes

struct Shuffle {
  u64 value, result;
  int how, by, width;
};
static void shuffle(void **theirs, u32 mask, u64 site) {
  for (int lane = 0; lane < LANES; lane++) {
    if (!(mask >> lane & 1)) continue;
    Shuffle *s = (Shuffle *)theirs[lane];
    // segments of `width` lanes, which is a power of two; lanes out of a segment are not read
    int start = lane & -s->width, from;
    switch (s->how) {
      case 0: from = start + (s->by & (s->width - 1)); break;
      case 1: from = lane - s->by < start ? lane : lane - s->by; break;
      case 2: from = lane + s->by >= start + s->width ? lane : lane + s->by; break;
      default: from = (lane ^ s->by) >= start + s->width ? lane : lane ^ s->by; break;
    }
    if (from < 0 || from >= LANES || !(mask >> from & 1))
      core_fault(site, "a shuffle of lanes %08x: lane %d reads lane %d, which does not take part", mask, lane, from);
    s->result = ((Shuffle *)theirs[from])->value;
  }
}
SHIM u64 cuda_shuffle(int how, u32 mask, u64 value, int by, int width, u32 line) {
  static const char *const names[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync"};
  if (width < 1 || width > 32 || width & (width - 1))
    core_fault(CALLER, "%s needs a width of 1, 2, 4, 8, 16 or 32, got %d", names[how], width);
  Shuffle mine = {value, 0, how, by, width};
  core_together(names[how], mask, line, false, &mine, shuffle, CALLER);
  return mine.result;
}

struct Exchange {
  u64 value, result;
  int what;
  bool is_signed;
};
static void ballot(void **theirs, u32 mask, u64) {
  u64 all = 0;
  for (int lane = 0; lane < LANES; lane++)
    if (mask >> lane & 1) all |= ((Exchange *)theirs[lane])->value << lane;
  for (int lane = 0; lane < LANES; lane++)
    if (mask >> lane & 1) ((Exchange *)theirs[lane])->result = all;
}
SHIM u32 cuda_ballot(const char *what, u32 mask, u32 vote, u32 line) {
  Exchange mine = {vote, 0, 0, false};
  core_together(what, mask, line, false, &mine, ballot, CALLER);
  return (u32)mine.result;
}
static void match(void **theirs, u32 mask, u64) {
  for (int lane = 0; lane < LANES; lane++)
    for (int other = 0; other < LANES; other++)
      if (mask >> lane & 1 && mask >> other & 1 && ((Exchange *)theirs[lane])->value == ((Exchange *)theirs[other])->value)
        ((Exchange *)theirs[lane])->result |= 1u << other;
}
SHIM u32 cuda_match(u32 mask, u64 value, u32 line) {
  Exchange mine = {value, 0, 0, false};
  core_together("__match_any_sync", mask, line, false, &mine, match, CALLER);
  return (u32)mine.result;
}
static void reduce(void **theirs, u32 mask, u64) {
  Exchange *first = (Exchange *)theirs[__builtin_ctz(mask)];
  u32 all = (u32)first->value;
  for (u32 rest = mask & (mask - 1); rest; rest &= rest - 1) {
    u32 value = (u32)((Exchange *)theirs[__builtin_ctz(rest)])->value;
    all = first->is_signed ? (u32)combined<int>(first->what, (int)all, (int)value, 0) : combined<u32>(first->what, all, value, 0);
  }
  for (u32 rest = mask; rest; rest &= rest - 1) ((Exchange *)theirs[__builtin_ctz(rest)])->result = all;
}
SHIM u32 cuda_reduce(int what, bool is_signed, u32 mask, u32 value, u32 line) {
  static const char *const names[] = {"__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "", "", "__reduce_or_sync",
                                      "__reduce_and_sync", "__reduce_xor_sync"};
  Exchange mine = {value, 0, what, is_signed};
  core_together(names[what], mask, line, false, &mine, reduce, CALLER);
  return (u32)mine.result;
}

// ---------------------------------------------------------------- conversions

static u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
static float float_of(u32 x) { return __builtin_bit_cast(float, x); }

SHIM u16 cuda_to_bf16(float x) {
  u32 b = bits_of(x);
  if ((b & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;  // as cvt.rn.bf16 does
  return (u16)((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
SHIM u16 cuda_to_f16(float x) {
  u32 b = bits_of(x), sign = b >> 16 & 0x8000, size = b & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return 0x7FFF;
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
SHIM float cuda_from_f16(u16 x) {
  u32 sign = (u32)(x & 0x8000) << 16, size = x & 0x7FFF;
  if (size < 0x400) return float_of(sign | bits_of((float)size * 5.9604644775390625e-8f));
  if (size >= 0x7C00) return float_of(sign | 0x7F800000u | (size & 0x3FF) << 13);
  return float_of(sign | ((size << 13) + 0x38000000u));
}
SHIM float cuda_exp2_flushed(float x) {
  if ((bits_of(x) & 0x7F800000u) == 0) return 1.0f;
  float power = exp2f(x);
  return power < 1.17549435e-38f ? 0.0f : power;  // NaN remains
}

// ---------------------------------------------------------------- matrices

struct Mma {
  F4 c;
  U4 a;
  u32 b0, b1;
  bool flag;
};
// Products of 16-bit numbers are exact in float32; sums are float32, k ascending. (NVIDIA does not document the order within 16.)
static void multiply_16(void **theirs, u32, u64) {
  float a[16][16], b[16][8], c[16][8];
  bool bfloat = ((Mma *)theirs[0])->flag;
  auto number = [bfloat](u32 x) { return bfloat ? float_of(x << 16) : cuda_from_f16((u16)x); };
  for (int lane = 0; lane < 32; lane++) {
    const Mma *m = (Mma *)theirs[lane];
    int g = lane / 4, t = lane % 4 * 2;
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < 4; i++) a[g + (i & 1) * 8][t + (i & 2) * 4 + half] = number(m->a[i] >> 16 * half & 0xFFFF);
      b[t + half][g] = number(m->b0 >> 16 * half & 0xFFFF);
      b[t + 8 + half][g] = number(m->b1 >> 16 * half & 0xFFFF);
      c[g][t + half] = m->c[half], c[g + 8][t + half] = m->c[2 + half];
    }
  }
  for (int row = 0; row < 16; row++) {
    F8 sum;
    __builtin_memcpy(&sum, c[row], 32);
    for (int k = 0; k < 16; k++) {
      F8 line;
      __builtin_memcpy(&line, b[k], 32);
      sum = sum + a[row][k] * line;
    }
    __builtin_memcpy(c[row], &sum, 32);
  }
  for (int lane = 0; lane < 32; lane++) {
    Mma *m = (Mma *)theirs[lane];
    int g = lane / 4, t = lane % 4 * 2;
    m->c = (F4){c[g][t], c[g][t + 1], c[g + 8][t], c[g + 8][t + 1]};
  }
}
SHIM F4 cuda_mma_16(bool bfloat, F4 c, U4 a, u32 b0, u32 b1, u32 line) {
  Mma mine = {c, a, b0, b1, bfloat};
  core_together(bfloat ? "mma_bf16" : "mma_f16", 0xFFFFFFFFu, line, true, &mine, multiply_16, CALLER);
  return mine.c;
}

struct Mma8 {
  S4 c;
  U4 a;
  u32 b0, b1;
  bool flag;
};
static void multiply_8(void **theirs, u32, u64) {
  int a[16][32], b[32][8], c[16][8];
  bool unsigned_a = ((Mma8 *)theirs[0])->flag;
  for (int lane = 0; lane < 32; lane++) {
    const Mma8 *m = (Mma8 *)theirs[lane];
    int g = lane / 4, t = lane % 4;
    for (int j = 0; j < 4; j++) {
      for (int i = 0; i < 4; i++) {
        u8 byte = (u8)(m->a[i] >> 8 * j);
        a[g + (i & 1) * 8][4 * t + (i & 2) * 8 + j] = unsigned_a ? byte : (signed char)byte;
      }
      b[4 * t + j][g] = (signed char)(m->b0 >> 8 * j);
      b[4 * t + 16 + j][g] = (signed char)(m->b1 >> 8 * j);
    }
    for (int i = 0; i < 4; i++) c[g + (i & 2) * 4][2 * t + (i & 1)] = m->c[i];
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 32; k++)
      for (int column = 0; column < 8; column++) c[row][column] = (int)((u32)c[row][column] + (u32)(a[row][k] * b[k][column]));
  for (int lane = 0; lane < 32; lane++) {
    Mma8 *m = (Mma8 *)theirs[lane];
    int g = lane / 4, t = lane % 4 * 2;
    m->c = (S4){c[g][t], c[g][t + 1], c[g + 8][t], c[g + 8][t + 1]};
  }
}
SHIM S4 cuda_mma_8(bool unsigned_a, S4 c, U4 a, u32 b0, u32 b1, u32 line) {
  Mma8 mine = {c, a, b0, b1, unsigned_a};
  core_together(unsigned_a ? "mma_u8s8" : "mma_s8", 0xFFFFFFFFu, line, true, &mine, multiply_8, CALLER);
  return mine.c;
}

struct Rows {
  Thread *thread;
  const u8 *row;
  u32 r[4];
  bool transposed;
};
static void load_rows(void **theirs, u32, u64 site) {
  for (int m = 0; m < 4; m++)
    for (int row = 0; row < 8; row++) {
      const u8 *place = ((Rows *)theirs[8 * m + row])->row;
      core_expect(place, 16, 16, true, "load_matrices", site);
      for (int word = 0; word < 4; word++) {
        // the read is attributed to the lane that gets the word (transposed, two lanes get half of it each: to the lane of the same number)
        Rows *to = (Rows *)theirs[4 * row + word];
        core_access(to->thread, place + 4 * word, 4, READ, site);
        u32 value;
        __builtin_memcpy(&value, place + 4 * word, 4);
        if (!to->transposed) {
          to->r[m] = value;
          continue;
        }
        for (int half = 0; half < 2; half++) {  // the number in (row, column) goes to lane 4 column + row / 2
          int column = 2 * word + half;
          u16 *into = (u16 *)&((Rows *)theirs[4 * column + row / 2])->r[m];
          into[row % 2] = (u16)(value >> 16 * half);
        }
      }
    }
}
SHIM U4 cuda_load_matrices(bool transposed, const void *row, u32 line) {
  Rows mine = {core_current(), (const u8 *)row, {0, 0, 0, 0}, transposed};
  core_together(transposed ? "load_matrices_transposed" : "load_matrices", 0xFFFFFFFFu, line, true, &mine, load_rows, CALLER);
  return (U4){mine.r[0], mine.r[1], mine.r[2], mine.r[3]};
}

// ---------------------------------------------------------------- copies

SHIM void cuda_copy(void *shared, const void *global) {
  if (global) core_expect(global, 16, 16, false, "copy_16's source", CALLER);
  core_copy(shared, global, 16, CALLER);
}
SHIM void cuda_copy_commit() { core_copy_commit(); }
SHIM void cuda_await_previous() { core_await_previous(); }
SHIM void cuda_copy_wait(u32 groups_left) { core_copy_wait(groups_left, CALLER); }
SHIM void cuda_expect(const void *p, u32 size, bool shared, const char *what) { core_expect(p, size, size, shared, what, CALLER); }
