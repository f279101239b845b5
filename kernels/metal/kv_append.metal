// pool[slots[t]] = k[t], v[t]: the keys and values of a step go into the paged cache.
//
//   pool        [P, 2, K, S, D] CACHE_TYPE  one layer's blocks, keys at [:, 0], values at [:, 1], or packed blocks; slot n is place n % S of
//                                           block n / S
//   pool_again  the same memory, not used
//   k, v        [T, K, D] float32           rounded to CACHE_TYPE (F32, F16 or BF16), to nearest, ties to even
//   slots       [T] int32                   no two rows have the same, except for negative ones: those rows are not stored
//   rows        [1] int32                   number of valid rows, at most T
//
// Grid (T), THREADS threads, a multiple of 32 up to 256: the host takes K * D / 4. A thread moves 4 keys and 4 values at a time, or a SIMD
// group packs a head's key or value. D is a multiple of 16; all addresses are multiples of 16. Slots as in PagedAttention (Kwon et al. 2023).
#include "packed_store.h"

#if PACKED_CACHE

[[max_total_threads_per_threadgroup(THREADS)]] kernel void kv_append(device uchar *pool, device void *pool_again, device const float *k,
                                                                     device const float *v, device const int *slots, device const int *rows,
                                                                     uint3 group [[threadgroup_position_in_grid]],
                                                                     uint simd [[simdgroup_index_in_threadgroup]],
                                                                     uint lane_index [[thread_index_in_simdgroup]]) {
  threadgroup float numbers[THREADS / LANES * D];
  const int t = group.x, lane = lane_index;
  threadgroup float *own = numbers + simd * D;
  if (t >= rows[0]) return;
  for (int i = simd; i < 2 * K; i += THREADS / LANES) {
    device const float *from = (i < K ? k : v) + ((ulong)t * K + i % K) * D;
    for (int d = lane; d < D; d += LANES) own[d] = from[d];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    store_packed_row(pool, slots[t], i / K, i % K, own, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

#else

[[max_total_threads_per_threadgroup(THREADS)]] kernel void kv_append(device cache_number4 *pool, device void *pool_again,
                                                                     device const float4 *k, device const float4 *v,
                                                                     device const int *slots, device const int *rows,
                                                                     uint3 group [[threadgroup_position_in_grid]],
                                                                     uint index [[thread_index_in_threadgroup]]) {
  constexpr uint FOURS = D / 4;
  const uint t = group.x;
  if (t >= uint(rows[0]) || slots[t] < 0) return;
  const uint slot = uint(slots[t]);
  device cache_number4 *keys = pool + (ulong(slot / S) * 2 * K * S + slot % S) * FOURS, *values = keys + ulong(K) * S * FOURS;
  for (uint i = index; i < K * FOURS; i += THREADS) {
    const ulong from = ulong(t) * K * FOURS + i, to = ulong(i / FOURS) * S * FOURS + i % FOURS;
    keys[to] = to_cache4(k[from]);
    values[to] = to_cache4(v[from]);
  }
}

#endif
