// Products of up to eight rows of x with weights in tiles: weights run once from memory through a warp's registers, x lies in shared
// memory.
//
// Rows are few, so time is what it takes to read the weights, and that is a matter of how many bytes are on their way: every warp keeps
// AHEAD steps of loads in flight, across pieces, tiles and units, and the first of them leave before x is looked at. x and the norm's
// weights, few bytes, are asked for just before them (copies into shared memory), or they would queue behind them and come last.
//
// A UNIT is TILES tiles of sixteen outputs with all their pieces. Blocks of threads take units blockIdx.x, + gridDim.x, ... Warps of a
// block stand in a grid of PIECE_WARPS by TILE_WARPS: warp (p, i) does pieces p, p + PIECE_WARPS, ... of tiles i, i + TILE_WARPS, ... and
// leaves the sum of each (tile, piece) in shared memory. Behind a barrier the threads of the block add a tile's pieces up, in their order,
// and do what comes after the product, while the next unit's weights are on their way.
//
// A kernel says I (columns), ALL_TILES (tiles of the weight), UNITS and `tile_of(unit, i)` before it includes this file, and gets TOKENS
// (1 to 8), WEIGHT, TILES, TILE_WARPS (1 to TILES) and PIECE_WARPS (1 to the number of pieces) from outside.
//
// Columns of the matrix instructions do not know each other, and so rows of x behind the last that counts may hold anything; they are
// multiplied like the others, which saves waiting for rows[0], and what comes of them is not written.
//
// x in shared memory, of `steps` steps (COLUMNS_BYTES(steps)):
//     BF16, F16   [steps][TOKENS][4 t] of 16 bytes: the words b of Tokens
//     Q8_0, Q4_0  [steps][TOKENS][4 t] of 8 bytes, then float scale [steps][EVEN], int sum [steps][EVEN]; EVEN is TOKENS or one more
#pragma once
#include "norm.cuh"
#include "product.cuh"

constexpr int WARPS = TILE_WARPS * PIECE_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int RESIDENT = THREADS >= 512 ? 1 : 512 / THREADS; // blocks of threads on a multiprocessor: 16 warps, 128 registers
constexpr int STEPS = I / STEP;
constexpr int PIECES = pieces_of(I);
// Steps on their way, in registers: 8 KiB a warp, 4 KiB of the Q formats. Sixteen steps of Q8_0 left the dots too few registers (spills).
constexpr int AHEAD = WEIGHT == Q4_0 ? 16 : 8;
constexpr int PARTS = PIECE_STEPS / AHEAD;
constexpr int EVEN = (TOKENS + 1) / 2 * 2;
constexpr int PITCH = 20; // of sixteen sums: a warp stores those of four pairs of tokens without bank conflicts
constexpr int SUMS = PIECES * TILES * TOKENS * PITCH;

static_assert(TOKENS >= 1 && TOKENS <= 8, "stream: TOKENS is 1 to 8");
static_assert(I % STEP == 0, "stream: the width must be a multiple of 32");
static_assert(TILE_WARPS <= TILES && PIECE_WARPS <= PIECES, "stream: more warps than work");

#define COLUMNS_BYTES(steps) ((steps) * (quantised(WEIGHT) ? TOKENS * 32 + EVEN * 8 : TOKENS * 64))

// --- weights

template <int FORMAT> struct Ring {
  uint4 numbers[AHEAD][2];
};
template <> struct Ring<Q8_0> {
  uint4 numbers[AHEAD];
  u32 scales[AHEAD / 4]; // of steps t, t + 4, ...: a load of 128 bytes instead of four of 32
};
template <> struct Ring<Q4_0> {
  uint2 numbers[AHEAD];
  u32 scales[AHEAD / 4];
};

// A run is AHEAD steps of a piece, as far as they exist. The walk goes over all that are this warp's, in the order of its work.
struct Walk {
  int unit, piece, tile, part;
};

DEVICE int lane_of() { return threadIdx.x % 32; }
DEVICE int tile_warp() { return threadIdx.x / 32 % TILE_WARPS; }
DEVICE int piece_warp() { return threadIdx.x / 32 / TILE_WARPS; }

DEVICE Walk first_run() { return {(int)blockIdx.x, piece_warp(), tile_warp(), 0}; }
DEVICE void advance(Walk &walk) {
  if (++walk.part < PARTS) return;
  walk.part = 0;
  if ((walk.tile += TILE_WARPS) < TILES) return;
  walk.tile = tile_warp();
  if ((walk.piece += PIECE_WARPS) < PIECES) return;
  walk.piece = piece_warp();
  walk.unit += gridDim.x;
}

DEVICE int piece_steps(int piece) { return min(STEPS - piece * PIECE_STEPS, PIECE_STEPS); }
DEVICE int steps_left(int piece, int part) {
  return max(0, min(piece_steps(piece) - part * AHEAD, AHEAD));
}

