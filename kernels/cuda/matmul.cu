// out = activation(x . weight^T + bias) + residual, or silu(gate) * up of the two halves of the outputs; for more than a few rows
//
//   out        [T, O] float32      does not alias residual
//   partial    float4, if SPLIT > 1: scratch for the sums of pieces
//   counters   [tiles of out] uint32, if SPLIT > 1; zero between launches: the last thread block to arrive resets its counter
//   prepared   x as quantize_input.cu lays it out for WEIGHT: [T, I] rounded, in fragments
//   weight     tiles (product.cuh) of WEIGHT = BF16, F16, Q8_0 or Q4_0 of [O, I]; if SILU of [2 O, I], the rows of gate, then those of up
//   bias       [O] float32 from number BIAS_FIRST on, if BIAS; [2 O] if SILU; with BIAS_PITCH that many of each row (lora_bias.cu)
//   residual   [T, O] float32, if RESIDUAL; not with SILU. If RESIDUAL is GATE: out = silu(residual) * (the rest), for a gate whose weights
//              have another format than those of up
//   rows       [1] int32           number of rows of x, 0 to T; later rows of out are not touched
//   T          integer             rows of prepared; the text does not depend on it
//
// If EXPERTS is defined, out is that of pairs of a row and one of its experts (list_experts.cu): weight is that of all experts, [EXPERTS O, I], with
// SILU gate of all and then up of all, bias likewise; prepared has a row for each place of `order`, and in place of rows there are
//
//   order      [T] int32           the row of out of each place, -1 for none
//   tasks      [2 + 3 N] int32     of up to TASK groups of eight places, each of one expert; TILE_T divides 8 TASK
//
// T % 8 == 0, I % 32 == 0, any O (SILU: O % 16 == 0, and TILE_O / WARPS_O % 32 == 0). ACTIVATION: NO_ACTIVATION or GELU. The order of
// every sum is that of product.cuh, so a row has the bits that matvec gives it.
//
// Unit of work: a thread block computes a tile of TILE_O rows of weight by TILE_T tokens (multiples of 16 and 8). Its warps form WARPS_K
// teams of WARPS_O x WARPS_T warps; a team takes every WARPS_K-th piece of 512 columns, and the teams' sums are merged after each such
// round. The columns pass through a ring of STAGES stages of K_BLOCKS (1, 2 or 4) x 32 columns for each team, by copies that overlap with
// the arithmetic. With SPLIT > 1 the pieces are divided among SPLIT thread blocks: the first adds up its own, the others store each of
// theirs in `partial`, and the last of them to arrive adds all in ascending order. Both operands are stored in memory as fragments of mma,
// so a stage needs no rearrangement and no swizzle: every load from shared memory is of 16 bytes a lane, contiguous over the lanes.
//
//   block = 32 WARPS_O WARPS_T WARPS_K threads, numbers of warps powers of two; RESIDENT (at least 1): such blocks that shall fit on a
//     multiprocessor by their registers
//   row_blocks = ceil(rows of weight / TILE_O), token_blocks = ceil(T / TILE_T)
//   grid (row_blocks token_blocks, SPLIT, 1); consecutive blocks cover BAND token_blocks, then the next row_block
//   shared = STAGES WARPS_K STAGE + (WARPS_K - 1) TILE_O TILE_T 4 bytes,
//     STAGE = K_BLOCKS (TILE_O / 16 W + TILE_T / 8 X), W = 1024, 544, 288 and X = 512, 320, 320 for 16 bits, Q8_0, Q4_0
//   partial = (pieces - ceil(pieces / SPLIT) + 1) row_blocks token_blocks TILE_O TILE_T 4 bytes, pieces = ceil(I / 512);
//     SPLIT so that (SPLIT - 1) ceil(pieces / SPLIT) < pieces
//
// The shape of the pipeline is that of CUTLASS's multistage product for sm_80 (Kerr et al., 2017-2020).
#include "matmul_copy.cuh"
#include "matmul_sums.cuh"

#if SPLIT > 1
#define SPLIT_ARGUMENTS float4 *partial, u32 *counters,
#else
#define SPLIT_ARGUMENTS
#endif
#ifndef BIAS_FIRST  // of the outputs' biases in `bias`
#define BIAS_FIRST 0
#endif
#include "addends.cuh"
#if BY_EXPERT
#define ROWS_ARGUMENTS const int *order, const int *tasks
#else
#define ROWS_ARGUMENTS const int *rows
#endif

DEVICE void sum_pieces(Sums &total, float4 *partial, u8 *ring, const Source &source, const Tile &tile, const Place &place);
DEVICE void write(float *out, const Sums &total, const float *bias, const float *residual, const Tile &tile, const int *order, int count,
                  const Place &place);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    matmul(float *out, SPLIT_ARGUMENTS const u8 *prepared, const u8 *weight, BIAS_ARGUMENT RESIDUAL_ARGUMENT ROWS_ARGUMENTS, int T) {
  await_previous();
#if SPLIT == 1
  float4 *partial = nullptr;
#endif
#if !BIAS
  const float *bias = nullptr;
#endif
#if !RESIDUAL
  const float *residual = nullptr;
#endif
  DYNAMIC_SHARED(ring);
#if BY_EXPERT
  const int count = tasks[0];
  const Tile tile = tile_of_task(tasks);
#else
  const int *order = nullptr, count = rows[0];
  const Tile tile = tile_of_block(count);
#endif
  if (tile.groups <= 0) return;
  const Place place = place_of_thread();
  Sums total;
  sum_pieces(total, partial, ring, source_of(prepared, weight, T, tile, place.thread), tile, place);
#if SPLIT > 1
  if (!is_last_split(total, partial, counters, tile, place)) return;
#endif
  if (place.team == 0 && place.warp_t * WARP_T < tile.groups) write(out, total, bias, residual, tile, order, count, place);
}

