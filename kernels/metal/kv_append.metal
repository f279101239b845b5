// pool[slots[t]] = k[t], v[t]: the keys and values of a step go into the paged cache.
//
//   pool        [P, 2, K, S, D] CACHE_TYPE  one layer's blocks, keys at [:, 0], values at [:, 1]; slot n is place n % S of block n / S
//   pool_again  the same memory, not used
//   k, v        [T, K, D] float32           rounded to CACHE_TYPE (F32, F16 or BF16), to nearest, ties to even
//   slots       [T] int32                   no two rows share a slot that is read
//   rows        [1] int32                   number of valid rows, at most T
//
// Grid (T), THREADS threads, 32 to 1024: the host takes K * D / 4, at most 256. A thread moves 4 keys and 4 values at a time. D is a
// multiple of 16; all addresses are multiples of 16. Slots as in PagedAttention (Kwon et al. 2023).
#include "cache_number.h"

[[max_total_threads_per_threadgroup(THREADS)]] kernel void kv_append(device cache_number4 *pool, device void *pool_again,
                                                                     device const float4 *k, device const float4 *v,
                                                                     device const int *slots, device const int *rows,
                                                                     uint3 group [[threadgroup_position_in_grid]],
                                                                     uint index [[thread_index_in_threadgroup]]) {
  constexpr uint FOURS = D / 4;
  const uint t = group.x;
  if (t >= uint(rows[0])) return;
  const uint slot = uint(slots[t]);
  device cache_number4 *keys = pool + (ulong(slot / S) * 2 * K * S + slot % S) * FOURS, *values = keys + ulong(K) * S * FOURS;
  for (uint i = index; i < K * FOURS; i += THREADS) {
    const ulong from = ulong(t) * K * FOURS + i, to = ulong(i / FOURS) * S * FOURS + i % FOURS;
    keys[to] = to_cache4(k[from]);
    values[to] = to_cache4(v[from]);
  }
}
