// What the headers shared by all backends (kernels/include) call by one name, in Metal.
#pragma once
#include "gpu.h"

#define DEVICE_FN INLINE

typedef uint u32;
typedef long s64;
typedef ulong u64;

DEVICE_FN float float_from_bits(u32 bits) { return as_type<float>(bits); }
DEVICE_FN u32 bits_of_float(float value) { return as_type<uint>(value); }
DEVICE_FN float fmadd(float a, float b, float c) { return fma(a, b, c); }
