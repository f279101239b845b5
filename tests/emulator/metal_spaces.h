// Metal's declarations for a compiler that only parses (metal_spaces.py): clang's C++ for OpenCL, which has Metal's address spaces under
// other names. Nothing here is executed: metal.h is for that. Numbers convert more freely than in Metal.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
#define thread __private
#define local spaces_local
#define global spaces_global
#define private spaces_private
#define generic spaces_generic

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;

#define SPACES_VECTORS(type)                                                    \
  typedef type type##2 __attribute__((ext_vector_type(2)));                     \
  typedef type type##3 __attribute__((ext_vector_type(3)));                     \
  typedef type type##4 __attribute__((ext_vector_type(4)));                     \
  typedef type##2 packed_##type##2 __attribute__((aligned(sizeof(type))));      \
  typedef type##4 packed_##type##4 __attribute__((aligned(sizeof(type))));      \
  struct packed_##type##3 {                                                     \
    type x, y, z;                                                               \
  };
SPACES_VECTORS(char)
SPACES_VECTORS(uchar)
SPACES_VECTORS(short)
SPACES_VECTORS(ushort)
SPACES_VECTORS(int)
SPACES_VECTORS(uint)
SPACES_VECTORS(long)
SPACES_VECTORS(ulong)
SPACES_VECTORS(half)
SPACES_VECTORS(float)
typedef int bool2 __attribute__((ext_vector_type(2)));
typedef int bool3 __attribute__((ext_vector_type(3)));
typedef int bool4 __attribute__((ext_vector_type(4)));

#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f

// metal_spaces.py replaces float4(...) by a call of this.
template <class V, class... T> V spaces_make(T...);
template <class T, class F> T as_type(F);

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class T, class U> struct is_same { static constexpr bool value = false; };
template <class T> struct is_same<T, T> { static constexpr bool value = true; };
template <bool, class T, class U> struct conditional { typedef T type; };
template <class T, class U> struct conditional<false, T, U> { typedef U type; };
template <bool b, class T, class U> using conditional_t = typename conditional<b, T, U>::type;
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <class T> struct numeric_limits {
  static constexpr T max();
  static constexpr T lowest();
  static constexpr T infinity();
};

#define SPACES_UNARY(name) \
  template <class T> T name(T);
#define SPACES_BINARY(name) \
  template <class T, class U> T name(T, U);
#define SPACES_TERNARY(name) \
  template <class T, class U, class V> T name(T, U, V);
#define SPACES_MATHS                                                                                                            \
  SPACES_UNARY(sqrt) SPACES_UNARY(log) SPACES_UNARY(log2) SPACES_UNARY(log10) SPACES_UNARY(sin) SPACES_UNARY(cos) SPACES_UNARY(tan) \
  SPACES_UNARY(tanh) SPACES_UNARY(floor) SPACES_UNARY(ceil) SPACES_UNARY(trunc) SPACES_UNARY(rint) SPACES_UNARY(round)          \
  SPACES_UNARY(fabs) SPACES_UNARY(exp) SPACES_UNARY(exp2) SPACES_UNARY(exp10) SPACES_UNARY(rsqrt) SPACES_UNARY(saturate)        \
  SPACES_UNARY(sign) SPACES_UNARY(abs) SPACES_BINARY(min) SPACES_BINARY(max) SPACES_BINARY(fmin) SPACES_BINARY(fmax)            \
  SPACES_BINARY(pow) SPACES_BINARY(powr) SPACES_BINARY(fmod) SPACES_BINARY(divide) SPACES_TERNARY(clamp)
