// out = activation(x . weight^T + bias) + residual, or silu(gate) * up of the two halves of the outputs; for many rows, on Hopper (sm_90a)
//
//   out        [T, O] float32      does not alias residual
//   prepared   x as quantize_input.cu lays it out for WEIGHT with CORES
//   weight     tiles of WEIGHT = BF16 or F16 of [O, I]; if SILU of [2 O, I], the rows of gate and then those of up
//   bias       [O] float32, if BIAS; [2 O] if SILU
//   residual   [T, O] float32, if RESIDUAL; not with SILU
//   rows       [1] int32           how many rows of x there are, 0 to T; the rows of out behind them stay as they are
//
// T % 8 == 0, I % 32 == 0, any O (SILU: O % 16 == 0). ACTIVATION: NO_ACTIVATION or GELU. The order of every sum is that of product.cuh, if
// a warpgroup's product of 16 columns rounds as mma's does, which nobody has shown yet: compare the bits with matmul.cu on a machine.
//
// A block of threads makes 128 rows of weight by TILE_T (128 or 192) tokens; with SILU 64 rows of gate and the same 64 of up. Two
// warpgroups multiply, 64 rows each: the weights' fragments go from shared memory through registers, x is read in place. A warp of a
// third one copies, in bulk, through a ring of STAGES stages of K_BLOCKS (1, 2 or 4) x 32 columns, and hands its registers to the others:
// sums and totals of 192 tokens are 192 of them. While one warpgroup waits or loads, the other has the tensor cores.
//
//   grid (ceil(rows of weight / 128) ceil(T / TILE_T), 1, 1), walked as matmul.cu's; block = 384
//   shared = STAGES K_BLOCKS (8192 + 64 TILE_T) + (SILU ? 256 TILE_T : 0) bytes
//
// After Hopper's products of CUTLASS (producer and consumer warps, Thakkar et al., 2023).
#include "hopper.cuh"
#include "product.cuh"

constexpr int ROW_TILES = 8, GROUPS = TILE_T / 8; // of a block of threads; a warp has one row tile and all groups
constexpr int OUT_TILES = tiles_of(O), OUT_TILES_OF_BLOCK = SILU ? ROW_TILES / 2 : ROW_TILES;
constexpr int ROW_BLOCKS = (OUT_TILES + OUT_TILES_OF_BLOCK - 1) / OUT_TILES_OF_BLOCK, TOKEN_BLOCKS = (T + TILE_T - 1) / TILE_T;
constexpr int BLOCKS = I / STEP, STEPS = (BLOCKS + K_BLOCKS - 1) / K_BLOCKS, STEPS_OF_PIECE = PIECE_STEPS / K_BLOCKS;
constexpr int W_TILE = 1024, X_TILE = 512, CORE = 128; // bytes of a block of columns, and of a core matrix
constexpr int X_AT = ROW_TILES * K_BLOCKS * W_TILE, STAGE = X_AT + GROUPS * K_BLOCKS * X_TILE;
constexpr int CONSUMERS = 8; // warps
static_assert(WEIGHT == BF16 || WEIGHT == F16, "matmul_hopper: weights of 16 bits");
static_assert(T % 8 == 0 && I % 32 == 0 && PIECE_STEPS % K_BLOCKS == 0 && !(SILU && (O % 16 || RESIDUAL)), "matmul_hopper: sizes");

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

typedef float Sums[GROUPS][4];

struct Tile {
  int row_block, token_block, groups; // groups of tokens that count
};
DEVICE Tile my_tile(int count) {
  const int band = blockIdx.x / (BAND * ROW_BLOCKS), within = blockIdx.x % (BAND * ROW_BLOCKS);
  const int left = TOKEN_BLOCKS - band * BAND, width = left < BAND ? left : BAND, token_block = band * BAND + within % width;
  return {within / width, token_block, (count + 7) / 8 - token_block * GROUPS};
}

// The tile of out that a warp's rows of weight belong to.
DEVICE int out_tile(const Tile &tile, int warp) { return tile.row_block * OUT_TILES_OF_BLOCK + warp % OUT_TILES_OF_BLOCK; }

struct Ring {
  u8 *stages;
  u64 *full, *empty;
  int stage;
  u32 parity;
};
DEVICE void next_stage(Ring &ring) {
  if (++ring.stage < STAGES) return;
  ring.stage = 0, ring.parity ^= 1;
}

// --- copying: one warp. Tiles and groups that do not exist are stood in for by the last that do; nobody uses their sums.

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

DEVICE void multiply(Sums &sums, const u32 (&a)[4], u64 b) {
#if WEIGHT == BF16
  warpgroup_mma_bf16(sums, a, b);
#else
  warpgroup_mma_f16(sums, a, b);
#endif
}

DEVICE void consume(Sums &total, Ring ring, int warp, int lane) {
  Sums sums;
#pragma unroll
  for (int i = 0; i < GROUPS * 4; i++) {
    total[i / 4][i % 4] = -0.0f; // added to a number, it leaves all its bits
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
      multiply(sums, a[k], matrix_place(stage + X_AT + k * 2 * CORE, CORE, K_BLOCKS * X_TILE));
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

// Up's totals to the warps that have gate's, through `shared` [4 warps][GROUPS][32 lanes] float4.
DEVICE void hand_up(float4 *shared, const Sums &total, int warp, int lane) {
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
      const u64 place = (u64)token * O + o;
      float y = finished<BIAS, ACTIVATION, RESIDUAL>(total[n][e], bias + o, residual + place);
      if constexpr (SILU) y = silu(y) * finished<BIAS, NO_ACTIVATION, false>(up[e], bias + O + o, nullptr);
      out[place] = y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    matmul_hopper(float *out, const u8 *prepared, const u8 *weight, BIAS_ARGUMENT RESIDUAL_ARGUMENT const int *rows) {
#if !BIAS
  const float *bias = nullptr;
#endif
#if !RESIDUAL
  const float *residual = nullptr;
#endif
  DYNAMIC_SHARED(memory);
  static __shared__ u64 full[STAGES], empty[STAGES], handed;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = rows[0];
  const Tile tile = my_tile(count);
  if (tile.groups <= 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(full + i, 1), barrier_init(empty + i, CONSUMERS);
    barrier_init(&handed, CONSUMERS / 2);
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
    hand_up(ups, total, warp, lane);
    __syncwarp();
    if (lane == 0) barrier_arrive(&handed);
    return;
  }
  if (SILU) barrier_wait(&handed, 0);
  write(out, total, ups, bias, residual, tile, count, warp, lane);
}
