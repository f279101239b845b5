// A number of the KV cache as CACHE_TYPE (F32, F16, BF16) stores it, and four of them: to and from float32, rounded to nearest, ties to
// even. Of a packed cache (KV_INT8, KV_INT4, KV_FP8) only bytes: packed_store.h writes them, packed_read.h reads them.
#pragma once
#include "gpu.h"
#include "kv_cache.h"

#define PACKED_CACHE (CACHE_TYPE == KV_INT8 || CACHE_TYPE == KV_INT4 || CACHE_TYPE == KV_FP8)

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
#elif PACKED_CACHE
typedef uchar cache_number;
#else
#error "cache_number.h: CACHE_TYPE must be F16, BF16, F32, KV_INT8, KV_INT4 or KV_FP8"
#endif
