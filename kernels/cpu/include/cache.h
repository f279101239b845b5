// How the KV cache stores numbers: CACHE_TYPE F32, F16 or BF16. Stores round to nearest, ties to even.
#pragma once
#include "lanes.h"

#if CACHE_TYPE == F32
typedef float cached;
#define load_cached v16_load
#define store_cached v16_store
#elif CACHE_TYPE == F16
typedef uint16_t cached;
#define load_cached v16_load_f16
#define store_cached v16_store_f16
#elif CACHE_TYPE == BF16
typedef uint16_t cached;
#define load_cached v16_load_bf16
#define store_cached v16_store_bf16
#else
#error "cache.h: CACHE_TYPE is F32, F16 or BF16"
#endif
