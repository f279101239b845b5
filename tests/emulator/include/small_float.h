// A 16-bit float of CUDA's headers for generated kernels: every operation in float32, rounded once, as the GPU's own have it.
#define EMULATED_SMALL_FLOAT(name, to, from)                                                                        \
  struct __attribute__((aligned(2))) name {                                                                         \
    unsigned short bits;                                                                                            \
    name() = default;                                                                                               \
    template <class T> EMULATED_MEMBER name(T value) : bits(to((float)value)) {}                                    \
    EMULATED_MEMBER operator float() const { return from(bits); }                                                   \
    EMULATED_MEMBER name &operator+=(name y) { return *this = name((float)*this + (float)y); }                      \
    EMULATED_MEMBER name &operator-=(name y) { return *this = name((float)*this - (float)y); }                      \
    EMULATED_MEMBER name &operator*=(name y) { return *this = name((float)*this * (float)y); }                      \
    EMULATED_MEMBER name &operator/=(name y) { return *this = name((float)*this / (float)y); }                      \
    EMULATED_MEMBER name operator-() const { return name(-(float)*this); }                                          \
  };                                                                                                                \
  EMULATED_PLAIN name operator+(name x, name y) { return name((float)x + (float)y); }                               \
  EMULATED_PLAIN name operator-(name x, name y) { return name((float)x - (float)y); }                               \
  EMULATED_PLAIN name operator*(name x, name y) { return name((float)x * (float)y); }                               \
  EMULATED_PLAIN name operator/(name x, name y) { return name((float)x / (float)y); }                               \
  EMULATED_PLAIN bool operator<(name x, name y) { return (float)x < (float)y; }                                     \
  EMULATED_PLAIN bool operator>(name x, name y) { return (float)x > (float)y; }                                     \
  EMULATED_PLAIN bool operator<=(name x, name y) { return (float)x <= (float)y; }                                   \
  EMULATED_PLAIN bool operator>=(name x, name y) { return (float)x >= (float)y; }                                   \
  EMULATED_PLAIN bool operator==(name x, name y) { return (float)x == (float)y; }                                   \
  EMULATED_PLAIN bool operator!=(name x, name y) { return (float)x != (float)y; }                                   \
  EMULATED_PLAIN name htrunc(name x) { return name(truncf(x)); }                                                    \
  EMULATED_PLAIN name hsin(name x) { return name(sinf(x)); }                                                        \
  EMULATED_PLAIN name hcos(name x) { return name(cosf(x)); }                                                        \
  EMULATED_PLAIN name hexp(name x) { return name(expf(x)); }                                                        \
  EMULATED_PLAIN name hexp2(name x) { return name(exp2f(x)); }                                                      \
  EMULATED_PLAIN name hlog(name x) { return name(logf(x)); }                                                        \
  EMULATED_PLAIN name hlog2(name x) { return name(log2f(x)); }                                                      \
  EMULATED_PLAIN name hsqrt(name x) { return name(sqrtf(x)); }                                                      \
  EMULATED_PLAIN name hrsqrt(name x) { return name(1.0f / sqrtf(x)); }                                              \
  EMULATED_PLAIN name hrcp(name x) { return name(1.0f / (float)x); }                                                \
  EMULATED_PLAIN name __hmax(name x, name y) { return name(fmaxf(x, y)); }                                          \
  EMULATED_PLAIN name __hmin(name x, name y) { return name(fminf(x, y)); }                                          \
  EMULATED_PLAIN bool __hisnan(name x) { return (float)x != (float)x; }                                             \
  EMULATED_PLAIN name __hfma(name x, name y, name z) { return name(fmaf(x, y, z)); }
#define EMULATED_MEMBER inline __attribute__((always_inline))
