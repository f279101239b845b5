// q, k, v = y + bias, heads of q and k normed and rotated; q is written out, k and v are stored in their slots of the cache
//
//   q            [T, H, D] float32
//   keys         [P, 2, K, S, D] CACHE_TYPE (F32, F16 or BF16)   the pool of blocks: keys at [:, 0], values at [:, 1]; or packed blocks
//   keys_again                                                   the same memory; not used
//   y            [T, (H + 2 K) D] float32                        a product's outputs: the heads of q, those of k, those of v
//   second, third                                                if MAIN < H + 2 K: y has the first MAIN heads only, and these the others,
//                                                                from products of other matrices (heads.cuh); `third` only if needed
//   bias         [(H + 2 K) D] float32, if BIAS; with BIAS_PITCH = (H + 2 K) D [T, (H + 2 K) D], a row's own (lora_bias.cu)
//   q_norm, k_norm  [D] float32, if QK_NORM                      RMS norm of every head of q and k, with QK_EPS, before the rotation
//   angles       [T, R] float32, if R > 0                        R / 2 cosines, then R / 2 sines
//   slots        [T] int32                                       block * S + offset: where a row's k and v go; no two are equal,
//                                                                except for negative ones: those k and v are not stored
//   rows         [1] int32                                       number of rows of y, 0 to T; later rows of q are not touched
//
// R even, R <= D; any D. The arithmetic of a head is heads.cuh's, with the bits of norm_qkv_rope_store.cu.
// Launch: grid (T, ceil((H + 2 K) / 8), 1), 256 threads, no dynamic shared memory. Unit of work: a warp finishes one head of a row.
#include "heads.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, HEADS = H + 2 * K;

extern "C" __global__ void __launch_bounds__(THREADS) rope_store(float *q, cache_number *keys, void *keys_again, const float *y,
                                                                 SECOND_ARGUMENT THIRD_ARGUMENT
#if BIAS
                                                                 const float *bias,
#endif
#if QK_NORM
                                                                 const float *q_norm, const float *k_norm,
#endif
#if R > 0
                                                                 const float *angles,
#endif
                                                                 const int *slots, const int *rows) {
  await_previous();
  static __shared__ float heads[WARPS][D];
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y * WARPS + warp;
  if (row >= rows[0] || head >= HEADS) return;
  OtherHeads others = {nullptr, nullptr};
#if MAIN < H + 2 * K
  others.second = second;
#if MAIN + SECOND < H + 2 * K
  others.third = third;
#endif
#endif
  const float *product = head < MAIN ? y + ((u64)row * MAIN + head) * D : product_of(others, row, head);
  float *features = heads[warp];
#pragma unroll
  for (int d = lane; d < D; d += 32) {
    features[d] = product[d];
#if BIAS
    features[d] += bias[(u64)row * BIAS_PITCH + head * D + d];
#endif
  }
  __syncwarp();
  const float *norm = nullptr, *row_angles = nullptr;
#if QK_NORM
  norm = head < H ? q_norm : k_norm;
#endif
#if R > 0
  row_angles = angles + (u64)row * R;
#endif
  finish_head(features, lane, row, own_slot(slots[row]), head, q, keys, norm, row_angles);
}
