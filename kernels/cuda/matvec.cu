// out = activation(x . weight^T + bias) + residual, for up to eight rows
//
//   out       [T, O] float32   does not alias x or residual
//   x         [T, I] float32
//   weight    tiles (product.cuh) of WEIGHT = BF16, F16, Q8_0 or Q4_0, O rounded up to a multiple of 16
//   bias      [O] float32, if BIAS; with BIAS_PITCH = O [T, O], a row's own (lora_bias.cu)
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        number of rows of x, 0 to T = TOKENS; later rows of out are not touched
//
// ACTIVATION: NO_ACTIVATION or GELU, the tanh form. I % 32 == 0, any O. Rounding and the order of arithmetic are product.cuh's.
//
// Unit of work: TILES tiles of sixteen outputs (stream.cuh), one unit a thread block. Each warp rounds the columns of its own pieces, into
// its own part of shared memory: TILE_WARPS is 1. The launcher computes
//
//     pieces = ceil(I / 512); tiles = ceil(O / 16)
//     TILES = 2 if TOKENS > 2 and tiles >= 1.5 * multiprocessors and I <= 16384, else 1; grid = ceil(tiles / TILES)
//     PIECE_WARPS = even(pieces, min(pieces, max(4, 16 / ceil(grid / multiprocessors)))); block = 32 * PIECE_WARPS
//     shared = PIECE_WARPS * (COLUMNS_BYTES(room) + (128 * TOKENS * room if TOKENS <= 2)) + 4 * pieces * TILES * TOKENS * 20
//
// with even(pieces, max) = ceil(pieces / ceil(pieces / max)) and room = min(16, I / 32). Thus all thread blocks are resident at once if
// possible, up to sixteen warps a multiprocessor: each gets its share of the memory bandwidth, and no second wave starts with empty
// pipelines.
#define ALL_TILES ((O + 15) / 16)
#define UNITS ((ALL_TILES + TILES - 1) / TILES)
#include "stream.cuh"

static_assert(TILE_WARPS == 1, "matvec: TILE_WARPS must be 1, as each warp has its own columns");

constexpr int ROOM = STEPS < PIECE_STEPS ? STEPS : PIECE_STEPS;
constexpr bool PREFETCH = TOKENS <= 2;  // a piece of x is copied to shared memory while the one before is multiplied
constexpr int WARP_BYTES = COLUMNS_BYTES(ROOM) + (PREFETCH ? TOKENS * ROOM * STEP * 4 : 0);
constexpr int OUTPUTS = TILES * 16;                                  // of a unit, for a token
constexpr int RESULTS = (OUTPUTS * TOKENS + THREADS - 1) / THREADS;  // of a unit that a thread finishes

#include "addends.cuh"

// What is added to a thread's results: read before the products, which take longer.
struct Addends {
  float bias[RESULTS], residual[RESULTS];
};

DEVICE void stage_piece(float *raw, const InputRows &all, int piece);
DEVICE void prepare_piece(u8 *prepared, float *raw, const InputRows &all, int piece);
DEVICE void read_addends(Addends &addends, int unit, const float *bias, const float *residual);
DEVICE void finish_unit(float *out, const float *sums, const Addends &addends, int unit, int count);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    matvec(float *out, const float *x, const u8 *weight, BIAS_ARGUMENT RESIDUAL_ARGUMENT const int *rows) {
#if !BIAS
  const float *bias = nullptr;
#endif
#if !RESIDUAL
  const float *residual = nullptr;
#endif
  DYNAMIC_SHARED(memory);
  u8 *prepared = memory + piece_warp() * WARP_BYTES;
  float *raw = (float *)(prepared + COLUMNS_BYTES(ROOM)), *sums = (float *)(memory + PIECE_WARPS * WARP_BYTES);
  Ring ring;
  Walk walk = first_run();
  load_first(ring, walk, weight);
  await_previous();
  const InputRows all = {x, nullptr, TOKENS, I};
  stage_piece(raw, all, piece_warp());
  const int count = rows[0];

  const int unit = blockIdx.x;
  Addends addends;
  read_addends(addends, unit, bias, residual);
  const Columns columns = columns_at(prepared, ROOM);
  for (int piece = piece_warp(); piece < PIECES; piece += PIECE_WARPS) {
    prepare_piece(prepared, raw, all, piece);
    if (count <= 0) return;
    multiply_piece(ring, walk, weight, columns, 0, unit, piece, sums);
  }
  begin_next();
  __syncthreads();
  finish_unit(out, sums, addends, unit, count);
}

DEVICE int tile_of(int unit, int i) { return unit * TILES + i; }

// Starts copies of a piece's columns to raw [TOKENS][ROOM * STEP], which is this warp's.
DEVICE void stage_piece(float *raw, const InputRows &all, int piece) {
  if (PREFETCH) stage_rows(raw, ROOM * STEP, all, piece * PIECE, STEP * piece_steps(piece), lane_of(), 32);
  copy_commit();
}

// Rounds the piece's columns; this warp's next piece is then copied to `raw`.
DEVICE void prepare_piece(u8 *prepared, float *raw, const InputRows &all, int piece) {
  const InputRows rows = PREFETCH ? InputRows{raw, nullptr, TOKENS, ROOM * STEP} : all;
  copy_wait<0>();
  __syncwarp();  // all lanes have finished with the piece before, and all of this one has arrived
  prepare_columns<false>(prepared, ROOM, rows, PREFETCH ? 0 : piece * PIECE_STEPS, piece_steps(piece), 0, 1, nullptr, nullptr);
  __syncwarp();
  if (piece + PIECE_WARPS < PIECES) stage_piece(raw, all, piece + PIECE_WARPS);
}

// The thread's result number i; false if there is none.
DEVICE bool result_at(int i, int unit, int count, int &token, int &o) {
  const int e = i * THREADS + threadIdx.x;
  token = e / OUTPUTS, o = unit * OUTPUTS + e % OUTPUTS;
  return token < count && o < O;
}

// The memory has rows for all TOKENS, whatever their number.
DEVICE void read_addends(Addends &addends, int unit, const float *bias, const float *residual) {
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    int token, o;
    if (!result_at(i, unit, TOKENS, token, o)) continue;
    if (BIAS) addends.bias[i] = bias[(s64)token * BIAS_PITCH + o];
    if (RESIDUAL) addends.residual[i] = residual[(s64)token * O + o];
  }
}

DEVICE void finish_unit(float *out, const float *sums, const Addends &addends, int unit, int count) {
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    int token, o;
    if (!result_at(i, unit, count, token, o)) continue;
    const float y = sum_of_pieces(sums, o / 16 % TILES, token, o % 16);
    out[(s64)token * O + o] = finished<BIAS, ACTIVATION, RESIDUAL>(y, &addends.bias[i], &addends.residual[i]);
  }
}
