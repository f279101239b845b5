// pool[slots[t]] = k[t], v[t]: stores the keys and values of a step in the paged cache.
//
//   pool        [P, 2, K, S, D] CACHE_TYPE  one layer's blocks, keys at [:, 0], values at [:, 1], or packed blocks; slot n is place n % S of
//                                           block n / S
//   pool_again  the same memory, not used
//   k, v        [T, K, D] float32           rounded to CACHE_TYPE (F32, F16 or BF16), to nearest, ties to even
//   slots       [T] int32                   no two rows have the same, except for negative ones: those rows are not stored
//   rows        [1] int32                   number of rows, at most T
//
// Launch: grid (T), block 32 to 1024 threads; the host takes K * D / 4, at most 256. Unit of work: a thread block has a row; a thread moves
// 4 keys and 4 values at a time, or a warp packs a head's key or value. D is a multiple of 16; every array is 16-byte aligned. Slots as in PagedAttention (Kwon et al. 2023).
#include "formats.cuh"
#include "packed_store.cuh"

#if PACKED_CACHE

extern "C" __global__ void __launch_bounds__(256)
    kv_append(u8 *pool, void *pool_again, const float *k, const float *v, const int *slots, const int *rows) {
  await_previous();
  static __shared__ float numbers[8][D];
  const int t = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (t >= rows[0]) return;
  for (int i = warp; i < 2 * K; i += blockDim.x / 32) {
    const float *from = (i < K ? k : v) + ((s64)t * K + i % K) * D;
    __syncwarp();
    for (int d = lane; d < D; d += 32) numbers[warp][d] = from[d];
    __syncwarp();
    store_packed_row(pool, own_slot(slots[t]), i / K, i % K, numbers[warp], lane);
  }
}

#else

#if CACHE_TYPE == F32
typedef float4 CachedFour;
#else
typedef uint2 CachedFour;
#endif
DEVICE CachedFour rounded(float4 x);

extern "C" __global__ void __launch_bounds__(1024)
    kv_append(CachedFour *pool, void *pool_again, const float4 *k, const float4 *v, const int *slots, const int *rows) {
  await_previous();
  constexpr int FOURS = D / 4;
  const int t = blockIdx.x;
  if (t >= rows[0]) return;
  const int slot = own_slot(slots[t]);
  if (slot < 0) return;
  CachedFour *keys = pool + ((s64)(slot / S) * 2 * K * S + slot % S) * FOURS, *values = keys + (s64)K * S * FOURS;
  for (int i = threadIdx.x; i < K * FOURS; i += blockDim.x) {
    const s64 from = (s64)t * K * FOURS + i, to = (s64)(i / FOURS) * S * FOURS + i % FOURS;
    keys[to] = rounded(k[from]);
    values[to] = rounded(v[from]);
  }
}

#if CACHE_TYPE == F32
DEVICE CachedFour rounded(float4 x) { return x; }
#else
DEVICE CachedFour rounded(float4 x) { return make_uint2(pack_pair<CACHE_TYPE>(x.x, x.y), pack_pair<CACHE_TYPE>(x.z, x.w)); }
#endif

#endif
