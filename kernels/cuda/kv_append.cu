// pool[slots[t]] = k[t], v[t]: what a step computed goes into the paged cache.
//
//   pool        [P, 2, K, S, D] CACHE_TYPE  one layer's blocks, keys at [:, 0], values at [:, 1]; slot n is place n % S of block n / S
//   pool_again  the same memory, not used
//   k, v        [T, K, D] float32           rounded to CACHE_TYPE (F32, F16 or BF16), to nearest, ties to even
//   slots       [T] int32                   no two rows share a slot that anybody reads
//   rows        [1] int32                   rows that are meant, at most T
//
// Grid (T), block 32 to 1024 threads: the host takes K * D / 4, at most 256. A thread moves 4 keys and 4 values at a time. D is a multiple
// of 16; everything lies on a border of 16 bytes. Slots as in PagedAttention (Kwon et al. 2023).
#include "formats.cuh"

#if CACHE_TYPE == F32
typedef float4 cached;
DEVICE cached rounded(float4 x) { return x; }
#else
typedef uint2 cached;
DEVICE cached rounded(float4 x) { return make_uint2(pack_pair<CACHE_TYPE>(x.x, x.y), pack_pair<CACHE_TYPE>(x.z, x.w)); }
#endif

extern "C" __global__ void __launch_bounds__(1024)
kv_append(cached *pool, void *pool_again, const float4 *k, const float4 *v, const int *slots, const int *rows) {
  constexpr int FOURS = D / 4;
  const int t = blockIdx.x;
  if (t >= rows[0]) return;
  const int slot = slots[t];
  cached *keys = pool + ((s64)(slot / S) * 2 * K * S + slot % S) * FOURS, *values = keys + (s64)K * S * FOURS;
  for (int i = threadIdx.x; i < K * FOURS; i += blockDim.x) {
    const s64 from = (s64)t * K * FOURS + i, to = (s64)(i / FOURS) * S * FOURS + i % FOURS;
    keys[to] = rounded(k[from]);
    values[to] = rounded(v[from]);
  }
}
