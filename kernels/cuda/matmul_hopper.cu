// out = activation(x . weight^T + bias) + residual, or silu(gate) * up of the two halves of the outputs; on Hopper (sm_90a)
//
//   out        [T, O] float32      does not alias residual
//   partial    float4, if SPLIT > 1: scratch for the sums of pieces
//   counters   [tiles of out] uint32, if SPLIT > 1; zero between launches: the last thread block to arrive resets its counter
//   prepared   x as quantize_cores.cu lays it out for WEIGHT
//   weight     tiles of WEIGHT = BF16 or F16 of [O, I]; if SILU of [2 O, I], the rows of gate, then those of up
//   bias       [O] float32, if BIAS; [2 O] if SILU; with BIAS_PITCH that many of each row (lora_bias.cu)
//   residual   [T, O] float32, if RESIDUAL; not with SILU
//   rows       [1] int32           number of rows of x, 0 to T; later rows of out are not touched
//   all_groups integer             G of prepared; the text does not depend on it
//
// T % 8 == 0, I % 32 == 0, any O (SILU: O % 16 == 0). ACTIVATION: NO_ACTIVATION or GELU. The order of every sum is that of product.cuh,
// provided that a warpgroup's product of 16 columns rounds as mma's does, as it did on an H100; the self-test compares the bits.
//
// Unit of work: a thread block computes TILE_O (64 or 128) rows of weight by TILE_T (64, 128 or 192) tokens; with SILU half of the
// rows are gate's and the others the same of up. A warpgroup for each 64 rows multiplies: the fragments of the weights go from shared memory
// through registers, x is read in place. Three warps of one more warpgroup copy, in bulk, through a ring of STAGES stages of K_BLOCKS (1, 2
// or 4) x 32 columns; with 192 tokens it gives its registers to the others, whose sums and totals take 192. A request for a copy takes its
// warp about 60 cycles: when one warp made 24 of them, for each group of tokens, that took longer than the arithmetic, 1,500 cycles instead
// of 512. While one warpgroup waits or loads, the other has the tensor cores. With SPLIT > 1 the pieces are divided among SPLIT thread
// blocks, as in matmul.cu.
//
//   grid (ceil(rows of weight / TILE_O) ceil(T / TILE_T), SPLIT, 1), in the order of matmul.cu's; block = 2 TILE_O + 128
//   shared = STAGES K_BLOCKS (64 TILE_O + 64 TILE_T) + (SILU ? 2 TILE_O TILE_T : 0) bytes
//   partial = (pieces - ceil(pieces / SPLIT) + 1) grid.x TILE_O TILE_T 4 bytes, pieces = ceil(I / 512); (SPLIT - 1) ceil(pieces / SPLIT) <
//     pieces
//
// After the products for Hopper of CUTLASS (producer and consumer warps, Thakkar et al., 2023).
#include "hopper.cuh"
#include "last_block.cuh"
#include "product.cuh"

constexpr int ROW_TILES = TILE_O / 16, GROUPS = TILE_T / 8;  // of a thread block; a warp has one row tile and all groups
constexpr int OUT_TILES = tiles_of(O), OUT_TILES_OF_BLOCK = SILU ? ROW_TILES / 2 : ROW_TILES;
constexpr int ROW_BLOCKS = (OUT_TILES + OUT_TILES_OF_BLOCK - 1) / OUT_TILES_OF_BLOCK;
constexpr int BLOCKS = I / STEP, STEPS = (BLOCKS + K_BLOCKS - 1) / K_BLOCKS, STEPS_OF_PIECE = PIECE_STEPS / K_BLOCKS;
constexpr int PIECES = pieces_of(I), PER_SPLIT = (PIECES + SPLIT - 1) / SPLIT;
constexpr int W_TILE = 1024, X_TILE = 512, CORE = 128;  // bytes of a block of columns, and of a core matrix
constexpr int X_AT = ROW_TILES * K_BLOCKS * W_TILE, STAGE = X_AT + GROUPS * K_BLOCKS * X_TILE;
constexpr int CONSUMERS = ROW_TILES, PRODUCERS = 3, COPIES = ROW_TILES + K_BLOCKS;  // warps; copies of a stage
constexpr bool GIVES_REGISTERS = TILE_T > 128;
static_assert(WEIGHT == BF16 || WEIGHT == F16, "matmul_hopper: WEIGHT must be BF16 or F16");
static_assert(I % 32 == 0 && PIECE_STEPS % K_BLOCKS == 0 && !(SILU && (O % 16 || RESIDUAL)), "matmul_hopper: sizes");
static_assert((SPLIT - 1) * PER_SPLIT < PIECES, "matmul_hopper: SPLIT leaves a thread block without pieces");
static_assert(!GIVES_REGISTERS || (SPLIT == 1 && TILE_O == 128), "matmul_hopper: registers");

