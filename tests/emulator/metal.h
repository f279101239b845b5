// Metal's language for the emulator: what its compiler has without a header, in terms of core.h. It is included before a kernel's text;
// include/metal holds the headers that kernels include. metal.py marks variables of threadgroup memory and writes the entry.
//
// Vectors are classes here, as C++ has no constructors for extension vectors: float4(x.xy, 0.0f, 1.0f) converts and concatenates.
#pragma once

#define kernel __attribute__((unused))
#define device
#define thread
#define threadgroup
#define constant const
#ifdef __APPLE__
#define EMULATED_SHARED static __attribute__((used, section("__DATA,gpu_shared")))
#else
#define EMULATED_SHARED static __attribute__((used, section("gpu_shared")))
#endif

#define EMULATED extern "C" __attribute__((visibility("hidden")))
#define EMULATED_PLAIN inline __attribute__((always_inline, unused))
// With the column: two calls in one line are two call sites.
#define EMULATED_LINE unsigned line = __builtin_LINE() + (__builtin_COLUMN() << 20)

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef _Float16 half;
typedef __bf16 bfloat;
EMULATED_PLAIN half operator""h(long double x) { return (half)(float)x; }

namespace metal {

template <class T, int N> struct vec;
template <class V> struct EmulatedVector { enum { size = 0 }; };
template <class T, int N> struct EmulatedVector<vec<T, N>> { enum { size = N }; };
template <class T> struct EmulatedStored { typedef T type; };
template <> struct EmulatedStored<bool> { typedef unsigned char type; };
template <bool> struct EmulatedIf {};
template <> struct EmulatedIf<true> { typedef int type; };

// Some components of a vector, in place. V, the vector of them, is a parameter so that its operators are found.
template <class V, class T, class R, int... I> struct EmulatedSwizzle {
  R raw;
  EMULATED_PLAIN V value() const {
    V out;
    int at = 0;
    ((out.raw[at++] = raw[I]), ...);
    return out;
  }
  EMULATED_PLAIN operator V() const { return value(); }
  EMULATED_PLAIN EmulatedSwizzle &operator=(V from) {
    int at = 0;
    ((raw[I] = from.raw[at++]), ...);
    return *this;
  }
  EMULATED_PLAIN EmulatedSwizzle &operator=(const EmulatedSwizzle &from) { return *this = from.value(); }
  EMULATED_PLAIN EmulatedSwizzle &operator+=(V y) { return *this = value() + y; }
  EMULATED_PLAIN EmulatedSwizzle &operator-=(V y) { return *this = value() - y; }
  EMULATED_PLAIN EmulatedSwizzle &operator*=(V y) { return *this = value() * y; }
  EMULATED_PLAIN EmulatedSwizzle &operator/=(V y) { return *this = value() / y; }
};
template <class V, class T, class R, int... I> struct EmulatedVector<EmulatedSwizzle<V, T, R, I...>> { enum { size = sizeof...(I) }; };

// The components that a vector of N has, by name.
template <class T, int N, class R> union EmulatedParts;
#define EMULATED_PAIR(a, b, i, j) EmulatedSwizzle<vec<T, 2>, T, R, i, j> a##b;
#define EMULATED_PAIRS_WITH(m, a, i) m(a, x, i, 0) m(a, y, i, 1)
#define EMULATED_PAIRS_WITH_3(m, a, i) EMULATED_PAIRS_WITH(m, a, i) m(a, z, i, 2)
#define EMULATED_PAIRS_WITH_4(m, a, i) EMULATED_PAIRS_WITH_3(m, a, i) m(a, w, i, 3)
#define EMULATED_2(T, R)                                                                                         \
  R raw;                                                                                                         \
  struct { typename EmulatedStored<T>::type x, y; };                                                             \
  struct { typename EmulatedStored<T>::type r, g; };                                                             \
  EMULATED_PAIRS_WITH(EMULATED_PAIR, x, 0) EMULATED_PAIRS_WITH(EMULATED_PAIR, y, 1)
#define EMULATED_3(T, R)                                                                                         \
  R raw;                                                                                                         \
  struct { typename EmulatedStored<T>::type x, y, z; };                                                          \
  struct { typename EmulatedStored<T>::type r, g, b; };                                                          \
  EMULATED_PAIRS_WITH_3(EMULATED_PAIR, x, 0) EMULATED_PAIRS_WITH_3(EMULATED_PAIR, y, 1)                          \
  EMULATED_PAIRS_WITH_3(EMULATED_PAIR, z, 2)                                                                     \
  EmulatedSwizzle<vec<T, 3>, T, R, 0, 1, 2> xyz;                                                                            \
  EmulatedSwizzle<vec<T, 3>, T, R, 2, 1, 0> zyx;
#define EMULATED_4(T, R)                                                                                         \
  R raw;                                                                                                         \
  struct { typename EmulatedStored<T>::type x, y, z, w; };                                                       \
  struct { typename EmulatedStored<T>::type r, g, b, a; };                                                       \
  EMULATED_PAIRS_WITH_4(EMULATED_PAIR, x, 0) EMULATED_PAIRS_WITH_4(EMULATED_PAIR, y, 1)                          \
  EMULATED_PAIRS_WITH_4(EMULATED_PAIR, z, 2) EMULATED_PAIRS_WITH_4(EMULATED_PAIR, w, 3)                          \
  EmulatedSwizzle<vec<T, 3>, T, R, 0, 1, 2> xyz;                                                                            \
  EmulatedSwizzle<vec<T, 3>, T, R, 1, 2, 3> yzw;                                                                            \
  EmulatedSwizzle<vec<T, 4>, T, R, 0, 1, 2, 3> xyzw;                                                                        \
  EmulatedSwizzle<vec<T, 4>, T, R, 1, 0, 3, 2> yxwz;                                                                        \
  EmulatedSwizzle<vec<T, 4>, T, R, 2, 3, 0, 1> zwxy;                                                                        \
  EmulatedSwizzle<vec<T, 4>, T, R, 3, 2, 1, 0> wzyx;                                                                        \
  EmulatedSwizzle<vec<T, 4>, T, R, 0, 2, 1, 3> xzyw;

// What all vectors have. Copying is written out: the compiler checks the alignment of what such a constructor reads, but not of what a
// default one copies.
#define EMULATED_VECTOR(N)                                                                                       \
  template <class T> struct vec<T, N> {                                                                          \
    typedef typename EmulatedStored<T>::type S;                                                                  \
    typedef S R __attribute__((ext_vector_type(N)));                                                             \
    union { EMULATED_##N(T, R) };                                                                                \
    vec() = default;                                                                                             \
    EMULATED_PLAIN vec(const vec &from) : raw(from.raw) {}                                                       \
    EMULATED_PLAIN vec(const volatile vec &from) : raw(from.raw) {}                                              \
    EMULATED_PLAIN vec(T all) : raw((S)all) {}                                                                   \
    template <class U> EMULATED_PLAIN explicit vec(vec<U, N> from) {                                             \
      for (int i = 0; i < N; i++) raw[i] = (S)(T)from.raw[i];                                                    \
    }                                                                                                            \
    template <class V, class U, class Q, int... I, typename EmulatedIf<sizeof...(I) == N>::type = 0>             \
    EMULATED_PLAIN explicit vec(EmulatedSwizzle<V, U, Q, I...> from) : vec(from.value()) {}                      \
    template <class A, class B, class... C> EMULATED_PLAIN vec(A a, B b, C... c) {                               \
      int at = 0;                                                                                                \
      put(at, a), put(at, b), (put(at, c), ...);                                                                 \
      static_assert(count<A>() + count<B>() + (0 + ... + count<C>()) == N, "number of components");   \
    }                                                                                                            \
    template <class A> static constexpr int count() { return EmulatedVector<A>::size ? (int)EmulatedVector<A>::size : 1; } \
    template <class A> EMULATED_PLAIN void put(int &at, A a) { raw[at++] = (S)(T)a; }                            \
    template <class U, int M> EMULATED_PLAIN void put(int &at, vec<U, M> a) {                                    \
      for (int i = 0; i < M; i++) raw[at++] = (S)(T)a.raw[i];                                                    \
    }                                                                                                            \
    template <class V, class U, class Q, int... I> EMULATED_PLAIN void put(int &at, EmulatedSwizzle<V, U, Q, I...> a) { \
      put(at, a.value());                                                                                            \
    }                                                                                                            \
    EMULATED_PLAIN vec &operator=(const vec &from) {                                                             \
      raw = from.raw;                                                                                            \
      return *this;                                                                                              \
    }                                                                                                            \
    EMULATED_PLAIN S &operator[](int i) { return ((S *)this)[i]; }                                               \
    EMULATED_PLAIN const S &operator[](int i) const { return ((const S *)this)[i]; }                             \
    EMULATED_PLAIN static vec of(R raw) {                                                                        \
      vec out;                                                                                                   \
      out.raw = raw;                                                                                             \
      return out;                                                                                                \
    }                                                                                                            \
    EMULATED_OPERATORS(N)                                                                                        \
  };
#define EMULATED_OPERATOR(op)                                                                                    \
  friend EMULATED_PLAIN vec operator op(vec a, vec b) { return of(a.raw op b.raw); }                             \
  EMULATED_PLAIN vec &operator op##=(vec b) {                                                                    \
    raw = raw op b.raw;                                                                                          \
    return *this;                                                                                                \
  }
// Operators that floating-point numbers do not have are written by hand: they must not be compiled where they are not used.
#define EMULATED_WHOLE_OPERATOR(op)                                                                              \
  friend EMULATED_PLAIN vec operator op(vec a, vec b) {                                                          \
    vec out;                                                                                                     \
    for (int i = 0; i < (int)EmulatedVector<vec>::size; i++)                                                     \
      out.raw[i] = (S)EmulatedWhole<T>::of(a.raw[i]) op EmulatedWhole<T>::of(b.raw[i]);                          \
    return out;                                                                                                  \
  }                                                                                                              \
  EMULATED_PLAIN vec &operator op##=(vec b) { return *this = *this op b; }
#define EMULATED_COMPARISON(op, N)                                                                               \
  friend EMULATED_PLAIN vec<bool, N> operator op(vec a, vec b) {                                                 \
    vec<bool, N> out;                                                                                            \
    for (int i = 0; i < N; i++) out.raw[i] = a.raw[i] op b.raw[i];                                               \
    return out;                                                                                                  \
  }
#define EMULATED_OPERATORS(N)                                                                                    \
  EMULATED_OPERATOR(+) EMULATED_OPERATOR(-) EMULATED_OPERATOR(*) EMULATED_OPERATOR(/)                            \
  EMULATED_WHOLE_OPERATOR(%) EMULATED_WHOLE_OPERATOR(&) EMULATED_WHOLE_OPERATOR(|) EMULATED_WHOLE_OPERATOR(^)    \
  EMULATED_WHOLE_OPERATOR(<<) EMULATED_WHOLE_OPERATOR(>>)                                                        \
  EMULATED_COMPARISON(==, N) EMULATED_COMPARISON(!=, N) EMULATED_COMPARISON(<, N) EMULATED_COMPARISON(>, N)      \
  EMULATED_COMPARISON(<=, N) EMULATED_COMPARISON(>=, N)                                                          \
  friend EMULATED_PLAIN T dot(vec a, vec b) { return emulated_dot(a, b); }                                       \
  EMULATED_PLAIN vec operator-() const { return of(-raw); }                                                      \
  EMULATED_PLAIN vec operator+() const { return *this; }                                                         \
  EMULATED_PLAIN vec operator~() const {                                                                         \
    vec out;                                                                                                     \
    for (int i = 0; i < N; i++) out.raw[i] = (S)~EmulatedWhole<T>::of(raw[i]);                                   \
    return out;                                                                                                  \
  }                                                                                                              \
  EMULATED_PLAIN vec<bool, N> operator!() const {                                                                \
    vec<bool, N> out;                                                                                            \
    for (int i = 0; i < N; i++) out.raw[i] = !raw[i];                                                            \
    return out;                                                                                                  \
  }
template <class T> struct EmulatedWhole {
  EMULATED_PLAIN static T of(T x) { return x; }
};
// No such operators: the name is missing.
template <> struct EmulatedWhole<float> {};
template <> struct EmulatedWhole<half> {};
template <> struct EmulatedWhole<bfloat> {};
EMULATED_VECTOR(2)
EMULATED_VECTOR(3)
EMULATED_VECTOR(4)

// Components one after another, aligned like one of them.
template <class T, int N> struct packed_vec;
#define EMULATED_PACKED(N, ...)                                                                                  \
  template <class T> struct packed_vec<T, N> {                                                                   \
    T __VA_ARGS__;                                                                                               \
    packed_vec() = default;                                                                                      \
    EMULATED_PLAIN packed_vec(T all) { *this = vec<T, N>(all); }                                                 \
    EMULATED_PLAIN packed_vec(vec<T, N> from) { *this = from; }                                                  \
    template <class A, class B, class... C> EMULATED_PLAIN packed_vec(A a, B b, C... c) { *this = vec<T, N>(a, b, c...); } \
    EMULATED_PLAIN packed_vec &operator=(vec<T, N> from) {                                                       \
      for (int i = 0; i < N; i++) (&x)[i] = from[i];                                                             \
      return *this;                                                                                              \
    }                                                                                                            \
    EMULATED_PLAIN operator vec<T, N>() const {                                                                  \
      vec<T, N> out;                                                                                             \
      for (int i = 0; i < N; i++) out.raw[i] = (&x)[i];                                                          \
      return out;                                                                                                \
    }                                                                                                            \
    EMULATED_PLAIN T &operator[](int i) { return (&x)[i]; }                                                      \
    EMULATED_PLAIN const T &operator[](int i) const { return (&x)[i]; }                                          \
  };
EMULATED_PACKED(2, x, y)
EMULATED_PACKED(3, x, y, z)
EMULATED_PACKED(4, x, y, z, w)

}  // namespace metal

