// A number of the KV cache as CACHE_TYPE (F32, F16, BF16) stores it, and four of them: to and from float32, rounded to nearest, ties to
// even.
#pragma once
#include "gpu.h"

#if CACHE_TYPE == F32
typedef float cache_number;
typedef float4 cache_number4;
INLINE float to_float(cache_number x) { return x; }
INLINE float4 to_float4(cache_number4 x) { return x; }
INLINE cache_number to_cache(float x) { return x; }
INLINE cache_number4 to_cache4(float4 x) { return x; }
#elif CACHE_TYPE == F16
typedef half cache_number;
typedef half4 cache_number4;
INLINE float to_float(cache_number x) { return (float)x; }
INLINE float4 to_float4(cache_number4 x) { return float4(x); }
INLINE cache_number to_cache(float x) { return (half)x; }
INLINE cache_number4 to_cache4(float4 x) { return half4(x); }
#elif CACHE_TYPE == BF16
typedef ushort cache_number;
typedef ushort4 cache_number4;
INLINE float to_float(cache_number x) { return bf16_to_float(x); }
INLINE float4 to_float4(cache_number4 x) { return float4(to_float(x.x), to_float(x.y), to_float(x.z), to_float(x.w)); }
INLINE cache_number to_cache(float x) { return float_to_bf16(x); }
INLINE cache_number4 to_cache4(float4 x) { return ushort4(to_cache(x.x), to_cache(x.y), to_cache(x.z), to_cache(x.w)); }
#else
#error "cache_number.h: CACHE_TYPE must be F16, BF16 or F32"
#endif