#if SPLIT > 1
#define SPLIT_ARGUMENTS float4 *partial, u32 *counters,
#else
#define SPLIT_ARGUMENTS
#endif
#include "addends.cuh"

typedef float Sums[GROUPS][4];

struct Tile {
  int row_block, token_block, first, last;  // pieces
  int steps;
};

struct Ring {
  u8 *stages;
  u64 *full, *empty;
  int stage;
  u32 parity;
};

// One row tile of the weights, or one block of columns of x, of every stage.
struct Copy {
  const u8 *from;
  u32 pitch, to;  // from one stage to the next; in the stage
  int block;      // of x; -1 for weights
};

DEVICE Tile tile_of_block();
DEVICE Copy copy_of_weights(const u8 *weight, const Tile &tile, int row_tile);
DEVICE Copy copy_of_x(const u8 *prepared, int all_groups, const Tile &tile, int block);
DEVICE void produce(Ring ring, Copy copy, const Tile &tile);
DEVICE void consume(Sums &total, Ring ring, float4 *partial, const Tile &tile, int warp, int lane);
DEVICE bool is_last_split(Sums &total, float4 *partial, u32 *counters, const Tile &tile, int warp, int lane);
DEVICE void send_up(float4 *shared, const Sums &total, int warp, int lane);
DEVICE void write(float *out, const Sums &total, const float4 *ups, const float *bias, const float *residual, const Tile &tile, int count,
                  int warp, int lane);

extern "C" __global__ void __launch_bounds__(32 * CONSUMERS + 128, RESIDENT)
    matmul_hopper(float *out, SPLIT_ARGUMENTS const u8 *prepared, const u8 *weight, BIAS_ARGUMENT RESIDUAL_ARGUMENT const int *rows,
                  int all_groups) {
#if SPLIT == 1
  float4 *partial = nullptr;
  u32 *counters = nullptr;
#endif
#if !BIAS
  const float *bias = nullptr;
#endif
#if !RESIDUAL
  const float *residual = nullptr;
#endif
  await_previous();
  DYNAMIC_SHARED(memory);
  static __shared__ u64 full[STAGES], empty[STAGES], sent;
  const int count = rows[0], warp = threadIdx.x / 32, lane = threadIdx.x % 32, number = lane * PRODUCERS + warp - CONSUMERS;
  const bool copies = warp < CONSUMERS + PRODUCERS && number < COPIES;
  const Tile tile = tile_of_block();
  Ring ring = {memory, full, empty, 0, 0};
  if (tile.token_block * TILE_T >= count) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(full + i, COPIES), barrier_init(empty + i, CONSUMERS);
    barrier_init(&sent, CONSUMERS / 2);
    barriers_ready();
  }
  __syncthreads();
  Sums total;
  if (warp >= CONSUMERS) {
    if (GIVES_REGISTERS) fewer_registers<24>();
    const bool is_x = number >= ROW_TILES;
    const Copy copy = is_x ? copy_of_x(prepared, all_groups, tile, number - ROW_TILES) : copy_of_weights(weight, tile, number);
    if (copies) produce(ring, copy, tile);  // one call: lanes of a warp that go separate ways would wait for each other
    if (SPLIT == 1) return;
  } else {
    if (GIVES_REGISTERS) more_registers<240>();
    consume(total, ring, partial, tile, warp, lane);
  }
  if (SPLIT > 1 && !is_last_split(total, partial, counters, tile, warp, lane)) return;
  if (warp >= CONSUMERS) return;
  float4 *ups = (float4 *)(memory + STAGES * STAGE);
  if (SILU && warp >= CONSUMERS / 2) {
    send_up(ups, total, warp, lane);
    __syncwarp();
    if (lane == 0) barrier_arrive(&sent);
    return;
  }
  if (SILU) barrier_wait(&sent, 0);
  write(out, total, ups, bias, residual, tile, count, warp, lane);
}

