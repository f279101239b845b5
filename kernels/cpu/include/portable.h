// What the headers shared by all backends (kernels/include) call by one name, in C.
#pragma once
#include <stdint.h>

#define DEVICE_FN static inline

typedef uint32_t u32;
typedef int64_t s64;
typedef uint64_t u64;

DEVICE_FN float float_from_bits(u32 bits) {
  union {
    u32 bits;
    float value;
  } both = {bits};
  return both.value;
}

DEVICE_FN u32 bits_of_float(float value) {
  union {
    float value;
    u32 bits;
  } both = {value};
  return both.bits;
}

// a * b + c, rounded once where the processor can.
DEVICE_FN float fmadd(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
