// pool[slots[t]] = k[t], v[t]: what a step computed goes into the paged cache.
//
//   pool        [P, 2, K, S, D] CACHE_TYPE  one layer's blocks, keys at [:, 0], values at [:, 1]; slot n is place n % S of block n / S
//   pool_again  the same memory; not used
//   k, v        [T, K, D] float32           rounded to CACHE_TYPE (F32, F16 or BF16), to nearest, ties to even
//   slots       [T] int32                   no two rows share a slot that is read
//   rows        [1] int32                   rows that count, at most T
//
// One row is one unit of work. D is a multiple of 16. Slots as in PagedAttention (Kwon et al. 2023).
#include "cache.h"
#include "thread_team.h"

static void kv_append(cached *pool, void *pool_again, const float *k, const float *v, const int32_t *slots, const int32_t *rows,
                      const struct thread_team *team) {
  (void)pool_again;
  for (int t = next_unit(team); t < rows[0]; t = next_unit(team)) {
    cached *keys = pool + ((long)(slots[t] / S) * 2 * K * S + slots[t] % S) * D, *values = keys + (long)K * S * D;
    for (int h = 0; h < K; h++)
      for (int d = 0; d < D; d += 16) {
        store_cached(keys + (long)h * S * D + d, v16_load(k + ((long)t * K + h) * D + d));
        store_cached(values + (long)h * S * D + d, v16_load(v + ((long)t * K + h) * D + d));
      }
  }
}
