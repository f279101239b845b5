// CUDA's header of this name for generated kernels: nv_bfloat16.
#pragma once
#include "small_float.h"
EMULATED_PLAIN float emulated_from_bf16(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
EMULATED_SMALL_FLOAT(__nv_bfloat16, cuda_to_bf16, emulated_from_bf16)
typedef __nv_bfloat16 nv_bfloat16;
struct __attribute__((aligned(4))) nv_bfloat162 {
  nv_bfloat16 x, y;
};
EMULATED_PLAIN float __bfloat162float(nv_bfloat16 x) { return x; }
EMULATED_PLAIN nv_bfloat16 __float2bfloat16(float x) { return nv_bfloat16(x); }
EMULATED_PLAIN nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }
