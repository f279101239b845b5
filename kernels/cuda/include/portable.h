// What the headers shared by all backends (kernels/include) call by one name, in CUDA C++.
#pragma once
#include "gpu.cuh"

#define DEVICE_FN DEVICE

DEVICE_FN float float_from_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE_FN u32 bits_of_float(float value) { return __float_as_uint(value); }
DEVICE_FN float fmadd(float a, float b, float c) { return fmaf(a, b, c); }
