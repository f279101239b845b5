// CUDA C for the emulator: what nvcc provides without any header, implemented with core.h. It is included before every kernel.
//
// Intrinsics of several lanes are functions of cuda.cpp that take the source line; test_intrinsics.py compares all with numpy. Not modelled: __activemask, texture and surface memory, printf, clocks, cooperative groups.
#pragma once
#pragma clang diagnostic ignored "-Wduplicate-decl-specifier"

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __constant__ const
#ifdef __APPLE__
#define __shared__ static __attribute__((used, section("__DATA,gpu_shared")))
#else
#define __shared__ static __attribute__((used, section("gpu_shared")))
#endif

#define EMULATED extern "C" __attribute__((visibility("hidden")))
#define EMULATED_PLAIN static inline __attribute__((always_inline, unused))
#define EMULATED_LINE unsigned line = __builtin_LINE()

// --- vectors

// Copying is spelled out: the compiler checks the alignment of what a written-out constructor reads, but not of what it copies itself.
#define EMULATED_VECTORS(type, name, size)                                                                      \
  struct name##1 {                                                                                              \
    type x;                                                                                                     \
  };                                                                                                            \
  struct name##3 {                                                                                              \
    type x, y, z;                                                                                               \
  };                                                                                                            \
  struct __attribute__((aligned(2 * size))) name##2 {                                                           \
    type x, y;                                                                                                  \
    name##2() = default;                                                                                        \
    constexpr name##2(type x, type y) : x(x), y(y) {}                                                           \
    constexpr name##2(const name##2 &from) : x(from.x), y(from.y) {}                                            \
    name##2 &operator=(const name##2 &) = default;                                                              \
  };                                                                                                            \
  struct __attribute__((aligned(4 * size > 16 ? 16 : 4 * size))) name##4 {                                      \
    type x, y, z, w;                                                                                            \
    name##4() = default;                                                                                        \
    constexpr name##4(type x, type y, type z, type w) : x(x), y(y), z(z), w(w) {}                               \
    constexpr name##4(const name##4 &from) : x(from.x), y(from.y), z(from.z), w(from.w) {}                      \
    name##4 &operator=(const name##4 &) = default;                                                              \
  };                                                                                                            \
  EMULATED_PLAIN name##1 make_##name##1(type x) { return {x}; }                                                 \
  EMULATED_PLAIN name##2 make_##name##2(type x, type y) { return {x, y}; }                                      \
  EMULATED_PLAIN name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                           \
  EMULATED_PLAIN name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATED_VECTORS(signed char, char, 1)
EMULATED_VECTORS(unsigned char, uchar, 1)
EMULATED_VECTORS(short, short, 2)
EMULATED_VECTORS(unsigned short, ushort, 2)
EMULATED_VECTORS(int, int, 4)
EMULATED_VECTORS(unsigned int, uint, 4)
EMULATED_VECTORS(long, long, 8)
EMULATED_VECTORS(unsigned long, ulong, 8)
EMULATED_VECTORS(long long, longlong, 8)
EMULATED_VECTORS(unsigned long long, ulonglong, 8)
EMULATED_VECTORS(float, float, 4)
EMULATED_VECTORS(double, double, 8)
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// --- built-in variables. Const: they do not change within one call of the kernel.

EMULATED unsigned cuda_place(unsigned which, unsigned direction) __attribute__((const));
EMULATED_PLAIN uint3 emulated_places(unsigned which) { return {cuda_place(which, 0), cuda_place(which, 1), cuda_place(which, 2)}; }
#define threadIdx (emulated_places(0))
#define blockIdx (emulated_places(1))
#define blockDim (emulated_places(2))
#define gridDim (emulated_places(3))
static const int warpSize = 32;

// --- bits

