// What kernels need of Apple's GPUs (M1 and later, Metal 3.0) in addition to Metal's own library.
//
// A SIMD group is 32 threads that run together. Its collective operations (simd_sum, simd_shuffle_xor, simdgroup_load, a product of
// matrices) must be reached by all of its threads on the same line; threadgroup_barrier by all threads of the threadgroup, none of which
// has returned. Neither simd_* nor simdgroup_load or _store order memory: simdgroup_barrier(mem_flags::mem_threadgroup) and
// threadgroup_barrier do, each for the memory that it names. Atomics are relaxed and order nothing.
//
// `thread` is a keyword of Metal (an address space) and cannot name a variable; nor can `kernel`, `device`, `constant`, `threadgroup`.
//
// A lane holds two numbers of a simdgroup_matrix<T, 8, 8>, thread_elements()[0] and [1]: row matrix_row(lane), columns
// matrix_column(lane) and the next. Apple does not promise that; it is so on every GPU so far, and MLX's kernels (steel/gemm) rely on it.
#pragma once
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#include "formats.h"

// Only fma() fuses: the bits of a result must not depend on the compiler.
#pragma METAL fp contract(off)
#pragma clang fp contract(off)

#define INLINE inline __attribute__((always_inline))
#define LANES 32

// --- 16-bit numbers. A bfloat16 is the upper half of a float; rounded to nearest, ties to even. (Metal's own `bfloat` needs Metal 3.1.)

INLINE float bf16_to_float(ushort half_word) { return as_type<float>(uint(half_word) << 16); }
// Two in a word, the first in its lower half.
INLINE float2 bf16_pair_to_float(uint both) { return float2(as_type<float>(both << 16), as_type<float>(both & 0xFFFF0000u)); }
INLINE ushort float_to_bf16(float value) {
  uint bits = as_type<uint>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return ushort(bits >> 16 | 0x40u);  // NaN remains NaN
  return ushort((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
INLINE uint float_to_bf16_pair(float low, float high) { return uint(float_to_bf16(low)) | uint(float_to_bf16(high)) << 16; }
INLINE float f16_to_float(ushort half_word) { return float(as_type<half>(half_word)); }
INLINE float2 f16_pair_to_float(uint both) { return float2(as_type<half2>(both)); }
INLINE ushort float_to_f16(float value) { return as_type<ushort>(half(value)); }

// --- sums over the lanes of a SIMD group, in pairs 16, 8, 4, 2 and 1 apart

INLINE float sum_lanes(float value) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2) value += simd_shuffle_xor(value, (ushort)apart);
  return value;
}

// --- matrices: row and first column of a lane's two numbers

INLINE uint matrix_row(uint lane) { return (lane >> 2 & 4u) + (lane >> 1 & 3u); }
INLINE uint matrix_column(uint lane) { return (lane >> 2 & 2u) * 2u + (lane & 1u) * 2u; }