#define EMULATED_NAMES(type)                                                                                     \
  typedef metal::vec<type, 2> type##2;                                                                           \
  typedef metal::vec<type, 3> type##3;                                                                           \
  typedef metal::vec<type, 4> type##4;
#define EMULATED_PACKED_NAMES(type)                                                                              \
  EMULATED_NAMES(type)                                                                                           \
  typedef metal::packed_vec<type, 2> packed_##type##2;                                                           \
  typedef metal::packed_vec<type, 3> packed_##type##3;                                                           \
  typedef metal::packed_vec<type, 4> packed_##type##4;
EMULATED_NAMES(bool)
EMULATED_PACKED_NAMES(char)
EMULATED_PACKED_NAMES(uchar)
EMULATED_PACKED_NAMES(short)
EMULATED_PACKED_NAMES(ushort)
EMULATED_PACKED_NAMES(int)
EMULATED_PACKED_NAMES(uint)
EMULATED_PACKED_NAMES(half)
EMULATED_PACKED_NAMES(bfloat)
EMULATED_PACKED_NAMES(float)
typedef metal::vec<long, 2> long2;  // none of four: the compiler's instrumentation does not handle 32 bytes
typedef metal::vec<ulong, 2> ulong2;

// --- what a kernel is called with

EMULATED unsigned metal_place(unsigned which, unsigned direction) __attribute__((const));
EMULATED unsigned metal_number(unsigned which) __attribute__((const));
struct EmulatedPointer {
  unsigned long value;
  template <class T> EMULATED_PLAIN operator T *() const { return (T *)value; }
};
struct EmulatedReference {
  unsigned long value;
  template <class T> EMULATED_PLAIN operator T &() const { return *(T *)value; }
};
// A position in three dimensions, converted to the type of the parameter.
struct EmulatedPlace {
  unsigned at[3];
  EMULATED_PLAIN operator uint() const { return at[0]; }
  EMULATED_PLAIN operator ushort() const { return (ushort)at[0]; }
  EMULATED_PLAIN operator uint2() const { return uint2(at[0], at[1]); }
  EMULATED_PLAIN operator ushort2() const { return ushort2(at[0], at[1]); }
  EMULATED_PLAIN operator uint3() const { return uint3(at[0], at[1], at[2]); }
  EMULATED_PLAIN operator ushort3() const { return ushort3(at[0], at[1], at[2]); }
};
struct EmulatedNumber {
  unsigned at;
  EMULATED_PLAIN operator uint() const { return at; }
  EMULATED_PLAIN operator ushort() const { return (ushort)at; }
};
