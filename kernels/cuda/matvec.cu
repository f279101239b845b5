// out = activation(x . weight^T + bias) + residual, for up to eight rows
//
//   out       [T, O] float32   does not alias x or residual
//   x         [T, I] float32
//   weight    tiles (product.cuh) of WEIGHT = BF16, F16, Q8_0 or Q4_0, O counted up to a multiple of 16
//   bias      [O] float32, if BIAS
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        how many rows of x there are, 0 to T = TOKENS; the rows of out behind them stay as they are
//
// ACTIVATION: NO_ACTIVATION or GELU, the tanh form. I % 32 == 0, any O. Products, and what is rounded, in the order of product.cuh.
//
// A unit (stream.cuh) is TILES tiles of sixteen outputs, and a block of threads takes one. A warp rounds the columns of its pieces for
// itself, into shared memory of its own: TILE_WARPS is 1. Whoever launches it counts
//
//     pieces = ceil(I / 512); tiles = ceil(O / 16)
//     TILES = 2 if TOKENS > 2 and tiles >= 1.5 * multiprocessors and I <= 16384, else 1; grid = ceil(tiles / TILES)
//     PIECE_WARPS = even(pieces, min(pieces, max(4, 16 / ceil(grid / multiprocessors)))); block = 32 * PIECE_WARPS
//     shared = PIECE_WARPS * (COLUMNS_BYTES(room) + (128 * TOKENS * room if TOKENS <= 2)) + 4 * pieces * TILES * TOKENS * 20
//
// with even(pieces, most) = ceil(pieces / ceil(pieces / most)) and room = min(16, I / 32), so that all blocks of threads are resident at
// once if they can be, up to sixteen warps a multiprocessor: each then gets its share of the memory's speed, and no second wave begins with
// empty hands.
#define ALL_TILES ((O + 15) / 16)
#define UNITS ((ALL_TILES + TILES - 1) / TILES)
#include "gpu.cuh"
DEVICE int tile_of(int unit, int i) { return unit * TILES + i; }
#include "stream.cuh"

static_assert(TILE_WARPS == 1, "matvec: a warp has its columns for itself");

constexpr int ROOM = STEPS < PIECE_STEPS ? STEPS : PIECE_STEPS;
constexpr bool WAITING = TOKENS <= 2; // a piece of x waits in shared memory while the one before is multiplied
constexpr int OWN_BYTES = COLUMNS_BYTES(ROOM) + (WAITING ? TOKENS * ROOM * STEP * 4 : 0); // of a warp
constexpr int OUTPUTS = TILES * 16; // of a unit, for a token
constexpr int MINE = (OUTPUTS * TOKENS + THREADS - 1) / THREADS; // results of a unit that a thread finishes

#if BIAS
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#endif
#if RESIDUAL
#define RESIDUAL_ARGUMENT const float *residual,
#else
#define RESIDUAL_ARGUMENT
#endif

// A piece's columns on their way to raw [TOKENS][ROOM * STEP], which is this warp's.
DEVICE void stage_piece(float *raw, const Rows &all, int piece) {
  if (WAITING) stage_rows(raw, ROOM * STEP, all, piece * PIECE, STEP * piece_steps(piece), lane_of(), 32);
  copy_commit();
}

// The piece's columns, rounded; the next piece of this warp follows it into `raw`.
DEVICE void prepare_piece(u8 *prepared, float *raw, const Rows &all, int piece) {
  const Rows rows = WAITING ? Rows{raw, nullptr, TOKENS, ROOM * STEP} : all;
  copy_wait<0>();
  __syncwarp(); // all have done with the piece before, and all of this one has come
  prepare_columns<false>(prepared, ROOM, rows, WAITING ? 0 : piece * PIECE_STEPS, piece_steps(piece), 0, 1, nullptr, nullptr);
  __syncwarp();
  if (piece + PIECE_WARPS < PIECES) stage_piece(raw, all, piece + PIECE_WARPS);
}

// What is added to a thread's results: read ahead of the products, which take longer.
struct Added {
  float bias[MINE], residual[MINE];
};

DEVICE bool result_at(int i, int unit, int count, int &token, int &o) { // the thread's result number i, if there is one
  const int e = i * THREADS + threadIdx.x;
  token = e / OUTPUTS, o = unit * OUTPUTS + e % OUTPUTS;
  return token < count && o < O;
}

// There are rows for all TOKENS.
DEVICE void read_added(Added &added, int unit, const float *bias, const float *residual) {
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    int token, o;
    if (!result_at(i, unit, TOKENS, token, o)) continue;
    if (BIAS) added.bias[i] = bias[o];
    if (RESIDUAL) added.residual[i] = residual[(s64)token * O + o];
  }
}

DEVICE void finish_unit(float *out, const float *sums, const Added &added, int unit, int count) {
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    int token, o;
    if (!result_at(i, unit, count, token, o)) continue;
    const float y = merged(sums, o / 16 % TILES, token, o % 16);
    out[(s64)token * O + o] = finished<BIAS, ACTIVATION, RESIDUAL>(y, &added.bias[i], &added.residual[i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    matvec(float *out, const float *x, const u8 *weight, BIAS_ARGUMENT RESIDUAL_ARGUMENT const int *rows) {
#if !BIAS
  const float *bias = nullptr;
#endif
#if !RESIDUAL
  const float *residual = nullptr;
#endif
  DYNAMIC_SHARED(memory);
  u8 *prepared = memory + piece_warp() * OWN_BYTES;
  float *raw = (float *)(prepared + COLUMNS_BYTES(ROOM)), *sums = (float *)(memory + PIECE_WARPS * OWN_BYTES);
  const Rows all = {x, nullptr, TOKENS, I};
  Ring<WEIGHT> ring;
  Walk walk = first_run();
  stage_piece(raw, all, piece_warp());
  load_first(ring, walk, weight);
  const int count = rows[0];

  const int unit = blockIdx.x;
  Added added;
  read_added(added, unit, bias, residual);
  const Columns columns = columns_at(prepared, ROOM);
  for (int piece = piece_warp(); piece < PIECES; piece += PIECE_WARPS) {
    prepare_piece(prepared, raw, all, piece);
    if (count <= 0) return;
    multiply_piece(ring, walk, weight, columns, 0, unit, piece, sums);
  }
  __syncthreads();
  finish_unit(out, sums, added, unit, count);
}
