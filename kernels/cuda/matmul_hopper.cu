// out = activation(x . weight^T + bias) + residual, or silu(gate) * up of the two halves of the outputs; for many rows, on Hopper (sm_90a)
//
//   out        [T, O] float32      does not alias residual
//   prepared   x as quantize_input.cu lays it out for WEIGHT with CORES
//   weight     tiles of WEIGHT = BF16 or F16 of [O, I]; if SILU of [2 O, I], the rows of gate, then those of up
//   bias       [O] float32, if BIAS; [2 O] if SILU; with BIAS_PITCH that many of each row (lora_bias.cu)
//   residual   [T, O] float32, if RESIDUAL; not with SILU
//   rows       [1] int32           number of rows of x, 0 to T; later rows of out are not touched
//
// T % 8 == 0, I % 32 == 0, any O (SILU: O % 16 == 0). ACTIVATION: NO_ACTIVATION or GELU. The order of every sum is that of product.cuh,
// provided that a warpgroup's product of 16 columns rounds as mma's does. That has not been shown yet: compare the bits with matmul.cu on a
// GPU.
//
// Unit of work: a thread block computes 128 rows of weight by TILE_T (128 or 192) tokens; with SILU 64 rows of gate and the same 64 of up.
// Two warpgroups multiply, 64 rows each: the fragments of the weights go from shared memory through registers, x is read in place. One warp
// of a third warpgroup copies, in bulk, through a ring of STAGES stages of K_BLOCKS (1, 2 or 4) x 32 columns, and gives its registers to
// the others: the sums and totals of 192 tokens take 192 of them. While one warpgroup waits or loads, the other has the tensor cores.
//
//   grid (ceil(rows of weight / 128) ceil(T / TILE_T), 1, 1), in the order of matmul.cu's; block = 384
//   shared = STAGES K_BLOCKS (8192 + 64 TILE_T) + (SILU ? 256 TILE_T : 0) bytes
//
// After the products for Hopper of CUTLASS (producer and consumer warps, Thakkar et al., 2023).
#include "hopper.cuh"
#include "product.cuh"

constexpr int ROW_TILES = 8, GROUPS = TILE_T / 8;  // of a thread block; a warp has one row tile and all groups
constexpr int OUT_TILES = tiles_of(O), OUT_TILES_OF_BLOCK = SILU ? ROW_TILES / 2 : ROW_TILES;
constexpr int ROW_BLOCKS = (OUT_TILES + OUT_TILES_OF_BLOCK - 1) / OUT_TILES_OF_BLOCK;
constexpr int BLOCKS = I / STEP, STEPS = (BLOCKS + K_BLOCKS - 1) / K_BLOCKS, STEPS_OF_PIECE = PIECE_STEPS / K_BLOCKS;
constexpr int W_TILE = 1024, X_TILE = 512, CORE = 128;  // bytes of a block of columns, and of a core matrix
constexpr int X_AT = ROW_TILES * K_BLOCKS * W_TILE, STAGE = X_AT + GROUPS * K_BLOCKS * X_TILE;
constexpr int CONSUMERS = 8;  // warps
static_assert(WEIGHT == BF16 || WEIGHT == F16, "matmul_hopper: WEIGHT must be BF16 or F16");
static_assert(I % 32 == 0 && PIECE_STEPS % K_BLOCKS == 0 && !(SILU && (O % 16 || RESIDUAL)), "matmul_hopper: sizes");

#include "addends.cuh"

typedef float Sums[GROUPS][4];

struct Tile {
  int row_block, token_block, groups;  // groups of eight tokens that exist
};

struct Ring {
  u8 *stages;
  u64 *full, *empty;
  int stage;
  u32 parity;
};

DEVICE Tile tile_of_block(int count);
DEVICE void produce(Ring ring, const u8 *prepared, const u8 *weight, const Tile &tile, int lane);
DEVICE void consume(Sums &total, Ring ring, int warp, int lane);
DEVICE void send_up(float4 *shared, const Sums &total, int warp, int lane);
DEVICE void write(float *out, const Sums &total, const float4 *ups, const float *bias, const float *residual, const Tile &tile, int count,
                  int warp, int lane);