template <class T, class F> EMULATED_PLAIN T emulated_bits(F from) {
  static_assert(sizeof(T) == sizeof(F), "");
  return __builtin_bit_cast(T, from);
}
EMULATED_PLAIN unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
EMULATED_PLAIN int __float_as_int(float x) { return emulated_bits<int>(x); }
EMULATED_PLAIN float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
EMULATED_PLAIN float __int_as_float(int x) { return emulated_bits<float>(x); }
EMULATED_PLAIN double __longlong_as_double(long long x) { return emulated_bits<double>(x); }
EMULATED_PLAIN long long __double_as_longlong(double x) { return emulated_bits<long long>(x); }
EMULATED_PLAIN int __popc(unsigned x) { return __builtin_popcount(x); }
EMULATED_PLAIN int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMULATED_PLAIN int __clz(int x) { return x ? __builtin_clz(x) : 32; }
EMULATED_PLAIN int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
EMULATED_PLAIN int __ffs(int x) { return __builtin_ffs(x); }
EMULATED_PLAIN int __ffsll(long long x) { return __builtin_ffsll(x); }
EMULATED_PLAIN unsigned __brev(unsigned x) { return __builtin_bitreverse32(x); }
EMULATED_PLAIN unsigned long long __brevll(unsigned long long x) { return __builtin_bitreverse64(x); }
EMULATED_PLAIN unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    unsigned pick = select >> 4 * i & 15, byte = both >> 8 * (pick & 7) & 255;
    out |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}
EMULATED_PLAIN unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return (unsigned)((((unsigned long long)high << 32 | low) << (by & 31)) >> 32);
}
EMULATED_PLAIN unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (by & 31));
}
EMULATED_PLAIN unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) {
  return by >= 32 ? low : __funnelshift_l(low, high, by);
}
EMULATED_PLAIN unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) {
  return by >= 32 ? high : __funnelshift_r(low, high, by);
}
EMULATED_PLAIN int __mulhi(int x, int y) { return (int)(((long long)x * y) >> 32); }
EMULATED_PLAIN unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)(((unsigned long long)x * y) >> 32); }
EMULATED_PLAIN unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned long long)(((unsigned __int128)x * y) >> 64);
}
EMULATED_PLAIN int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
  return c;
}
EMULATED_PLAIN unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
}
EMULATED_PLAIN int __dp2a_lo(int a, int b, int c) { return c + (short)a * (signed char)b + (a >> 16) * (signed char)(b >> 8); }
EMULATED_PLAIN unsigned __vabs4(unsigned a) {
  unsigned out = 0;
  for (int i = 0; i < 32; i += 8) {
    int x = (signed char)(a >> i);
    out |= (unsigned)(unsigned char)(x < 0 ? -x : x) << i;
  }
  return out;
}
EMULATED_PLAIN unsigned __vadd4(unsigned a, unsigned b) { return ((a & 0x7F7F7F7Fu) + (b & 0x7F7F7F7Fu)) ^ ((a ^ b) & 0x80808080u); }
EMULATED_PLAIN unsigned __vsub4(unsigned a, unsigned b) { return ((a | 0x80808080u) - (b & 0x7F7F7F7Fu)) ^ ((a ^ ~b) & 0x80808080u); }

// --- arithmetic. What a GPU only approximates (exp2f, rsqrtf, __expf, ...) is nearly exact here.