DEVICE Tile tile_of_block() {
  const int band = blockIdx.x / (BAND * ROW_BLOCKS), within = blockIdx.x % (BAND * ROW_BLOCKS);
  const int left = gridDim.x / ROW_BLOCKS - band * BAND, width = left < BAND ? left : BAND, first = blockIdx.y * PER_SPLIT;
  const int last = min(first + PER_SPLIT, PIECES);
  return {within / width, band * BAND + within % width, first, last, min(last * STEPS_OF_PIECE, STEPS) - first * STEPS_OF_PIECE};
}

// The tile of out that a warp's rows of weight belong to.
DEVICE int out_tile(const Tile &tile, int warp) { return tile.row_block * OUT_TILES_OF_BLOCK + warp % OUT_TILES_OF_BLOCK; }

DEVICE void next_stage(Ring &ring) {
  if (++ring.stage < STAGES) return;
  ring.stage = 0, ring.parity ^= 1;
}

// --- copying: a thread for each row tile of the weights, and for each block of columns of x
//
// In place of row tiles that do not exist the last that does is copied. Sums of these, and of groups that do not exist, are not used.

DEVICE Copy copy_of_weights(const u8 *weight, const Tile &tile, int row_tile) {
  const int at = min(out_tile(tile, row_tile), OUT_TILES - 1) + (SILU && row_tile >= ROW_TILES / 2 ? OUT_TILES : 0);
  const u8 *from = weight + ((u64)at * BLOCKS + tile.first * PIECE_STEPS) * W_TILE;
  return {from, K_BLOCKS * W_TILE, (u32)(row_tile * K_BLOCKS * W_TILE), -1};
}
DEVICE Copy copy_of_x(const u8 *prepared, int all_groups, const Tile &tile, int block) {
  const u8 *from = prepared + ((u64)(tile.first * PIECE_STEPS + block) * all_groups + tile.token_block * GROUPS) * X_TILE;
  return {from, (u32)(K_BLOCKS * all_groups * X_TILE), (u32)(X_AT + block * GROUPS * X_TILE), block};
}

DEVICE void produce(Ring ring, Copy copy, const Tile &tile) {
  for (int i = 0; i < tile.steps; i++, next_stage(ring), copy.from += copy.pitch) {
    const int blocks = BLOCKS % K_BLOCKS ? min(BLOCKS - tile.first * PIECE_STEPS - i * K_BLOCKS, K_BLOCKS) : K_BLOCKS;
    const u32 bytes = copy.block < 0 ? blocks * W_TILE : copy.block < blocks ? GROUPS * X_TILE : 0;
    u64 *full = ring.full + ring.stage;
    barrier_wait(ring.empty + ring.stage, ring.parity ^ 1);
    barrier_arrive_expecting(full, bytes);
    if (bytes) copy_bulk(ring.stages + ring.stage * STAGE + copy.to, copy.from, bytes, full);
  }
}

// --- multiplying: a warpgroup for 64 rows of the weights

DEVICE void fill(Sums &sums, float value) {
#pragma unroll
  for (int i = 0; i < GROUPS * 4; i++) sums[i / 4][i % 4] = value;
}

// A warp's sums of a thread block in slot `slot` of `partial`: [GROUPS][32 lanes] float4.
DEVICE float4 *partial_of(float4 *partial, const Tile &tile, int slot, int warp) {
  return partial + (((u64)slot * gridDim.x + tile.token_block * ROW_BLOCKS + tile.row_block) * CONSUMERS + warp) * (GROUPS * 32);
}
DEVICE void store(float4 *place, const Sums &sums, int lane) {
#pragma unroll
  for (int n = 0; n < GROUPS; n++) place[n * 32 + lane] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
}
DEVICE void add_from(Sums &total, const float4 *place, int lane) {
#pragma unroll
  for (int n = 0; n < GROUPS; n++) {
    const float4 v = place[n * 32 + lane];
    total[n][0] += v.x, total[n][1] += v.y, total[n][2] += v.z, total[n][3] += v.w;
  }
}