extern "C" __global__ void __launch_bounds__(384, 1)
    matmul_hopper(float *out, const u8 *prepared, const u8 *weight, BIAS_ARGUMENT RESIDUAL_ARGUMENT const int *rows) {
  await_previous();
#if !BIAS
  const float *bias = nullptr;
#endif
#if !RESIDUAL
  const float *residual = nullptr;
#endif
  DYNAMIC_SHARED(memory);
  static __shared__ u64 full[STAGES], empty[STAGES], sent;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = rows[0];
  const Tile tile = tile_of_block(count);
  if (tile.groups <= 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(full + i, 1), barrier_init(empty + i, CONSUMERS);
    barrier_init(&sent, CONSUMERS / 2);
    barriers_ready();
  }
  __syncthreads();
  const Ring ring = {memory, full, empty, 0, 0};
  if (warp >= CONSUMERS) {
    fewer_registers<24>();
    if (warp == CONSUMERS) produce(ring, prepared, weight, tile, lane);
    return;
  }
  more_registers<240>();
  Sums total;
  consume(total, ring, warp, lane);
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

DEVICE Tile tile_of_block(int count) {
  const int band = blockIdx.x / (BAND * ROW_BLOCKS), within = blockIdx.x % (BAND * ROW_BLOCKS);
  const int left = gridDim.x / ROW_BLOCKS - band * BAND, width = left < BAND ? left : BAND, token_block = band * BAND + within % width;
  return {within / width, token_block, (count + 7) / 8 - token_block * GROUPS};
}

// The tile of out that a warp's rows of weight belong to.
DEVICE int out_tile(const Tile &tile, int warp) { return tile.row_block * OUT_TILES_OF_BLOCK + warp % OUT_TILES_OF_BLOCK; }

DEVICE void next_stage(Ring &ring) {
  if (++ring.stage < STAGES) return;
  ring.stage = 0, ring.parity ^= 1;
}

// --- copying: one warp. In place of tiles and groups that do not exist it copies the last that do; their sums are not used.

DEVICE void produce(Ring ring, const u8 *prepared, const u8 *weight, const Tile &tile, int lane) {
  for (int i = 0; i < STEPS; i++, next_stage(ring)) {
    const int k = i * K_BLOCKS, blocks = BLOCKS - k < K_BLOCKS ? BLOCKS - k : K_BLOCKS;
    u8 *stage = ring.stages + ring.stage * STAGE;
    u64 *full = ring.full + ring.stage;
    barrier_wait(ring.empty + ring.stage, ring.parity ^ 1);
    if (lane == 0) barrier_arrive_expecting(full, (ROW_TILES * W_TILE + GROUPS * X_TILE) * blocks);
    __syncwarp();
    for (int c = lane; c < ROW_TILES + GROUPS; c += 32) {
      if (c < ROW_TILES) {
        const int row_tile = min(out_tile(tile, c), OUT_TILES - 1) + (SILU && c >= ROW_TILES / 2 ? OUT_TILES : 0);
        copy_bulk(stage + c * K_BLOCKS * W_TILE, weight + ((u64)row_tile * BLOCKS + k) * W_TILE, blocks * W_TILE, full);
      } else {
        const int group = tile.token_block * GROUPS + min(c - ROW_TILES, tile.groups - 1);
        copy_bulk(stage + X_AT + (c - ROW_TILES) * K_BLOCKS * X_TILE, prepared + ((u64)group * BLOCKS + k) * X_TILE, blocks * X_TILE, full);
      }
    }
  }
}

// --- multiplying: two warpgroups

DEVICE void consume(Sums &total, Ring ring, int warp, int lane) {
  Sums sums;
#pragma unroll
  for (int i = 0; i < GROUPS * 4; i++) {
    total[i / 4][i % 4] = -0.0f;  // the neutral element of addition: it preserves every bit of what is added
    sums[i / 4][i % 4] = 0.0f;
  }
#pragma unroll 1
  for (int i = 0; i < STEPS; i++, next_stage(ring)) {
    const u8 *stage = ring.stages + ring.stage * STAGE;
    barrier_wait(ring.full + ring.stage, ring.parity);
    u32 a[2 * K_BLOCKS][4];
#pragma unroll
    for (int k = 0; k < 2 * K_BLOCKS; k++) {
      if (BLOCKS % K_BLOCKS && i * K_BLOCKS + k / 2 >= BLOCKS) break;
      const uint4 v = *(const uint4 *)(stage + warp * K_BLOCKS * W_TILE + k * (W_TILE / 2) + lane * 16);
      a[k][0] = v.x, a[k][1] = v.y, a[k][2] = v.z, a[k][3] = v.w;
    }
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < 2 * K_BLOCKS; k++) {
      if (BLOCKS % K_BLOCKS && i * K_BLOCKS + k / 2 >= BLOCKS) break;
      WARPGROUP_MMA(sums, a[k], matrix_descriptor(stage + X_AT + k * 2 * CORE, CORE, K_BLOCKS * X_TILE));
    }
    warpgroup_end();
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty + ring.stage);
    if (i % STEPS_OF_PIECE != STEPS_OF_PIECE - 1 && i != STEPS - 1) continue;
#pragma unroll
    for (int j = 0; j < GROUPS * 4; j++) total[j / 4][j % 4] += sums[j / 4][j % 4], sums[j / 4][j % 4] = 0.0f;
  }
}

// --- writing

// Sends up's totals to the warps that have gate's, through `shared` [4 warps][GROUPS][32 lanes] float4.
DEVICE void send_up(float4 *shared, const Sums &total, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < GROUPS; n++)
    shared[((warp - 4) * GROUPS + n) * 32 + lane] = make_float4(total[n][0], total[n][1], total[n][2], total[n][3]);
}

DEVICE void write(float *out, const Sums &total, const float4 *ups, const float *bias, const float *residual, const Tile &tile, int count,
                  int warp, int lane) {
#pragma unroll
  for (int n = 0; n < GROUPS; n++) {
    const float4 four = SILU ? ups[(warp * GROUPS + n) * 32 + lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float up[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int o = out_tile(tile, warp) * 16 + lane / 4 + e / 2 * 8, token = tile.token_block * TILE_T + n * 8 + lane % 4 * 2 + e % 2;
      if (o >= O || token >= count) continue;
      const u64 at = (u64)token * O + o;
      const float *own = bias + (u64)token * BIAS_PITCH + o;
      float y = finished<BIAS, ACTIVATION, RESIDUAL>(total[n][e], own, residual + at);
      if constexpr (SILU) y = silu(y) * finished<BIAS, NO_ACTIVATION, 0>(up[e], own + O, nullptr);
      out[at] = y;
    }
  }
}