#define EMULATED_UNARY(name) \
  extern "C" double name(double) noexcept; \
  extern "C" float name##f(float) noexcept; \
  EMULATED_PLAIN float name(float x) { return name##f(x); }
EMULATED_UNARY(sqrt)
EMULATED_UNARY(exp)
EMULATED_UNARY(exp2)
EMULATED_UNARY(expm1)
EMULATED_UNARY(log)
EMULATED_UNARY(log2)
EMULATED_UNARY(log10)
EMULATED_UNARY(log1p)
EMULATED_UNARY(sin)
EMULATED_UNARY(cos)
EMULATED_UNARY(tan)
EMULATED_UNARY(tanh)
EMULATED_UNARY(atan)
EMULATED_UNARY(erf)
EMULATED_UNARY(floor)
EMULATED_UNARY(ceil)
EMULATED_UNARY(trunc)
EMULATED_UNARY(rint)
EMULATED_UNARY(round)
EMULATED_UNARY(fabs)
#undef EMULATED_UNARY
#define EMULATED_BINARY(name) \
  extern "C" double name(double, double) noexcept; \
  extern "C" float name##f(float, float) noexcept; \
  EMULATED_PLAIN float name(float x, float y) { return name##f(x, y); }
EMULATED_BINARY(pow)
EMULATED_BINARY(fmod)
EMULATED_BINARY(fmax)
EMULATED_BINARY(fmin)
EMULATED_BINARY(copysign)
#undef EMULATED_BINARY
extern "C" float ldexpf(float, int) noexcept;
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
EMULATED_PLAIN float fma(float x, float y, float z) { return fmaf(x, y, z); }
extern "C" int abs(int) noexcept;
EMULATED_PLAIN float rsqrtf(float x) { return 1.0f / sqrtf(x); }
EMULATED_PLAIN float rsqrt(float x) { return 1.0f / sqrtf(x); }
EMULATED_PLAIN double rsqrt(double x) { return 1.0 / sqrt(x); }
EMULATED_PLAIN float nearbyintf(float x) { return rintf(x); }
EMULATED_PLAIN float __expf(float x) { return expf(x); }
EMULATED_PLAIN float __exp2f(float x) { return exp2f(x); }
EMULATED_PLAIN float __logf(float x) { return logf(x); }
EMULATED_PLAIN float __log2f(float x) { return log2f(x); }
EMULATED_PLAIN float __sinf(float x) { return sinf(x); }
EMULATED_PLAIN float __cosf(float x) { return cosf(x); }
EMULATED_PLAIN void sincosf(float x, float *s, float *c) { *s = sinf(x), *c = cosf(x); }
EMULATED_PLAIN void __sincosf(float x, float *s, float *c) { *s = sinf(x), *c = cosf(x); }
EMULATED_PLAIN float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
EMULATED_PLAIN float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
EMULATED_PLAIN float __fadd_rn(float x, float y) { return x + y; }
EMULATED_PLAIN float __fsub_rn(float x, float y) { return x - y; }
EMULATED_PLAIN float __fmul_rn(float x, float y) { return x * y; }
EMULATED_PLAIN float __fdiv_rn(float x, float y) { return x / y; }
EMULATED_PLAIN float __fdividef(float x, float y) { return x / y; }
EMULATED_PLAIN float __frcp_rn(float x) { return 1.0f / x; }
EMULATED_PLAIN float __fsqrt_rn(float x) { return sqrtf(x); }
EMULATED_PLAIN float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
// Numbers out of range become the nearest representable one, NaN 0, as in PTX.
template <class T> EMULATED_PLAIN T emulated_whole(double x, double low, double high) {
  return x != x ? (T)0 : x <= low ? (T)low : x >= high ? (T)high : (T)x;
}
EMULATED_PLAIN int __float2int_rn(float x) { return emulated_whole<int>(rint((double)x), -2147483648.0, 2147483647.0); }
EMULATED_PLAIN int __float2int_rz(float x) { return emulated_whole<int>(trunc((double)x), -2147483648.0, 2147483647.0); }
EMULATED_PLAIN int __float2int_rd(float x) { return emulated_whole<int>(floor((double)x), -2147483648.0, 2147483647.0); }
EMULATED_PLAIN int __float2int_ru(float x) { return emulated_whole<int>(ceil((double)x), -2147483648.0, 2147483647.0); }
EMULATED_PLAIN unsigned __float2uint_rn(float x) { return emulated_whole<unsigned>(rint((double)x), 0.0, 4294967295.0); }
EMULATED_PLAIN unsigned __float2uint_rz(float x) { return emulated_whole<unsigned>(trunc((double)x), 0.0, 4294967295.0); }
EMULATED_PLAIN float __int2float_rn(int x) { return (float)x; }
EMULATED_PLAIN float __uint2float_rn(unsigned x) { return (float)x; }
EMULATED_PLAIN float __ll2float_rn(long long x) { return (float)x; }
EMULATED_PLAIN float __ull2float_rn(unsigned long long x) { return (float)x; }
#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#ifndef NAN
#define NAN __builtin_nanf("")
#endif
EMULATED_PLAIN bool isnan(float x) { return x != x; }
EMULATED_PLAIN bool isnan(double x) { return x != x; }
EMULATED_PLAIN bool isinf(float x) { return __builtin_isinf(x); }
EMULATED_PLAIN bool isinf(double x) { return __builtin_isinf(x); }
EMULATED_PLAIN bool isfinite(float x) { return __builtin_isfinite(x); }
EMULATED_PLAIN bool signbit(float x) { return __builtin_signbit(x); }
#define EMULATED_EXTREMES(type) \
  EMULATED_PLAIN type min(type x, type y) { return y < x ? y : x; } \
  EMULATED_PLAIN type max(type x, type y) { return x < y ? y : x; }
EMULATED_EXTREMES(int)
EMULATED_EXTREMES(unsigned)
EMULATED_EXTREMES(long)
EMULATED_EXTREMES(unsigned long)
EMULATED_EXTREMES(long long)
EMULATED_EXTREMES(unsigned long long)
#undef EMULATED_EXTREMES
EMULATED_PLAIN unsigned min(int x, unsigned y) { return min((unsigned)x, y); }
EMULATED_PLAIN unsigned min(unsigned x, int y) { return min(x, (unsigned)y); }
EMULATED_PLAIN unsigned max(int x, unsigned y) { return max((unsigned)x, y); }
EMULATED_PLAIN unsigned max(unsigned x, int y) { return max(x, (unsigned)y); }
EMULATED_PLAIN float min(float x, float y) { return fminf(x, y); }
EMULATED_PLAIN float max(float x, float y) { return fmaxf(x, y); }
EMULATED_PLAIN double min(double x, double y) { return fmin(x, y); }
EMULATED_PLAIN double max(double x, double y) { return fmax(x, y); }

// --- memory

template <class T> EMULATED_PLAIN T __ldg(const T *p) { return *p; }
template <class T> EMULATED_PLAIN T __ldcg(const T *p) { return *p; }
template <class T> EMULATED_PLAIN T __ldca(const T *p) { return *p; }
template <class T> EMULATED_PLAIN T __ldcs(const T *p) { return *p; }
template <class T> EMULATED_PLAIN T __ldlu(const T *p) { return *p; }
template <class T> EMULATED_PLAIN T __ldcv(const T *p) { return *p; }
template <class T> EMULATED_PLAIN void __stcg(T *p, T value) { *p = value; }
template <class T> EMULATED_PLAIN void __stcs(T *p, T value) { *p = value; }
template <class T> EMULATED_PLAIN void __stwb(T *p, T value) { *p = value; }
template <class T> EMULATED_PLAIN void __stwt(T *p, T value) { *p = value; }
EMULATED void cuda_fence(bool device);
EMULATED_PLAIN void __threadfence() { cuda_fence(true); }
EMULATED_PLAIN void __threadfence_system() { cuda_fence(true); }
EMULATED_PLAIN void __threadfence_block() { cuda_fence(false); }
EMULATED void cuda_yield();
EMULATED_PLAIN void __nanosleep(unsigned) { cuda_yield(); }
EMULATED void cuda_pause();
EMULATED void cuda_store_word(unsigned *p, unsigned value);
EMULATED unsigned cuda_load_word(const unsigned *p);
EMULATED void cuda_trap(unsigned line) __attribute__((noreturn));
EMULATED_PLAIN void __trap(EMULATED_LINE) { cuda_trap(line); }

enum EmulatedAtomic { EMULATED_ADD, EMULATED_MIN, EMULATED_MAX, EMULATED_EXCH, EMULATED_CAS, EMULATED_OR, EMULATED_AND, EMULATED_XOR,
                      EMULATED_INC, EMULATED_DEC };
EMULATED unsigned cuda_atomic_u32(int what, unsigned *p, unsigned value, unsigned compare);
EMULATED int cuda_atomic_s32(int what, int *p, int value);
EMULATED unsigned long long cuda_atomic_u64(int what, unsigned long long *p, unsigned long long value, unsigned long long compare);
EMULATED long long cuda_atomic_s64(int what, long long *p, long long value);
EMULATED float cuda_atomic_add_float(float *p, float value);
EMULATED double cuda_atomic_add_double(double *p, double value);
#define EMULATED_ATOMIC(name, what) \
  EMULATED_PLAIN unsigned name(unsigned *p, unsigned value) { return cuda_atomic_u32(what, p, value, 0); } \
  EMULATED_PLAIN int name(int *p, int value) { return cuda_atomic_s32(what, p, value); } \
  EMULATED_PLAIN unsigned long long name(unsigned long long *p, unsigned long long value) { return cuda_atomic_u64(what, p, value, 0); }
#define EMULATED_ATOMICS(scope) \
  EMULATED_ATOMIC(atomicAdd##scope, EMULATED_ADD) \
  EMULATED_ATOMIC(atomicMin##scope, EMULATED_MIN) \
  EMULATED_ATOMIC(atomicMax##scope, EMULATED_MAX) \
  EMULATED_ATOMIC(atomicExch##scope, EMULATED_EXCH) \
  EMULATED_ATOMIC(atomicOr##scope, EMULATED_OR) \
  EMULATED_ATOMIC(atomicAnd##scope, EMULATED_AND) \
  EMULATED_ATOMIC(atomicXor##scope, EMULATED_XOR) \
  EMULATED_PLAIN long long atomicMin##scope(long long *p, long long value) { return cuda_atomic_s64(EMULATED_MIN, p, value); } \
  EMULATED_PLAIN long long atomicMax##scope(long long *p, long long value) { return cuda_atomic_s64(EMULATED_MAX, p, value); } \
  EMULATED_PLAIN unsigned atomicInc##scope(unsigned *p, unsigned top) { return cuda_atomic_u32(EMULATED_INC, p, top, 0); } \
  EMULATED_PLAIN unsigned atomicDec##scope(unsigned *p, unsigned top) { return cuda_atomic_u32(EMULATED_DEC, p, top, 0); } \
  EMULATED_PLAIN float atomicAdd##scope(float *p, float value) { return cuda_atomic_add_float(p, value); } \
  EMULATED_PLAIN double atomicAdd##scope(double *p, double value) { return cuda_atomic_add_double(p, value); } \
  EMULATED_PLAIN float atomicExch##scope(float *p, float value) { \
    return emulated_bits<float>(cuda_atomic_u32(EMULATED_EXCH, (unsigned *)p, emulated_bits<unsigned>(value), 0)); } \
  EMULATED_PLAIN unsigned atomicCAS##scope(unsigned *p, unsigned compare, unsigned value) { \
    return cuda_atomic_u32(EMULATED_CAS, p, value, compare); } \
  EMULATED_PLAIN int atomicCAS##scope(int *p, int compare, int value) { \
    return (int)cuda_atomic_u32(EMULATED_CAS, (unsigned *)p, (unsigned)value, (unsigned)compare); } \
  EMULATED_PLAIN unsigned long long atomicCAS##scope(unsigned long long *p, unsigned long long compare, unsigned long long value) { \
    return cuda_atomic_u64(EMULATED_CAS, p, value, compare); }
EMULATED_ATOMICS()
EMULATED_ATOMICS(_block)
EMULATED_ATOMICS(_system)
EMULATED_PLAIN unsigned atomicSub(unsigned *p, unsigned value) { return cuda_atomic_u32(EMULATED_ADD, p, 0u - value, 0); }
EMULATED_PLAIN int atomicSub(int *p, int value) { return cuda_atomic_s32(EMULATED_ADD, p, (int)(0u - (unsigned)value)); }

// --- collectives

EMULATED unsigned cuda_sync(const char *what, unsigned vote, unsigned line);
EMULATED_PLAIN void __syncthreads(EMULATED_LINE) { cuda_sync("__syncthreads", 0, line); }
EMULATED_PLAIN int __syncthreads_count(int vote, EMULATED_LINE) { return (int)cuda_sync("__syncthreads_count", vote != 0, line); }
EMULATED_PLAIN int __syncthreads_or(int vote, EMULATED_LINE) { return cuda_sync("__syncthreads_or", vote != 0, line) != 0; }
EMULATED_PLAIN int __syncthreads_and(int vote, EMULATED_LINE) { return cuda_sync("__syncthreads_and", vote == 0, line) == 0; }
EMULATED void cuda_sync_warp(unsigned mask, unsigned line);
EMULATED_PLAIN void __syncwarp(unsigned mask = 0xFFFFFFFFu, EMULATED_LINE) { cuda_sync_warp(mask, line); }

EMULATED unsigned long long cuda_shuffle(int how, unsigned mask, unsigned long long value, int by, int width, unsigned line);
template <class T> struct EmulatedWord { typedef unsigned type; };
template <> struct EmulatedWord<double> { typedef unsigned long long type; };
template <> struct EmulatedWord<long> { typedef unsigned long long type; };
template <> struct EmulatedWord<unsigned long> { typedef unsigned long long type; };
template <> struct EmulatedWord<long long> { typedef unsigned long long type; };
template <> struct EmulatedWord<unsigned long long> { typedef unsigned long long type; };
template <> struct EmulatedWord<unsigned short> { typedef unsigned short type; };
template <> struct EmulatedWord<short> { typedef unsigned short type; };
template <class T> EMULATED_PLAIN T emulated_shuffle(int how, unsigned mask, T value, int by, int width, unsigned line) {
  typedef typename EmulatedWord<T>::type Word;
  return emulated_bits<T>((Word)cuda_shuffle(how, mask, emulated_bits<Word>(value), by, width, line));
}
template <class T> EMULATED_PLAIN T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMULATED_LINE) {
  return emulated_shuffle(0, mask, value, lane, width, line);
}
template <class T> EMULATED_PLAIN T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATED_LINE) {
  return emulated_shuffle(1, mask, value, (int)by, width, line);
}
template <class T> EMULATED_PLAIN T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATED_LINE) {
  return emulated_shuffle(2, mask, value, (int)by, width, line);
}
template <class T> EMULATED_PLAIN T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32, EMULATED_LINE) {
  return emulated_shuffle(3, mask, value, by, width, line);
}
EMULATED unsigned cuda_ballot(const char *what, unsigned mask, unsigned vote, unsigned line);
EMULATED_PLAIN unsigned __ballot_sync(unsigned mask, int vote, EMULATED_LINE) {
  return cuda_ballot("__ballot_sync", mask, vote != 0, line);
}
EMULATED_PLAIN int __any_sync(unsigned mask, int vote, EMULATED_LINE) { return cuda_ballot("__any_sync", mask, vote != 0, line) != 0; }
EMULATED_PLAIN int __all_sync(unsigned mask, int vote, EMULATED_LINE) { return cuda_ballot("__all_sync", mask, vote == 0, line) == 0; }
EMULATED unsigned cuda_match(unsigned mask, unsigned long long value, unsigned line);
template <class T> EMULATED_PLAIN unsigned __match_any_sync(unsigned mask, T value, EMULATED_LINE) {
  return cuda_match(mask, emulated_bits<typename EmulatedWord<T>::type>(value), line);
}
EMULATED unsigned cuda_reduce(int what, bool is_signed, unsigned mask, unsigned value, unsigned line);
#define EMULATED_REDUCE(name, what) \
  EMULATED_PLAIN unsigned name(unsigned mask, unsigned value, EMULATED_LINE) { return cuda_reduce(what, false, mask, value, line); } \
  EMULATED_PLAIN int name(unsigned mask, int value, EMULATED_LINE) { return (int)cuda_reduce(what, true, mask, (unsigned)value, line); }
EMULATED_REDUCE(__reduce_add_sync, EMULATED_ADD)
EMULATED_REDUCE(__reduce_min_sync, EMULATED_MIN)
EMULATED_REDUCE(__reduce_max_sync, EMULATED_MAX)
EMULATED_REDUCE(__reduce_and_sync, EMULATED_AND)
EMULATED_REDUCE(__reduce_or_sync, EMULATED_OR)
EMULATED_REDUCE(__reduce_xor_sync, EMULATED_XOR)
#undef EMULATED_REDUCE

// --- what include/gpu.cuh needs

typedef unsigned EmulatedU4 __attribute__((ext_vector_type(4)));
typedef int EmulatedS4 __attribute__((ext_vector_type(4)));
typedef float EmulatedF4 __attribute__((ext_vector_type(4)));
EMULATED EmulatedF4 cuda_mma_16(bool bfloat, EmulatedF4 c, EmulatedU4 a, unsigned b0, unsigned b1, unsigned line);
EMULATED EmulatedS4 cuda_mma_8(bool unsigned_a, EmulatedS4 c, EmulatedU4 a, unsigned b0, unsigned b1, unsigned line);
EMULATED EmulatedU4 cuda_load_matrices(bool transposed, const void *row, unsigned line);
EMULATED void cuda_copy(void *shared, const void *global);  // global 0: zeros
EMULATED void cuda_copy_commit();
EMULATED void cuda_await_previous();
EMULATED void cuda_copy_wait(unsigned groups_left);
EMULATED void cuda_expect(const void *p, unsigned size, bool shared, const char *what);
EMULATED unsigned short cuda_to_f16(float x);
EMULATED unsigned short cuda_to_bf16(float x);
EMULATED float cuda_from_f16(unsigned short x);
EMULATED float cuda_exp2_flushed(float x);