// The sums of pieces: the first split adds them to `total`; the others store each in its slot.
DEVICE void consume(Sums &total, Ring ring, float4 *partial, const Tile &tile, int warp, int lane) {
  Sums sums;
  fill(total, -0.0f);  // the neutral element of addition: it preserves every bit of what is added
  fill(sums, 0.0f);
#pragma unroll 1
  for (int i = 0; i < tile.steps; i++, next_stage(ring)) {
    const u8 *stage = ring.stages + ring.stage * STAGE;
    const int left = BLOCKS - tile.first * PIECE_STEPS - i * K_BLOCKS;
    barrier_wait(ring.full + ring.stage, ring.parity);
    u32 a[2 * K_BLOCKS][4];
#pragma unroll
    for (int k = 0; k < 2 * K_BLOCKS; k++) {
      if (BLOCKS % K_BLOCKS && k / 2 >= left) break;
      const uint4 v = *(const uint4 *)(stage + warp * K_BLOCKS * W_TILE + k * (W_TILE / 2) + lane * 16);
      a[k][0] = v.x, a[k][1] = v.y, a[k][2] = v.z, a[k][3] = v.w;
    }
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < 2 * K_BLOCKS; k++) {
      if (BLOCKS % K_BLOCKS && k / 2 >= left) break;
      WARPGROUP_MMA(sums, a[k], matrix_descriptor(stage + X_AT + k / 2 * GROUPS * X_TILE + k % 2 * 2 * CORE, CORE, X_TILE));
    }
    warpgroup_end();
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty + ring.stage);
    if (i % STEPS_OF_PIECE != STEPS_OF_PIECE - 1 && i != tile.steps - 1) continue;
    if (SPLIT > 1 && tile.first > 0) {
      store(partial_of(partial, tile, tile.first + i / STEPS_OF_PIECE - PER_SPLIT + 1, warp), sums, lane);
    } else {
#pragma unroll
      for (int j = 0; j < GROUPS * 4; j++) total[j / 4][j % 4] += sums[j / 4][j % 4];
    }
    fill(sums, 0.0f);
  }
}

// Whether this thread block is the last of its tile to arrive; then `total` becomes the sum of all pieces. Called by all threads.
DEVICE bool is_last_split(Sums &total, float4 *partial, u32 *counters, const Tile &tile, int warp, int lane) {
  if (tile.first == 0 && warp < CONSUMERS) store(partial_of(partial, tile, 0, warp), total, lane);
  if (!is_last_block(counters + tile.token_block * ROW_BLOCKS + tile.row_block, 1, SPLIT)) return false;
  if (warp >= CONSUMERS) return true;
  fill(total, -0.0f);
#pragma unroll 1
  for (int slot = 0; slot < PIECES - PER_SPLIT + 1; slot++) add_from(total, partial_of(partial, tile, slot, warp), lane);
  return true;
}

// --- writing

// Sends up's totals to the warps that have gate's, through `shared` [CONSUMERS / 2 warps][GROUPS][32 lanes] float4.
DEVICE void send_up(float4 *shared, const Sums &total, int warp, int lane) {
  store(shared + (warp - CONSUMERS / 2) * GROUPS * 32, total, lane);
}

// What is added to an output; each is read only if there is such a thing.
struct Addends {
  float bias, up_bias, residual;
};

// What is added is read before anything is written, for AT_ONCE groups at a time: the compiler must assume that a write changes what is read
// next, and reads would wait for each other.
DEVICE void write(float *out, const Sums &total, const float4 *ups, const float *bias, const float *residual, const Tile &tile, int count,
                  int warp, int lane) {
  constexpr int AT_ONCE = GROUPS < 8 ? GROUPS : 8;
  const int first = out_tile(tile, warp) * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < GROUPS; n += AT_ONCE) {
    const int first_token = tile.token_block * TILE_T + n * 8 + lane % 4 * 2;
    Addends addends[AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < AT_ONCE * 4; i++) {
      const int token = first_token + i / 4 * 8 + i % 2, o = first + i % 4 / 2 * 8;
      Addends &own = addends[i / 4][i % 4];
      own = {};
      if (o >= O || token >= count) continue;
      const float *own_bias = bias + (u64)token * BIAS_PITCH + o;
      if (BIAS) own.bias = *own_bias;
      if (BIAS && SILU) own.up_bias = own_bias[O];
      if (RESIDUAL) own.residual = residual[(u64)token * O + o];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE * 4; i++) {
      const int e = i % 4, token = first_token + i / 4 * 8 + e % 2, o = first + e / 2 * 8;
      if (o >= O || token >= count) continue;
      const Addends &own = addends[i / 4][e];
      float y = finished<BIAS, ACTIVATION, RESIDUAL>(total[n + i / 4][e], &own.bias, &own.residual);
      if constexpr (SILU) {
        const float up = ((const float *)(ups + (warp * GROUPS + n + i / 4) * 32 + lane))[e];
        y = gated(y, finished<BIAS, NO_ACTIVATION, 0>(up, &own.up_bias, nullptr));
      }
      out[(u64)token * O + o] = y;
    }
  }
}