SPACES_MATHS
namespace fast {
SPACES_MATHS
}
namespace precise {
SPACES_MATHS
}
SPACES_TERNARY(fma)
SPACES_TERNARY(mix)
SPACES_TERNARY(select)
SPACES_TERNARY(min3)
SPACES_TERNARY(max3)
SPACES_TERNARY(extract_bits)
SPACES_BINARY(copysign)
SPACES_BINARY(ldexp)
SPACES_BINARY(mulhi)
SPACES_BINARY(mul24)
SPACES_BINARY(rotate)
SPACES_TERNARY(mad24)
SPACES_UNARY(popcount)
SPACES_UNARY(clz)
SPACES_UNARY(ctz)
SPACES_UNARY(reverse_bits)
template <class T> uint insert_bits(T, T, uint, uint);
template <class T> auto dot(T x, T y) -> decltype(x[0] + y[0]);
template <class T> bool all(T);
template <class T> bool any(T);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
bool signbit(float);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags x, mem_flags y) { return (mem_flags)((int)x | (int)y); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define SPACES_SHUFFLE(name) \
  template <class T> T name(T, ushort);
SPACES_SHUFFLE(simd_shuffle)
SPACES_SHUFFLE(simd_shuffle_xor)
SPACES_SHUFFLE(simd_shuffle_up)
SPACES_SHUFFLE(simd_shuffle_down)
SPACES_SHUFFLE(simd_shuffle_rotate_up)
SPACES_SHUFFLE(simd_shuffle_rotate_down)
SPACES_SHUFFLE(simd_broadcast)
SPACES_SHUFFLE(quad_broadcast)
SPACES_SHUFFLE(quad_shuffle)
SPACES_SHUFFLE(quad_shuffle_xor)
template <class T> T simd_shuffle_and_fill_up(T, T, ushort);
template <class T> T simd_shuffle_and_fill_down(T, T, ushort);
SPACES_UNARY(simd_broadcast_first)
SPACES_UNARY(simd_sum)
SPACES_UNARY(simd_product)
SPACES_UNARY(simd_min)
SPACES_UNARY(simd_max)
SPACES_UNARY(simd_and)
SPACES_UNARY(simd_or)
SPACES_UNARY(simd_xor)
SPACES_UNARY(quad_sum)
SPACES_UNARY(quad_product)
SPACES_UNARY(quad_min)
SPACES_UNARY(quad_max)
SPACES_UNARY(simd_prefix_exclusive_sum)
SPACES_UNARY(simd_prefix_inclusive_sum)
SPACES_UNARY(simd_prefix_exclusive_product)
SPACES_UNARY(simd_prefix_inclusive_product)
struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
template struct atomic<int>;  // only an instantiated, plain type may be a parameter of a kernel
template struct atomic<uint>;
template struct atomic<float>;
template <class T> struct SpacesItself { typedef T type; };
#define SPACES_ATOMICS(space)                                                                                                     \
  template <class T> T atomic_load_explicit(const volatile space atomic<T> *, memory_order);                                      \
  template <class T> void atomic_store_explicit(volatile space atomic<T> *, typename SpacesItself<T>::type, memory_order);        \
  template <class T> T atomic_exchange_explicit(volatile space atomic<T> *, typename SpacesItself<T>::type, memory_order);        \
  template <class T>                                                                                                              \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T> *, thread T *, typename SpacesItself<T>::type, memory_order,  \
                                             memory_order);                                                                       \
  SPACES_ATOMIC(space, add) SPACES_ATOMIC(space, sub) SPACES_ATOMIC(space, min) SPACES_ATOMIC(space, max)                         \
  template <class T> T atomic_fetch_and_explicit(volatile space atomic<T> *, typename SpacesItself<T>::type, memory_order);       \
  template <class T> T atomic_fetch_or_explicit(volatile space atomic<T> *, typename SpacesItself<T>::type, memory_order);        \
  template <class T> T atomic_fetch_xor_explicit(volatile space atomic<T> *, typename SpacesItself<T>::type, memory_order);
#define SPACES_ATOMIC(space, name) \
  template <class T> T atomic_fetch_##name##_explicit(volatile space atomic<T> *, typename SpacesItself<T>::type, memory_order);
SPACES_ATOMICS(device)
SPACES_ATOMICS(threadgroup)

template <class T, int Columns, int Rows = Columns> struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  thread vec<T, 2> &thread_elements();
};
template <class T, int Columns, int Rows = Columns> simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T);
#define SPACES_MATRIX(space)                                                                                                      \
  template <class T>                                                                                                              \
  void simdgroup_load(thread simdgroup_matrix<T, 8> &, const space T *, ulong = 8, ulong2 = ulong2(0), bool = false);             \
  template <class T> void simdgroup_store(simdgroup_matrix<T, 8>, space T *, ulong = 8, ulong2 = ulong2(0), bool = false);
SPACES_MATRIX(device)
SPACES_MATRIX(threadgroup)
template <class D, class A, class B>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8> &, simdgroup_matrix<A, 8>, simdgroup_matrix<B, 8>, simdgroup_matrix<D, 8>);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8> &, simdgroup_matrix<A, 8>, simdgroup_matrix<B, 8>);
typedef simdgroup_matrix<float, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8> simdgroup_half8x8;
}  // namespace metal
typedef metal::atomic<int> spaces_atomic_int;
#define atomic_int spaces_atomic_int
typedef metal::atomic<uint> spaces_atomic_uint;
#define atomic_uint spaces_atomic_uint
typedef metal::atomic<float> spaces_atomic_float;
#define atomic_float spaces_atomic_float
typedef int spaces_end;  // what follows is the kernel's text
