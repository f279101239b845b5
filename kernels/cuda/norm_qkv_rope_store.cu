// q, k, v = rmsnorm(x) . weight^T + bias, heads of q and k normed and rotated; q is written out, k and v are stored in their slots of the
// cache; for up to eight rows
//
//   q            [T, H, D] float32
//   keys         [P, 2, K, S, D] CACHE_TYPE (F32, F16 or BF16)   the pool of blocks: keys at [:, 0], values at [:, 1]; or packed blocks
//   keys_again                                                   the same memory; not used
//   x            [T, E] float32
//   norm         [E] float32     RMS norm's weights; EPS is inside the root
//   weight       tiles (product.cuh) of WEIGHT, [MAIN D, E]: the first MAIN heads of those of q, of k, and of v; MAIN is H + 2 K unless given
//   second, third   if MAIN < H + 2 K: products of the other heads, whose weights have another format (heads.cuh)
//   bias         [(H + 2 K) D] float32, if BIAS; with BIAS_PITCH = (H + 2 K) D [T, (H + 2 K) D], a row's own (lora_bias.cu)
//   q_norm, k_norm  [D] float32, if QK_NORM                      RMS norm of every head of q and k, with QK_EPS, before the rotation
//   angles       [T, R] float32, if R > 0                        R / 2 cosines, then R / 2 sines
//   slots        [T] int32                                       block * S + offset: where a row's k and v go; no two are equal,
//                                                                except for negative ones: those k and v are not stored
//   rows         [1] int32                                       number of rows of x, 0 to T = TOKENS; later rows of q are not touched
//
// E % 32 == 0, D % 16 == 0, R even, R <= D. The norm in the order of norm.cuh, products in that of product.cuh, heads in that of heads.cuh.
//
// Unit of work (stream.cuh): where PAIRED, a pair of tiles of one head that are rotated with each other; otherwise, with norms of heads or
// partial rotations, a whole head, of which a warp then finishes one row. A thread block takes one unit. After the units come thread blocks
// for the heads from MAIN on, one each. The launcher computes
//
//     PAIRED = not QK_NORM and D % 32 == 0 and R in (0, D) and the cache is not packed; TILES = 2 if PAIRED else D / 16
//     grid = MAIN * D / 16 / TILES + H + 2 K - MAIN
//     pieces = ceil(E / 512); TILE_WARPS = min(TILES, max(1, 16 / min(pieces, 16))); residents = min(ceil(grid / multiprocessors), 4)
//     PIECE_WARPS = even(pieces, max(1, min(pieces, 16 / residents / TILE_WARPS))); block = 32 * PIECE_WARPS * TILE_WARPS
//     shared as for norm_gate_up_silu.cu, + (0 if PAIRED and MAIN == H + 2 K else 4 * TOKENS * D)
//
// with even(pieces, max) = ceil(pieces / ceil(pieces / max)).
#define I E
#define ALL_TILES (MAIN * D / 16)
#define UNITS (ALL_TILES / TILES)
#include "heads.cuh"
#define PAIRED (!QK_NORM && D % 32 == 0 && (R == 0 || R == D) && !PACKED_CACHE)
#include "stream.cuh"

static_assert(D % 16 == 0 && R % 2 == 0 && R <= D, "norm_qkv_rope_store: D must be a multiple of 16, and R even and at most D");
static_assert(TILES == (PAIRED ? 2 : D / 16), "norm_qkv_rope_store: a unit must be a pair of tiles or a head");

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

// Where heads are stored, and what is applied to them.
struct Heads {
  float *q;
  cache_number *keys;
  const float *bias, *q_norm, *k_norm, *angles;
  const int *slots;

  __device__ __forceinline__ const float *bias_of(int token, int head) const { return bias + (s64)token * BIAS_PITCH + head * D; }
};