// Where a lane finds a run's numbers and scales, and how many steps there are: none behind the last unit or tile.
struct Run {
  const u8 *numbers, *scales;
  int steps;
};
DEVICE Run run_at(const Walk &walk, const u8 *weight) {
  const int lane = lane_of(), tile = walk.unit < UNITS ? tile_of(walk.unit, walk.tile) : ALL_TILES;
  const s64 step = (s64)tile * STEPS + walk.piece * PIECE_STEPS + walk.part * AHEAD;
  const u8 *scales = weight + (s64)ALL_TILES * STEPS * step_bytes(WEIGHT) + (step + lane % 4) * SCALE_BYTES + lane / 4 * 4;
  const int lane_bytes = WEIGHT == Q4_0 ? 8 : 16;
  return {weight + step * step_bytes(WEIGHT) + lane * lane_bytes, scales, tile < ALL_TILES ? steps_left(walk.piece, walk.part) : 0};
}

DEVICE void load_step(Ring<BF16> &ring, int s, const Run &run) {
  ring.numbers[s][0] = load_once((const uint4 *)(run.numbers + s * step_bytes(BF16)));
  ring.numbers[s][1] = load_once((const uint4 *)(run.numbers + s * step_bytes(BF16) + 512));
}
DEVICE void load_step(Ring<F16> &ring, int s, const Run &run) {
  ring.numbers[s][0] = load_once((const uint4 *)(run.numbers + s * step_bytes(F16)));
  ring.numbers[s][1] = load_once((const uint4 *)(run.numbers + s * step_bytes(F16) + 512));
}
DEVICE void load_step(Ring<Q8_0> &ring, int s, const Run &run) {
  ring.numbers[s] = load_once((const uint4 *)(run.numbers + s * step_bytes(Q8_0)));
}
DEVICE void load_step(Ring<Q4_0> &ring, int s, const Run &run) {
  ring.numbers[s] = load_once((const uint2 *)(run.numbers + s * step_bytes(Q4_0)));
}
// The scales of the four steps up to s, once they are no longer wanted for the run before.
template <int FORMAT> DEVICE void load_scales(Ring<FORMAT> &ring, int s, const Run &run) {
  if constexpr (quantised(FORMAT)) {
    const int first = s / 4 * 4;
    const u32 *scales = (const u32 *)(run.scales + first * SCALE_BYTES);
    if (s == first + 3 && first + lane_of() % 4 < run.steps) ring.scales[s / 4] = load_once(scales);
  }
}

DEVICE Weights<BF16> weights_of(const Ring<BF16> &ring, int s) {
  const uint4 a = ring.numbers[s][0], b = ring.numbers[s][1];
  return {{{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}}};
}
DEVICE Weights<F16> weights_of(const Ring<F16> &ring, int s) {
  const uint4 a = ring.numbers[s][0], b = ring.numbers[s][1];
  return {{{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}}};
}
DEVICE u32 scales_of(const u32 *scales, int s) { return __shfl_sync(ALL_LANES, scales[s / 4], lane_of() / 4 * 4 + s % 4); }
DEVICE Weights<Q8_0> weights_of(const Ring<Q8_0> &ring, int s) {
  const uint4 a = ring.numbers[s];
  return {{a.x, a.y, a.z, a.w}, scales_of(ring.scales, s)};
}
DEVICE Weights<Q4_0> weights_of(const Ring<Q4_0> &ring, int s) {
  const uint2 a = ring.numbers[s];
  return {{a.x, a.y}, scales_of(ring.scales, s)};
}

DEVICE void load_first(Ring<WEIGHT> &ring, const Walk &walk, const u8 *weight) {
  const Run run = run_at(walk, weight);
#pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    if (s < run.steps) load_step(ring, s, run);
    load_scales(ring, s, run);
  }
}

// --- x

// A lane's view of prepared columns: token g, and tokens 2t and 2t + 1, whose results it gets. Lanes of tokens that do not exist read
// another token, and nobody reads what they compute.
struct Columns {
  const u8 *numbers;
  const float *scale;
  const int *sum;
};
DEVICE Columns columns_at(const u8 *x, int steps) {
  const int g = lane_of() / 4, t = lane_of() % 4, token = g < TOKENS ? g : 0, pair = 2 * t < TOKENS ? 2 * t : 0;
  if (!quantised(WEIGHT)) return {x + token * 64 + t * 16, nullptr, nullptr};
  const float *scale = (const float *)(x + steps * TOKENS * 32);
  return {x + token * 32 + t * 8, scale + pair, (const int *)(scale + steps * EVEN) + pair};
}
template <int FORMAT> DEVICE Tokens<FORMAT> tokens_of(const Columns &x, int step) {
  if constexpr (quantised(FORMAT)) {
    const uint2 b = *(const uint2 *)(x.numbers + step * TOKENS * 32);
    const float2 scale = *(const float2 *)(x.scale + step * EVEN);
    Tokens<FORMAT> tokens;
    tokens.b[0] = b.x, tokens.b[1] = b.y, tokens.scale[0] = scale.x, tokens.scale[1] = scale.y;
    if constexpr (FORMAT == Q4_0) {
      const int2 sum = *(const int2 *)(x.sum + step * EVEN);
      tokens.sum[0] = sum.x, tokens.sum[1] = sum.y;
    }
    return tokens;
  } else {
    const uint4 b = *(const uint4 *)(x.numbers + step * TOKENS * 64);
    return {{b.x, b.y, b.z, b.w}};
  }
}

