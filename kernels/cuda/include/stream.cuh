// Products of up to eight rows of x with weights in tiles: weights stream once from memory through a warp's registers; x is in shared
// memory.
//
// With few rows, the time is that of reading the weights, and depends on how many bytes are in flight: every warp keeps STEPS_AHEAD steps
// of loads in flight, across pieces, tiles and units, and issues the first of them before it looks at x, where it can even before the
// kernel that computes x has ended (await_previous). The norm's weights are few bytes and are requested just before (copies into shared
// memory).
//
// A UNIT is TILES tiles of sixteen outputs with all their pieces. Thread blocks take units blockIdx.x, + gridDim.x, ... The warps of a
// block form a grid of PIECE_WARPS by TILE_WARPS: warp (p, i) computes pieces p, p + PIECE_WARPS, ... of tiles i, i + TILE_WARPS, ... and
// stores the sum of each (tile, piece) in shared memory. After a barrier the threads of the block add the pieces of each tile in order and
// compute what follows the product, while the next unit's weights are in flight.
//
// Before it includes this file, a kernel defines I (columns), ALL_TILES (tiles of the weight) and UNITS; it also defines `tile_of`. TOKENS
// (1 to 8), WEIGHT, TILES, TILE_WARPS (1 to TILES) and PIECE_WARPS (1 to the number of pieces) come from the host.
//
// The columns of a matrix instruction are independent, so rows of x from rows[0] on may hold anything: they are multiplied like the others,
// which saves waiting for rows[0], and their results are not written.
//
// x in shared memory, `steps` steps of it (COLUMNS_BYTES(steps)):
//     float weights      [steps][TOKENS][4 t] of XCell: the words b of Tokens
//     packed integers    [steps][TOKENS][4 t] of 8 bytes, then float scale [steps][EVEN], int sum [steps][EVEN], as quantize_cell gives
//                        them; EVEN is TOKENS rounded up to a multiple of 2
#pragma once
#include "norm.cuh"
#include "product.cuh"

constexpr int WARPS = TILE_WARPS * PIECE_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int RESIDENT = THREADS >= 512 ? 1 : 512 / THREADS;  // thread blocks on a multiprocessor: 16 warps, 128 registers a thread
constexpr int STEPS = I / STEP;                               // a multiple of STEPS_OF_BLOCK
constexpr int PIECES = pieces_of(I);
constexpr int PARTS = PIECE_STEPS / STEPS_AHEAD;  // of a piece
constexpr int EVEN = (TOKENS + 1) / 2 * 2;
// Floats from token to token of a tile's sums: a warp stores those of four pairs of tokens without bank conflicts.
constexpr int PITCH = 20;
constexpr int SUMS_SIZE = PIECES * TILES * TOKENS * PITCH;

static_assert(TOKENS >= 1 && TOKENS <= 8, "stream: TOKENS must be 1 to 8");
static_assert(I % STEP == 0 && STEPS % STEPS_OF_BLOCK == 0, "stream: the width must be a multiple of 32 and of the format's blocks");
static_assert(TILE_WARPS <= TILES && PIECE_WARPS <= PIECES, "stream: more warps than work");

#if SCALED_X
#define COLUMNS_BYTES(steps) ((steps) * (TOKENS * 4 * (int)sizeof(XCell) + EVEN * 8))
#else
#define COLUMNS_BYTES(steps) ((steps) * TOKENS * 4 * (int)sizeof(XCell))
#endif

// Defined by the kernel: tile i of a unit, or ALL_TILES for none.
DEVICE int tile_of(int unit, int i);

DEVICE int lane_of() { return threadIdx.x % 32; }
DEVICE int tile_warp() { return threadIdx.x / 32 % TILE_WARPS; }
DEVICE int piece_warp() { return threadIdx.x / 32 / TILE_WARPS; }

// --- weights

#if QUANTIZED
constexpr int RECORD_STEPS = STEPS_OF_BLOCK < 4 ? 4 : STEPS_OF_BLOCK;  // steps whose records a warp loads together
constexpr int RECORD_WORDS = RECORD_STEPS / STEPS_OF_BLOCK * WORDS;    // of these, for one g
constexpr int SHARE = (RECORD_WORDS + 3) / 4;  // what a lane loads of them: words lane / 8, + 4, ... of g = lane % 8
#endif

// The steps in flight.
struct Ring {
  Chunk chunks[CHUNKS ? STEPS_AHEAD / STEPS_OF_BLOCK * CHUNKS : 1];
#if QUANTIZED
  u32 shares[STEPS_AHEAD / RECORD_STEPS][SHARE];
  u32 record[WORDS];  // of the block that is multiplied, for the lane's g
#endif
};

