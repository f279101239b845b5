// q, k, v = rmsnorm(x) . weight^T + bias, heads of q and k normed and rotated; q goes on, k and v go into their slots of the cache;
// for up to eight rows
//
//   q            [T, H, D] float32
//   keys         [P, 2, K, S, D] CACHE_TYPE (F32, F16 or BF16)   the pool of blocks: keys at [:, 0], values at [:, 1]
//   keys_again                                                   the same memory once more; not used
//   x            [T, E] float32
//   norm         [E] float32     RMS norm's weights; EPS inside the root
//   weight       tiles (product.cuh) of WEIGHT, [(H + 2 K) D, E]: the heads of q, those of k, those of v
//   bias         [(H + 2 K) D] float32, if BIAS
//   q_norm, k_norm  [D] float32, if QK_NORM                      RMS norm of every head of q and k, with QK_EPS, before the rotation
//   angles       [T, R] float32, if R > 0                        R / 2 cosines, then R / 2 sines
//   slots        [T] int32                                       block * S + offset: where a row's k and v go; no two rows have the same
//   rows         [1] int32                                       how many rows of x there are, 0 to T = TOKENS; q's rows behind stay
//
// E % 32 == 0, D % 16 == 0, R even, R <= D. The norm in the order of norm.cuh, products in that of product.cuh, heads in that of heads.cuh.
//
// A unit (stream.cuh) is a pair of tiles of one head that are rotated with each other, where PAIRED; else, with norms of heads or with
// odd rotations, a whole head, and then a warp finishes a row's head. A block of threads takes one unit. Whoever launches it counts
//
//     PAIRED = not QK_NORM and D % 32 == 0 and R in (0, D); TILES = 2 if PAIRED else D / 16; grid = (H + 2 K) * D / 16 / TILES
//     pieces = ceil(E / 512); TILE_WARPS = min(TILES, max(1, 16 / min(pieces, 16))); residents = min(ceil(grid / multiprocessors), 4)
//     PIECE_WARPS = even(pieces, max(1, min(pieces, 16 / residents / TILE_WARPS))); block = 32 * PIECE_WARPS * TILE_WARPS
//     shared as for norm_gate_up_silu.cu, + (0 if PAIRED else 4 * TOKENS * D)
//
// with even(pieces, most) = ceil(pieces / ceil(pieces / most)).
#define I E
#define ALL_TILES ((H + 2 * K) * D / 16)
#define UNITS (ALL_TILES / TILES)
#define PAIRED (!QK_NORM && D % 32 == 0 && (R == 0 || R == D))
#include "gpu.cuh"
DEVICE int tile_of(int unit, int i) {
#if PAIRED
  return unit / (D / 32) * (D / 16) + unit % (D / 32) + i * (D / 32);
#else
  return unit * TILES + i;
#endif
}
#include "heads.cuh"
#include "stream.cuh"

static_assert(D % 16 == 0 && R % 2 == 0 && R <= D, "norm_qkv_rope_store: D must be a multiple of 16, and R even and at most D");
static_assert(TILES == (PAIRED ? 2 : D / 16), "norm_qkv_rope_store: a unit is a pair of tiles or a head");

#if BIAS
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#endif
#if QK_NORM
#define QK_NORM_ARGUMENTS const float *q_norm, const float *k_norm,
#else
#define QK_NORM_ARGUMENTS
#endif
#if R > 0
#define ANGLES_ARGUMENT const float *angles,
#else
#define ANGLES_ARGUMENT
#endif

// Where heads go, and what is done to them on the way.
struct Heads {
  float *q;
  cache_number *keys;
  const float *bias, *q_norm, *k_norm, *angles;
  const int *slots;
};

#if PAIRED
constexpr int MINE = (16 * TOKENS + THREADS - 1) / THREADS; // rotated pairs of a unit that a thread finishes
struct Given {
  float2 bias[MINE], angle[MINE];
  int slot[MINE];
};

// What the thread's pairs meet behind the product: read ahead of it, because it takes longer. There are rows for all TOKENS.
DEVICE void read_given(Given &given, const Heads &to, int unit) {
  const int head = unit / (D / 32), first = unit % (D / 32) * 16;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int e = i * THREADS + threadIdx.x, token = e / 16, d = first + e % 16;
    if (token >= TOKENS) continue;
    if (BIAS) given.bias[i] = make_float2(to.bias[head * D + d], to.bias[head * D + d + D / 2]);
    if (R > 0 && head < H + K) given.angle[i] = make_float2(to.angles[token * R + d], to.angles[token * R + d + R / 2]);
    if (head >= H) given.slot[i] = to.slots[token];
  }
}

DEVICE void finish_unit(const Heads &to, const Given &given, const float *sums, float *, int unit, int count) {
  const int head = unit / (D / 32), first = unit % (D / 32) * 16;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int e = i * THREADS + threadIdx.x, token = e / 16, d = first + e % 16;
    if (token >= count) continue;
    float2 both = make_float2(merged(sums, 0, token, d % 16), merged(sums, 1, token, d % 16));
    if (BIAS) both = make_float2(both.x + given.bias[i].x, both.y + given.bias[i].y);
    if (R > 0 && head < H + K) both = rotated(both.x, both.y, given.angle[i].x, given.angle[i].y);
    put_feature(to.q, to.keys, token, given.slot[i], head, d, both.x);
    put_feature(to.q, to.keys, token, given.slot[i], head, d + D / 2, both.y);
  }
}
#else
struct Given {};
DEVICE void read_given(Given &, const Heads &, int) {}

DEVICE void finish_unit(const Heads &to, const Given &, const float *sums, float *y, int head, int count) {
  for (int e = threadIdx.x; e < D * count; e += THREADS) {
    const int token = e / D, d = e % D;
    const float sum = merged(sums, d / 16, token, d % 16);
    y[e] = BIAS ? sum + to.bias[head * D + d] : sum;
  }
  __syncthreads();
  for (int token = threadIdx.x / 32; token < count; token += WARPS) {
    const int slot = head < H ? 0 : to.slots[token];
    finish_head(y + token * D, lane_of(), token, slot, head, to.q, to.keys, head < H ? to.q_norm : to.k_norm, to.angles + token * R);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    norm_qkv_rope_store(float *q, cache_number *keys, void *keys_again, const float *x, const float *norm, const u8 *weight,
                        BIAS_ARGUMENT QK_NORM_ARGUMENTS ANGLES_ARGUMENT const int *slots, const int *rows) {
#if !BIAS
  const float *bias = nullptr;
#endif
#if !QK_NORM
  const float *q_norm = nullptr, *k_norm = nullptr;
#endif
#if R == 0
  const float *angles = nullptr;
#endif
  DYNAMIC_SHARED(memory);
  const Workplace place = workplace_at(memory);
  const Rows all = {x, nullptr, TOKENS, I};
  Ring<WEIGHT> ring;
  Walk walk = first_run();
  stage_normed(place, all, norm);
  load_first(ring, walk, weight);
  const int count = rows[0];

  prepare_normed(place, all, EPS);
  const Columns columns = columns_at(place.prepared, STEPS);
  const Heads to = {q, keys, bias, q_norm, k_norm, angles, slots};
  if (count <= 0) return;
  const int unit = blockIdx.x;
  Given given;
  read_given(given, to, unit);
  multiply_unit(ring, walk, weight, columns, unit, place.sums);
  __syncthreads();
  finish_unit(to, given, place.sums, place.behind, unit, count);
}