// A cell to its place among prepared columns; the whole warp, of whom those with `there` have one.
template <int FORMAT> DEVICE void put_cell(u8 *x, int steps, int cell, const float (&v)[8], bool there) {
  if constexpr (quantised(FORMAT)) {
    float scale;
    int sum;
    const uint2 b = quantise_cell(v, scale, sum);
    if (!there) return;
    ((uint2 *)x)[cell] = b;
    const int t = cell % 4, token = cell / 4 % TOKENS, step = cell / 4 / TOKENS;
    float *scales = (float *)(x + steps * TOKENS * 32);
    const bool odd = EVEN > TOKENS && token == TOKENS - 1; // the token that makes them even: somebody must write its zeros
    if (t == 0) scales[step * EVEN + token] = scale;
    if (t == 1) ((int *)(scales + steps * EVEN))[step * EVEN + token] = sum;
    if (odd && t == 2) scales[step * EVEN + token + 1] = 0.0f;
    if (odd && t == 3) ((int *)(scales + steps * EVEN))[step * EVEN + token + 1] = 0;
  } else if (there) {
    ((uint4 *)x)[cell] = round_cell<FORMAT>(v);
  }
}

// A kernel's rows of x, in global or shared memory: tokens 0 .. count - 1, `stride` numbers from row to row.
struct Rows {
  const float *x;
  const int *index; // whose row is x[index[token]], or null: x[token]
  int count, stride;
};
DEVICE const float *row_of(const Rows &rows, int token) {
  return rows.x + (s64)(rows.index ? rows.index[token] : token) * rows.stride;
}

// `width` numbers of every row, from `first` on, on their way to raw [TOKENS][pitch] in shared memory; all `threads` of them come along.
DEVICE void stage_rows(float *raw, int pitch, const Rows &rows, int first, int width, int thread, int threads) {
  for (int token = 0; token < rows.count; token++) {
    const float *row = row_of(rows, token) + first;
    for (int i = thread * 4; i < width; i += threads * 4) copy_16(raw + token * pitch + i, row + i);
  }
}

// Steps `first` .. `first + steps - 1` of all tokens, rounded, into x, which has room for `room` steps: by `warps` warps, this one being
// number `warp`. `norm` [I] and `inverse` [TOKENS] if NORMED.
template <bool NORMED>
DEVICE void prepare_columns(u8 *x, int room, const Rows &rows, int first, int steps, int warp, int warps, const float *norm,
                            const float *inverse) {
  const int cells = steps * TOKENS * 4;
#pragma unroll 2
  for (int base = warp * 32; base < cells; base += warps * 32) {
    const int cell = base + lane_of(), t = cell % 4, token = cell / 4 % TOKENS;
    const bool there = cell < cells;
    const int column = (first + cell / 4 / TOKENS) * STEP;
    float v[8] = {};
    if (there && token < rows.count) {
      read_cell<WEIGHT>(v, row_of(rows, token) + column, t);
      if constexpr (NORMED) {
        float w[8];
        read_cell<WEIGHT>(w, norm + column, t);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = normed(v[i], inverse[token], w[i]);
      }
    }
    put_cell<WEIGHT>(x, room, cell, v, there);
  }
}

// What a kernel with a norm has in shared memory.
constexpr bool STAGED = TOKENS * I <= 8192; // rows of x wait in shared memory, up to 32 KiB; more are read twice from global memory
struct Workplace {
  u8 *prepared;          // COLUMNS_BYTES(STEPS)
  float *norm, *raw;     // [I], [TOKENS * I] if STAGED
  float *sums, *scratch; // [SUMS], [TOKENS * (NORM_WARPS + 1)]
  float *behind;         // what else a kernel wants
};
DEVICE Workplace workplace_at(u8 *memory) {
  Workplace place;
  place.prepared = memory;
  place.norm = (float *)(memory + COLUMNS_BYTES(STEPS));
  place.raw = place.norm + I;
  place.sums = place.raw + (STAGED ? TOKENS * I : 0);
  place.scratch = place.sums + SUMS;
  place.behind = place.scratch + TOKENS * (NORM_WARPS + 1);
  return place;
}