// Position of a run, the STEPS_AHEAD steps (or as many as exist) of a part of a piece. A warp walks over all of its runs in the order of
// its work.
struct Walk {
  int unit, piece, tile, part;
};
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
DEVICE int steps_of_part(int piece, int part) { return max(0, min(piece_steps(piece) - part * STEPS_AHEAD, STEPS_AHEAD)); }

// Where a lane finds a run's chunks and its share of the records, and the number of steps: 0 after the last unit or tile.
struct Run {
  const u8 *chunks;
#if QUANTIZED
  const u8 *records;
#endif
  int steps;
};
DEVICE Run run_at(const Walk &walk, const u8 *weight) {
  const int lane = lane_of(), tile = walk.unit < UNITS ? tile_of(walk.unit, walk.tile) : ALL_TILES;
  const s64 step = (s64)tile * STEPS + walk.piece * PIECE_STEPS + walk.part * STEPS_AHEAD;
  const int steps = tile < ALL_TILES ? steps_of_part(walk.piece, walk.part) : 0;
  const u8 *chunks = weight + step * STEP_BYTES + lane * (int)sizeof(Chunk);
#if QUANTIZED
  const u8 *records = weight + (s64)ALL_TILES * STEPS * STEP_BYTES + lane * (int)sizeof(RecordWord);
  return {chunks, records + step / STEPS_OF_BLOCK * RECORD_BYTES, steps};
#else
  return {chunks, steps};
#endif
}

// The chunks that nothing needs after step s; `run` is the one they are taken from.
DEVICE void load_chunks(Ring &ring, int s, const Run &run) {
  const int block = s / STEPS_OF_BLOCK;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    if (last_step(i) != s % STEPS_OF_BLOCK) continue;
    ring.chunks[block * CHUNKS + i] = load_once((const Chunk *)(run.chunks + block * BLOCK_BYTES + i * CHUNK_BYTES));
  }
}
// The records of the steps around s, once those of the run before are no longer needed: from the last block's first step on.
template <bool WHOLE> DEVICE void load_records(Ring &ring, int s, const Run &run) {
#if QUANTIZED
  if (s % RECORD_STEPS != RECORD_STEPS - STEPS_OF_BLOCK) return;
  const int group = s / RECORD_STEPS, first = group * RECORD_STEPS;
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const int word = 4 * i + lane_of() / 8;
    if (4 * i + 3 >= RECORD_WORDS && word >= RECORD_WORDS) continue;
    if (!WHOLE && first + word / WORDS * STEPS_OF_BLOCK >= run.steps) continue;
    const u8 *records = run.records + first / STEPS_OF_BLOCK * RECORD_BYTES;
    ring.shares[group][i] = load_once((const RecordWord *)records + 32 * i);
  }
#endif
}

DEVICE void load_first(Ring &ring, const Walk &walk, const u8 *weight) {
  const Run run = run_at(walk, weight);
#pragma unroll
  for (int s = 0; s < STEPS_AHEAD; s++) {
    if (s < run.steps) load_chunks(ring, s, run);
    load_records<false>(ring, s, run);
  }
}

// --- x

// A lane's view of prepared columns: token g, and tokens 2t and 2t + 1, whose results it gets. Lanes of tokens that do not exist read
// another token, and their results are not used.
struct Columns {
  const u8 *numbers;
#if SCALED_X
  const float *scale;
  const int *sum;
#endif
};
DEVICE Columns columns_at(const u8 *x, int steps) {
  const int g = lane_of() / 4, t = lane_of() % 4, token = g < TOKENS ? g : 0;
#if SCALED_X
  const int pair = 2 * t < TOKENS ? 2 * t : 0;
  const float *scale = (const float *)(x + steps * TOKENS * 4 * (int)sizeof(XCell));
  return {x + (token * 4 + t) * (int)sizeof(XCell), scale + pair, (const int *)(scale + steps * EVEN) + pair};
#else
  return {x + (token * 4 + t) * (int)sizeof(XCell)};
#endif
}
DEVICE Tokens tokens_of(const Columns &x, int step) {
#if SCALED_X
  const int2 sum = SUMS ? *(const int2 *)(x.sum + step * EVEN) : make_int2(0, 0);
  return tokens_from(*(const XCell *)(x.numbers + step * TOKENS * 4 * (int)sizeof(XCell)), *(const float2 *)(x.scale + step * EVEN), sum);
#else
  return tokens_at(x.numbers + step * TOKENS * 4 * (int)sizeof(XCell));
#endif
}

