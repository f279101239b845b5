// What the attention kernels share: which keys a row sees, where a cache's numbers lie, and how parts of a softmax are put together.
//
// Constants: H, K, D, S, M, CACHE_TYPE (F16, BF16, F32), SCALE (above 0), WINDOW (0: none). H % K == 0, D % 16 == 0, D from 32 to 256, S a
// power of two from 8 to 256. A layer's cache holds less than 2^34 numbers.
//
// q and weights are not rounded: float32 meets the cache's exact values, and all sums are float32. Scores are in units of log2(e), as q is
// multiplied by SCALE_2 when it is read. NEVER is finite, so that no infinity meets the fast exponential; a hidden key has the weight 0 by
// selection, and a table entry of a hidden key is not read: in its stead some key is loaded that is seen.
//
// The online softmax is Milakov and Gimelshein's (arXiv:1805.02867), tiles and the delayed division are FlashAttention-2's
// (arXiv:2307.08691), the split over keys and its merge are flash decoding's.
#pragma once
#include "gpu.h"

constant constexpr int G = H / K; // query heads to a KV head
constant constexpr float NEVER = -1e38f; // the top of no key at all
constant constexpr float SCALE_2 = (float)(SCALE * 1.44269504f);

static_assert(H % K == 0, "attention: query heads must be a multiple of key heads");
static_assert(D % 16 == 0 && D >= 32 && D <= 256, "attention: D is a multiple of 16 from 32 to 256");
static_assert(S >= 8 && S <= 256 && (S & (S - 1)) == 0, "attention: S is a power of two from 8 to 256");

// A number of the cache as it lies there, and four of them.
#if CACHE_TYPE == F32
typedef float cached;
typedef float4 cached4;
INLINE float wide(cached x) { return x; }
INLINE float4 wide4(cached4 x) { return x; }
#elif CACHE_TYPE == F16
typedef half cached;
typedef half4 cached4;
INLINE float wide(cached x) { return (float)x; }
INLINE float4 wide4(cached4 x) { return float4(x); }
#elif CACHE_TYPE == BF16
typedef ushort cached;
typedef ushort4 cached4;
INLINE float wide(cached x) { return bf16_to_float(x); }
INLINE float4 wide4(cached4 x) { return float4(bf16_to_float(x.x), bf16_to_float(x.y), bf16_to_float(x.z), bf16_to_float(x.w)); }
#else
#error "attention: CACHE_TYPE is F16, BF16 or F32"
#endif

// The first key that a row at this position sees; the last one is its own.
INLINE int first_seen(int position) { return WINDOW > 0 ? max(0, position - WINDOW + 1) : 0; }

// Row `key % S` of a KV head's keys in a block, counted in rows of D numbers; its values lie VALUES rows further on. [P, 2, K, S, D]
constant constexpr uint VALUES = K * S;
INLINE uint row_at(int block, int head, int key) { return (uint)block * (2 * VALUES) + (uint)(head * S) + (uint)(key % S); }

INLINE float power_of_2(float x) { return fast::exp2(x); }

// What is there is scaled by this when its top rises. Nothing changes where it does not: 1 exactly.
INLINE float fade_of(float before, float top) { return before == top ? 1.0f : power_of_2(before - top); }
