// out = silu(gate) * up, where gate, up = rmsnorm(x) . weight^T + bias: the first half of a gated feed-forward layer, for up to eight rows
//
//   out       [T, F] float32   does not alias x
//   x         [T, E] float32
//   norm      [E] float32      RMS norm's weights; EPS is inside the root
//   weight    tiles (product.cuh) of WEIGHT, [2 F, E]: the rows of gate, then those of up
//   bias      [2 F] float32, gate's first, if BIAS; with BIAS_PITCH = 2 F [T, 2 F], a row's own (lora_bias.cu)
//   rows      [1] int32        number of rows of x, 0 to T = TOKENS; later rows of out are not touched
//
// E % 32 == 0, F % 16 == 0. The norm in the order of norm.cuh, products in that of product.cuh. silu(a) = a / (1 + e^-a).
//
// Unit of work (stream.cuh): TILES / 2 tiles of gate and the corresponding tiles of up. Every thread block norms and rounds all rows for
// itself, while its first weights are in flight. The launcher computes
//
//     pieces = ceil(E / 512); PIECE_WARPS = even(pieces, 8); TILES = TILE_WARPS = 4 if PIECE_WARPS <= 4 and TOKENS > 2, else 2
//     block = 32 * PIECE_WARPS * TILE_WARPS; grid = min(ceil(F / 16 / (TILES / 2)), multiprocessors * max(1, 512 / block))
//     shared = COLUMNS_BYTES(E / 32) + 4 * (E + (TOKENS * E if it is at most 8192) + pieces * TILES * TOKENS * 20 + 9 * TOKENS)
//
// with even(pieces, max) = ceil(pieces / ceil(pieces / max)).
#define I E
#define ALL_TILES (2 * F / 16)
#define UNITS ((F / 16 + TILES / 2 - 1) / (TILES / 2))
#include "stream.cuh"

static_assert(F % 16 == 0, "norm_gate_up_silu: F must be a multiple of 16");
static_assert(TILES % 2 == 0, "norm_gate_up_silu: TILES must be even, tiles of gate and of up");

constexpr int OUTPUTS = TILES / 2 * 16;  // of a unit, for a token

#if BIAS
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#endif

DEVICE void finish_unit(float *out, const float *sums, const float *bias, int unit, int count);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    norm_gate_up_silu(float *out, const float *x, const float *norm, const u8 *weight, BIAS_ARGUMENT const int *rows) {
#if !BIAS
  const float *bias = nullptr;
#endif
  DYNAMIC_SHARED(memory);
  const SharedMemory shared = shared_memory_at(memory);
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
  for (int unit = blockIdx.x; unit < UNITS; unit += gridDim.x) {
    multiply_unit(ring, walk, weight, columns, unit, shared.sums);
    if (unit + (int)gridDim.x >= UNITS) begin_next();
    __syncthreads();
    finish_unit(out, shared.sums, bias, unit, count);
    if (unit + (int)gridDim.x < UNITS) __syncthreads();  // before the next unit's sums
  }
}

// Tiles of gate and of up in turn.
DEVICE int tile_of(int unit, int i) {
  const int pair = unit * (TILES / 2) + i / 2;
  return pair < F / 16 ? i % 2 * (F / 16) + pair : ALL_TILES;
}

DEVICE void finish_unit(float *out, const float *sums, const float *bias, int unit, int count) {
  for (int e = threadIdx.x; e < OUTPUTS * count; e += THREADS) {
    const int token = e / OUTPUTS, f = unit * OUTPUTS + e % OUTPUTS;
    if (f >= F) continue;
    const int pair = e % OUTPUTS / 16;
    float gate = sum_of_pieces(sums, 2 * pair, token, f % 16), up = sum_of_pieces(sums, 2 * pair + 1, token, f % 16);
    const float *own = bias + (s64)token * BIAS_PITCH + f;
    if (BIAS) gate = gate + own[0], up = up + own[F];
    out[(s64)token * F + f] = silu(gate) * up;
  }
}