// Stores a cell among prepared columns. Called by whole warps; `valid` in the lanes that have a cell.
DEVICE void put_cell(u8 *x, int steps, int cell, const float (&v)[8], bool valid) {
#if SCALED_X
  float scale;
  int sum;
  const XCell b = quantize_cell(v, scale, sum);
  if (!valid) return;
  ((XCell *)x)[cell] = b;
  const int t = cell % 4, token = cell / 4 % TOKENS, step = cell / 4 / TOKENS;
  float *scales = (float *)(x + steps * TOKENS * 4 * (int)sizeof(XCell));
  const bool pad = EVEN > TOKENS && token == TOKENS - 1;  // also write zeros for the token that makes the number even
  if (t == 0) scales[step * EVEN + token] = scale;
  if (t == 1) ((int *)(scales + steps * EVEN))[step * EVEN + token] = sum;
  if (pad && t == 2) scales[step * EVEN + token + 1] = 0.0f;
  if (pad && t == 3) ((int *)(scales + steps * EVEN))[step * EVEN + token + 1] = 0;
#else
  if (valid) ((XCell *)x)[cell] = round_cell(v);
#endif
}

// A kernel's rows of x, in global or shared memory: tokens 0 .. count - 1, `stride` numbers from row to row.
struct InputRows {
  const float *x;
  const int *index;  // token's row is x[index[token]]; null: x[token]
  int count, stride;
};
DEVICE const float *row_of(const InputRows &rows, int token) {
  return rows.x + (s64)(rows.index ? rows.index[token] : token) * rows.stride;
}

// Starts copies of `width` numbers of every row, from `first` on, to raw [TOKENS][pitch] in shared memory; called by all `threads`.
DEVICE void stage_rows(float *raw, int pitch, const InputRows &rows, int first, int width, int thread, int threads) {
  for (int token = 0; token < rows.count; token++) {
    const float *row = row_of(rows, token) + first;
    for (int i = thread * 4; i < width; i += threads * 4) copy_16(raw + token * pitch + i, row + i);
  }
}

// Rounds steps `first` .. `first + steps - 1` of all tokens into x, which has room for `room` steps. Called by `warps` warps; this one is
// number `warp`. `norm` [I] and `inverse` [TOKENS] are read if NORMED.
template <bool NORMED>
DEVICE void prepare_columns(u8 *x, int room, const InputRows &rows, int first, int steps, int warp, int warps, const float *norm,
                            const float *inverse) {
  const int cells = steps * TOKENS * 4;
#pragma unroll 2
  for (int base = warp * 32; base < cells; base += warps * 32) {
    const int cell = base + lane_of(), t = cell % 4, token = cell / 4 % TOKENS;
    const bool valid = cell < cells;
    const int column = (first + cell / 4 / TOKENS) * STEP;
    float v[8] = {};
    if (valid && token < rows.count) {
      read_cell(v, row_of(rows, token) + column, t);
      if constexpr (NORMED) {
        float w[8];
        read_cell(w, norm + column, t);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = normed(v[i], inverse[token], w[i]);
      }
    }
    put_cell(x, room, cell, v, valid);
  }
}

// --- shared memory of a kernel with a norm

constexpr bool STAGED = TOKENS * I <= 8192;  // rows of x are staged in shared memory up to 32 KiB; more are read twice from global memory
struct SharedMemory {
  u8 *prepared;           // COLUMNS_BYTES(STEPS)
  float *norm, *raw;      // [I], [TOKENS * I] if STAGED
  float *sums, *scratch;  // [SUMS_SIZE], [TOKENS * (NORM_WARPS + 1)]
  float *extra;           // of the kernel
};
DEVICE SharedMemory shared_memory_at(u8 *memory) {
  SharedMemory shared;
  shared.prepared = memory;
  shared.norm = (float *)(memory + COLUMNS_BYTES(STEPS));
  shared.raw = shared.norm + I;
  shared.sums = shared.raw + (STAGED ? TOKENS * I : 0);
  shared.scratch = shared.sums + SUMS_SIZE;
  shared.extra = shared.scratch + TOKENS * (NORM_WARPS + 1);
  return shared;
}

// Starts the copies of the norm's weights, by the whole thread block.
DEVICE void stage_norm(const SharedMemory &shared, const float *norm) {
  for (int i = threadIdx.x * 4; i < I; i += THREADS * 4) copy_16(shared.norm + i, norm + i);
}

// Starts the copies of x, by the whole thread block, after `stage_norm`.
DEVICE void stage_x(const SharedMemory &shared, const InputRows &rows) {
  if (STAGED) stage_rows(shared.raw, I, rows, 0, I, threadIdx.x, THREADS);
  copy_commit();
}