// The sums of the tile's pieces, merged as `end_round` says.
DEVICE void sum_pieces(Sums &total, float4 *partial, u8 *ring, const Source &source, const Tile &tile, const Place &place) {
  float4 *merge = (float4 *)(ring + STAGES * WARPS_K * STAGE);
  u8 *own = ring + place.team * STAGE;
  const bool useful = place.warp_t * WARP_T < tile.groups;
  Sums sums;
  fill(total, -0.0f);  // the neutral element of addition: it preserves every bit of what is added
  fill(sums, 0.0f);
  const int steps = steps_of(tile);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < steps) fetch(own + i * (WARPS_K * STAGE), source, tile, i, place.team, place.thread);
    copy_commit();
  }
  int reading = 0, writing = STAGES - 1;
  for (int i = 0; i < steps; i++) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    const int blocks = blocks_at(tile, i, place.team);
#pragma unroll 2
    for (int k = 0; k < K_BLOCKS; k++) {
      if (useful && k < blocks) multiply_stage(sums, own + reading * (WARPS_K * STAGE), k, place.warp_o, place.warp_t, place.lane);
      if (k > 0) continue;  // the copies come after the first block, so that the tensor cores are busy meanwhile
      if (i + STAGES - 1 < steps) fetch(own + writing * (WARPS_K * STAGE), source, tile, i + STAGES - 1, place.team, place.thread);
      copy_commit();
    }
    if (i % STAGES_OF_PIECE == STAGES_OF_PIECE - 1 || i == steps - 1)
      end_round(total, sums, partial, merge, tile, tile.first + i / STAGES_OF_PIECE * WARPS_K, place.team, place.warp, place.lane);
    reading = reading + 1 < STAGES ? reading + 1 : 0;
    writing = writing + 1 < STAGES ? writing + 1 : 0;
  }
  copy_wait<0>();
}

// The row of out of the tile's token number `token`; -1 if there is none.
DEVICE int row_of(const Tile &tile, int token, const int *order, int count) {
  const int place = tile.first_group * 8 + token;
  if (BY_EXPERT) return token / 8 < tile.groups ? order[place] : -1;
  return place < count ? place : -1;
}

// What is added to an output; each is read only if there is such a thing.
struct Addends {
  float bias, up_bias, residual;
};

// Everything that is added to a row tile is read before any of it is written: the compiler must assume that a write changes what is read
// next, and 32 reads would wait for each other. On an H100, [2048, 2048] and 64 rows, that took 18 us in the profiler, which empties the
// caches, and without a residual 4 us in a step.
DEVICE void write(float *out, const Sums &total, const float *bias, const float *residual, const Tile &tile, const int *order, int count,
                  const Place &place) {
  constexpr int OUT_WARP_O = SILU ? WARP_O / 2 : WARP_O;  // tiles of out of a warp
  int rows[WARP_T][2];
#pragma unroll
  for (int i = 0; i < WARP_T * 2; i++)
    rows[i / 2][i % 2] = row_of(tile, (place.warp_t * WARP_T + i / 2) * 8 + place.lane % 4 * 2 + i % 2, order, count);
#pragma unroll
  for (int m = 0; m < OUT_WARP_O; m++) {
    const int first = (tile.row_block * OUT_TILES_OF_BLOCK + out_tile(place.warp_o * WARP_O + m)) * 16 + place.lane / 4;
    Addends addends[WARP_T][4];
#pragma unroll
    for (int i = 0; i < WARP_T * 4; i++) {
      const int row = rows[i / 4][i % 2], o = first + i % 4 / 2 * 8;
      Addends &own = addends[i / 4][i % 4];
      own = {};
      if (o >= O || row < 0) continue;
      const float *own_bias = bias + (u64)row * BIAS_PITCH + BIAS_FIRST + tile.expert * O + o;
      if (BIAS) own.bias = *own_bias;
      if (BIAS && SILU) own.up_bias = own_bias[EXPERTS * O];
      if (RESIDUAL) own.residual = residual[(u64)row * O + o];
    }
#pragma unroll
    for (int i = 0; i < WARP_T * 4; i++) {
      const int n = i / 4, e = i % 4, row = rows[n][e % 2], o = first + e / 2 * 8;
      if (o >= O || row < 0) continue;
      const Addends &own = addends[n][e];
      float y = finished<BIAS, ACTIVATION, RESIDUAL>(total[m][n][e], &own.bias, &own.residual);
      if constexpr (SILU) y = gated(y, finished<BIAS, NO_ACTIVATION, 0>(total[m + OUT_WARP_O][n][e], &own.up_bias, nullptr));
      out[(u64)row * O + o] = y;
    }
  }
}
