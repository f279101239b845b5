// CUDA's header of this name for generated kernels: half.
#pragma once
#include "small_float.h"
EMULATED_SMALL_FLOAT(__half, cuda_to_f16, cuda_from_f16)
typedef __half half;
struct __attribute__((aligned(4))) half2 {
  half x, y;
};
EMULATED_PLAIN float __half2float(half x) { return x; }
EMULATED_PLAIN half __float2half(float x) { return half(x); }
EMULATED_PLAIN half __float2half_rn(float x) { return half(x); }
EMULATED_PLAIN unsigned short __half_as_ushort(half x) { return x.bits; }
EMULATED_PLAIN half __ushort_as_half(unsigned short x) { return emulated_bits<half>(x); }