// Norms and rounds all columns, by the whole thread block, after `stage_x`; includes the barriers that this needs.
DEVICE void prepare_normed(const SharedMemory &shared, const InputRows &global_rows, float eps) {
  const int warp = threadIdx.x / 32;
  float *inverse = shared.scratch + TOKENS * NORM_WARPS;
  const InputRows rows = STAGED ? InputRows{shared.raw, nullptr, global_rows.count, I} : global_rows;
  copy_wait<0>();
  __syncthreads();
  for (int i = warp; i < rows.count * NORM_WARPS; i += WARPS) {
    const float sum = square_sum(row_of(rows, i / NORM_WARPS), I, i % NORM_WARPS, lane_of());
    if (lane_of() == 0) shared.scratch[i] = sum;
  }
  __syncthreads();
  if ((int)threadIdx.x < rows.count) inverse[threadIdx.x] = inverse_root(shared.scratch + threadIdx.x * NORM_WARPS, I, eps);
  __syncthreads();
  prepare_columns<true>(shared.prepared, STEPS, rows, 0, STEPS, warp, WARPS, shared.norm, inverse);
  __syncthreads();
}

// --- products

#if QUANTIZED
// The record of the block that begins with step s, from the shares of all lanes.
DEVICE void gather_record(Ring &ring, int s) {
  const int first = s % RECORD_STEPS / STEPS_OF_BLOCK * WORDS;
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const int word = first + i;
    ring.record[i] = __shfl_sync(ALL_LANES, ring.shares[s / RECORD_STEPS][word / 4], word % 4 * 8 + lane_of() / 4);
  }
}
#endif

DEVICE void multiply_step(float (&c)[4], Ring &ring, int s, const Tokens &x) {
  const Chunk *chunks = ring.chunks + s / STEPS_OF_BLOCK * CHUNKS;
#if QUANTIZED
  if (s % STEPS_OF_BLOCK == 0) gather_record(ring, s);
  Step w;
  unpack_step(w, chunks, ring.record, s % STEPS_OF_BLOCK, lane_of() % 4);
  multiply(c, w, x);
#else
  multiply(c, chunks, x);
#endif
}

// Four steps of a run, from s on: c += W x. The registers of each step are refilled from `next` as soon as they are free.
template <bool WHOLE>
DEVICE void multiply_four(float (&c)[4], Ring &ring, const Columns &x, int step, int s, int steps, const Run &next) {
#pragma unroll
  for (int end = s + 4; s < end; s++) {
    if (WHOLE || s < steps) multiply_step(c, ring, s, tokens_of(x, step + s));
    if (WHOLE || s < next.steps) load_chunks(ring, s, next);
    load_records<WHOLE>(ring, s, next);
  }
}

// A run of a (tile, piece). By fours, because the compiler would interleave more steps than it has registers for.
DEVICE void multiply_run(float (&c)[4], Ring &ring, const Columns &x, int step, int steps, const Run &next) {
#pragma unroll
  for (int s = 0; s < STEPS_AHEAD; s += 4) {
    if (s + 4 <= steps && s + 4 <= next.steps) multiply_four<true>(c, ring, x, step, s, steps, next);
    else multiply_four<false>(c, ring, x, step, s, steps, next);
  }
}

DEVICE void put_sums(const float (&c)[4], float *sums) {  // of one (tile, piece): [TOKENS][PITCH]
  const int g = lane_of() / 4, token = lane_of() % 4 * 2;
  float *to = sums + token * PITCH + g;
  if (token < TOKENS) to[0] = c[0], to[8] = c[2];
  if (token + 1 < TOKENS) to[PITCH] = c[1], to[PITCH + 8] = c[3];
}

// This warp's tiles of one piece. `x` holds the piece's columns from its step `step` on. `sums` [SUMS_SIZE] are read by sum_of_pieces.
DEVICE void multiply_piece(Ring &ring, Walk &walk, const u8 *weight, const Columns &x, int step, int unit, int piece, float *sums) {
  for (int tile = tile_warp(); tile < TILES; tile += TILE_WARPS) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const bool valid = tile_of(unit, tile) < ALL_TILES;
    for (int part = 0; part < PARTS; part++) {
      advance(walk);
      const Run next = run_at(walk, weight);
      const int steps = valid ? steps_of_part(piece, part) : 0;
      multiply_run(c, ring, x, step + part * STEPS_AHEAD, steps, next);
    }
    put_sums(c, sums + (piece * TILES + tile) * TOKENS * PITCH);
  }
}

// All of this warp's pieces, with all columns in x.
DEVICE void multiply_unit(Ring &ring, Walk &walk, const u8 *weight, const Columns &x, int unit, float *sums) {
  for (int piece = piece_warp(); piece < PIECES; piece += PIECE_WARPS) {
    multiply_piece(ring, walk, weight, x, piece * PIECE_STEPS, unit, piece, sums);
  }
}

// Output `row` of a tile for one token: the sum of its pieces, in order.
DEVICE float sum_of_pieces(const float *sums, int tile, int token, int row) {
  const float *at = sums + (tile * TOKENS + token) * PITCH + row;
  float sum = at[0];
#pragma unroll 8
  for (int piece = 1; piece < PIECES; piece++) sum += at[piece * TILES * TOKENS * PITCH];
  return sum;
}