// What a thread needs after the product: read before it, because the product takes longer.
#if PAIRED
constexpr int RESULTS = (16 * TOKENS + THREADS - 1) / THREADS;  // rotated pairs of a unit that a thread finishes
struct Operands {
  float2 bias[RESULTS], angle[RESULTS];
  int slot[RESULTS];
};
#else
struct Operands {};
#endif
DEVICE void read_operands(Operands &operands, const Heads &heads, int unit);
DEVICE void finish_unit(const Heads &heads, const Operands &operands, const float *sums, float *y, int unit, int count);
DEVICE void finish_other_head(const Heads &heads, const OtherHeads &others, float *y, int head, int count);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    norm_qkv_rope_store(float *q, cache_number *keys, void *keys_again, const float *x, const float *norm, const u8 *weight,
                        SECOND_ARGUMENT THIRD_ARGUMENT BIAS_ARGUMENT QK_NORM_ARGUMENTS ANGLES_ARGUMENT const int *slots, const int *rows) {
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
  const SharedMemory shared = shared_memory_at(memory);
#if MAIN < H + 2 * K
  OtherHeads others = {second, nullptr};
#if MAIN + SECOND < H + 2 * K
  others.third = third;
#endif
  if (blockIdx.x >= UNITS) {
    await_previous();
    const Heads heads = {q, keys, bias, q_norm, k_norm, angles, slots};
    finish_other_head(heads, others, shared.extra, MAIN + blockIdx.x - UNITS, rows[0]);
    return;
  }
#endif
  Ring ring;
  Walk walk = first_run();
  stage_norm(shared, norm);
  load_first(ring, walk, weight);
  await_previous();
  const InputRows all = {x, nullptr, TOKENS, I};
  stage_x(shared, all);
  const int count = rows[0];

  prepare_normed(shared, all, EPS);
  const Columns columns = columns_at(shared.prepared, STEPS);
  if (count <= 0) return;
  const int unit = blockIdx.x;
  const Heads heads = {q, keys, bias, q_norm, k_norm, angles, slots};
  Operands operands;
  read_operands(operands, heads, unit);
  multiply_unit(ring, walk, weight, columns, unit, shared.sums);
  begin_next();
  __syncthreads();
  finish_unit(heads, operands, shared.sums, shared.extra, unit, count);
}

// Finishes y [D] in shared memory, a head of a token with its bias, by a whole warp.
DEVICE void finish_row(const Heads &heads, float *y, int token, int head) {
  const int slot = head < H ? 0 : own_slot(heads.slots[token]);
  finish_head(y, lane_of(), token, slot, head, heads.q, heads.keys, head < H ? heads.q_norm : heads.k_norm, heads.angles + token * R);
}

// `y` [TOKENS * D] in shared memory.
DEVICE void finish_other_head(const Heads &heads, const OtherHeads &others, float *y, int head, int count) {
  for (int token = threadIdx.x / 32; token < count; token += WARPS) {
    const float *product = product_of(others, token, head);
    for (int d = lane_of(); d < D; d += 32) y[token * D + d] = BIAS ? product[d] + heads.bias_of(token, head)[d] : product[d];
    __syncwarp();
    finish_row(heads, y + token * D, token, head);
  }
}

#if PAIRED

DEVICE int tile_of(int unit, int i) { return unit / (D / 32) * (D / 16) + unit % (D / 32) + i * (D / 32); }

// The memory has rows for all TOKENS, whatever their number.
DEVICE void read_operands(Operands &operands, const Heads &heads, int unit) {
  const int head = unit / (D / 32), first = unit % (D / 32) * 16;
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    const int e = i * THREADS + threadIdx.x, token = e / 16, d = first + e % 16;
    if (token >= TOKENS) continue;
    if (BIAS) operands.bias[i] = make_float2(heads.bias_of(token, head)[d], heads.bias_of(token, head)[d + D / 2]);
    if (R > 0 && head < H + K) operands.angle[i] = make_float2(heads.angles[token * R + d], heads.angles[token * R + d + R / 2]);
    if (head >= H) operands.slot[i] = own_slot(heads.slots[token]);
  }
}

DEVICE void finish_unit(const Heads &heads, const Operands &operands, const float *sums, float *, int unit, int count) {
  const int head = unit / (D / 32), first = unit % (D / 32) * 16;
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    const int e = i * THREADS + threadIdx.x, token = e / 16, d = first + e % 16;
    if (token >= count) continue;
    float2 pair = make_float2(sum_of_pieces(sums, 0, token, d % 16), sum_of_pieces(sums, 1, token, d % 16));
    if (BIAS) pair = make_float2(pair.x + operands.bias[i].x, pair.y + operands.bias[i].y);
    if (R > 0 && head < H + K) pair = rotated(pair.x, pair.y, operands.angle[i].x, operands.angle[i].y);
    put_feature(heads.q, heads.keys, token, operands.slot[i], head, d, pair.x);
    put_feature(heads.q, heads.keys, token, operands.slot[i], head, d + D / 2, pair.y);
  }
}

#else

DEVICE int tile_of(int unit, int i) { return unit * TILES + i; }
DEVICE void read_operands(Operands &, const Heads &, int) {}

// `y` [TOKENS * D] in shared memory; the unit is a head.
DEVICE void finish_unit(const Heads &heads, const Operands &, const float *sums, float *y, int head, int count) {
  for (int e = threadIdx.x; e < D * count; e += THREADS) {
    const int token = e / D, d = e % D;
    const float sum = sum_of_pieces(sums, d / 16, token, d % 16);
    y[e] = BIAS ? sum + heads.bias_of(token, head)[d] : sum;
  }
  __syncthreads();
  for (int token = threadIdx.x / 32; token < count; token += WARPS) finish_row(heads, y + token * D, token, head);
}

#endif