// Norm's weights and x, by the whole block of threads, on their way; before the first weights, unless x is not known so early.
DEVICE void stage_normed(const Workplace &place, const Rows &rows, const float *norm) {
  for (int i = threadIdx.x * 4; i < I; i += THREADS * 4) copy_16(place.norm + i, norm + i);
  if (STAGED) stage_rows(place.raw, I, rows, 0, I, threadIdx.x, THREADS);
  copy_commit();
}

// All columns, normed and rounded, by the whole block of threads, behind `stage_normed`, with the barriers that it takes.
DEVICE void prepare_normed(const Workplace &place, const Rows &given, float eps) {
  const int warp = threadIdx.x / 32;
  float *inverse = place.scratch + TOKENS * NORM_WARPS;
  const Rows rows = STAGED ? Rows{place.raw, nullptr, given.count, I} : given;
  copy_wait<0>();
  __syncthreads();
  for (int i = warp; i < rows.count * NORM_WARPS; i += WARPS) {
    const float sum = square_sum(row_of(rows, i / NORM_WARPS), I, i % NORM_WARPS, lane_of());
    if (lane_of() == 0) place.scratch[i] = sum;
  }
  __syncthreads();
  if ((int)threadIdx.x < rows.count) inverse[threadIdx.x] = inverse_root(place.scratch + threadIdx.x * NORM_WARPS, I, eps);
  __syncthreads();
  prepare_columns<true>(place.prepared, STEPS, rows, 0, STEPS, warp, WARPS, place.norm, inverse);
  __syncthreads();
}

// --- products

// Four steps of a run, from s on: c += W x, each step's registers filled anew from `next` as soon as they are free.
template <bool WHOLE>
DEVICE void multiply_four(float (&c)[4], Ring<WEIGHT> &ring, const Columns &x, int step, int s, int steps, const Run &next) {
#pragma unroll
  for (int end = s + 4; s < end; s++) {
    if (WHOLE || s < steps) multiply(c, weights_of(ring, s), tokens_of<WEIGHT>(x, step + s));
    if (WHOLE || s < next.steps) load_step(ring, s, next);
    load_scales(ring, s, next);
  }
}

// A run of a (tile, piece). By fours, because the compiler would mix more steps than it has registers for.
DEVICE void multiply_run(float (&c)[4], Ring<WEIGHT> &ring, const Columns &x, int step, int steps, const Run &next) {
#pragma unroll
  for (int s = 0; s < AHEAD; s += 4) {
    if (s + 4 <= steps && s + 4 <= next.steps) multiply_four<true>(c, ring, x, step, s, steps, next);
    else multiply_four<false>(c, ring, x, step, s, steps, next);
  }
}

DEVICE void put_sums(const float (&c)[4], float *sums) { // of one (tile, piece): [TOKENS][PITCH]
  const int g = lane_of() / 4, token = lane_of() % 4 * 2;
  float *to = sums + token * PITCH + g;
  if (token < TOKENS) to[0] = c[0], to[8] = c[2];
  if (token + 1 < TOKENS) to[PITCH] = c[1], to[PITCH + 8] = c[3];
}

// This warp's tiles of one piece. `x` holds the piece's columns from its step `step` on. `sums` [SUMS] are as merged() reads them.
DEVICE void multiply_piece(Ring<WEIGHT> &ring, Walk &walk, const u8 *weight, const Columns &x, int step, int unit, int piece, float *sums) {
  for (int tile = tile_warp(); tile < TILES; tile += TILE_WARPS) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const bool there = tile_of(unit, tile) < ALL_TILES;
    for (int part = 0; part < PARTS; part++) {
      advance(walk);
      const Run next = run_at(walk, weight);
      const int steps = there ? steps_left(piece, part) : 0;
      multiply_run(c, ring, x, step + part * AHEAD, steps, next);
    }
    put_sums(c, sums + (piece * TILES + tile) * TOKENS * PITCH);
  }
}

// All of this warp's pieces, with the columns of all of them in x.
DEVICE void multiply_unit(Ring<WEIGHT> &ring, Walk &walk, const u8 *weight, const Columns &x, int unit, float *sums) {
  for (int piece = piece_warp(); piece < PIECES; piece += PIECE_WARPS) {
    multiply_piece(ring, walk, weight, x, piece * PIECE_STEPS, unit, piece, sums);
  }
}

// The pieces of output `row` of a tile for one token, added up in their order.
DEVICE float merged(const float *sums, int tile, int token, int row) {
  const float *at = sums + (tile * TOKENS + token) * PITCH + row;
  float sum = at[0];
#pragma unroll 8
  for (int piece = 1; piece < PIECES; piece++) sum += at[piece * TILES * TOKENS * PITCH];
  return sum;
}
