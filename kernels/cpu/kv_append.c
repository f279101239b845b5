// pool[slots[t]] = k[t], v[t]: what a step computed goes into the paged cache.
//
//   pool        [P, BLOCK] CACHE_TYPE       one layer's blocks (cache.h); slot n is place n % S of block n / S
//   pool_again  the same memory; not used
//   k, v        [T, K, D] float32; no v if LATENT, and K is 1
//   slots       [T] int32                   no two rows have the same, except for negative ones: those rows are not stored
//   rows        [1] int32                   rows that count, at most T
//
// One row is one unit of work. D is a multiple of 16. Slots as in PagedAttention (Kwon et al. 2023).
#include "cache.h"
#include "thread_team.h"

#if LATENT
#define V_ARGUMENT
#else
#define V_ARGUMENT const float *v,
#endif

static void kv_append(cached *pool, void *pool_again, const float *k, V_ARGUMENT const int32_t *slots, const int32_t *rows,
                      const struct thread_team *team) {
  (void)pool_again;
  for (int t = next_unit(team); t < rows[0]; t = next_unit(team)) {
    for (int h = 0; h < K; h++) {
      store_row(pool, slots[t], 0, h, k + ((long)t * K + h) * D);
#if !LATENT
      store_row(pool, slots[t], 1, h, v + ((long)t * K + h) * D);
#endif
    }
  }
}
