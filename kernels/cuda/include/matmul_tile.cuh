// The geometry of matmul.cu: which tile of out a thread block computes, which part of it a warp, and where a stage's operands are.
//
// With EXPERTS the weight is that many matrices [O, I], one after the other, with SILU first gate of all and then up of all; x is grouped by
// them, and a tile of tokens is one of list_experts.cu's tasks of up to TASK groups, or an equal part of it.
#pragma once
#include "product.cuh"

#ifdef EXPERTS
#define BY_EXPERT 1
#else
#define BY_EXPERT 0
#define EXPERTS 1
#endif

constexpr int TEAM = WARPS_O * WARPS_T, TEAM_THREADS = 32 * TEAM, THREADS = TEAM_THREADS * WARPS_K;
constexpr int ROW_TILES = TILE_O / 16, GROUPS = TILE_T / 8;             // of a thread block; a group is eight tokens
constexpr int WARP_O = ROW_TILES / WARPS_O, WARP_T = GROUPS / WARPS_T;  // of a warp
constexpr int WEIGHT_ROWS = SILU ? 2 * O : O, EXPERT_TILES = tiles_of(WEIGHT_ROWS), ALL_ROW_TILES = EXPERTS * EXPERT_TILES;
constexpr int ROW_BLOCKS = (EXPERT_TILES + ROW_TILES - 1) / ROW_TILES;
constexpr int BLOCKS = I / STEP, PIECES = pieces_of(I), STAGES_OF_PIECE = PIECE_STEPS / K_BLOCKS;  // blocks are of 32 columns
constexpr int PER_SPLIT = (PIECES + SPLIT - 1) / SPLIT;

// Bytes of a block: of a row tile of weight, of a group of x, and of the records of the one and the scales of the other. A stage holds whole
// blocks of the format, of which each block here has its share.
constexpr int W_TILE = STEP_BYTES;
#if QUANTIZED
constexpr int W_SCALES = RECORD_BYTES / STEPS_OF_BLOCK;
#else
constexpr int W_SCALES = 0;
#endif
constexpr int X_TILE = 32 * sizeof(XCell), X_SCALES = SCALED_X ? 64 : 0;
constexpr int X_AT = ROW_TILES * K_BLOCKS * W_TILE, W_SCALES_AT = X_AT + GROUPS * K_BLOCKS * X_TILE;
constexpr int X_SCALES_AT = W_SCALES_AT + ROW_TILES * K_BLOCKS * W_SCALES, STAGE = X_SCALES_AT + GROUPS * K_BLOCKS * X_SCALES;

static_assert(ROW_TILES % WARPS_O == 0 && GROUPS % WARPS_T == 0, "matmul: a tile must be divisible by its warps");
static_assert(PIECE_STEPS % K_BLOCKS == 0 && I % 32 == 0, "matmul: K_BLOCKS must divide 16, and I be a multiple of 32");
static_assert(K_BLOCKS % STEPS_OF_BLOCK == 0 && BLOCKS % STEPS_OF_BLOCK == 0,
              "matmul: K_BLOCKS and I must be of whole blocks of the format");
static_assert(!SILU || ((WARP_O & (WARP_O - 1)) == 0 && WARP_O > 1 && O % 16 == 0 && !RESIDUAL),
              "matmul: SILU needs TILE_O / WARPS_O of 32, 64, 128, ... rows and O % 16 == 0");
static_assert((SPLIT - 1) * PER_SPLIT < PIECES, "matmul: SPLIT leaves a thread block without pieces");
static_assert(!BY_EXPERT || (O % 16 == 0 && SPLIT == 1), "matmul: experts need O % 16 == 0 and SPLIT == 1");

// Of a thread block: pieces first to last - 1; `groups` of tokens that exist from `first_group` on, of which it has GROUPS at most; the matrix.
struct Tile {
  int row_block, token_block, first, last, groups, first_group, expert;
};
DEVICE Tile tile_of_block(int count) {
  const int band = blockIdx.x / (BAND * ROW_BLOCKS), within = blockIdx.x % (BAND * ROW_BLOCKS);
  const int left = gridDim.x / ROW_BLOCKS - band * BAND, width = left < BAND ? left : BAND;  // token blocks
  Tile tile;
  tile.row_block = within / width;
  tile.token_block = band * BAND + within % width;
  tile.first = blockIdx.y * PER_SPLIT;
  tile.last = tile.first + PER_SPLIT < PIECES ? tile.first + PER_SPLIT : PIECES;
  tile.first_group = tile.token_block * GROUPS;
  tile.groups = (count + 7) / 8 - tile.first_group;
  tile.expert = 0;
  return tile;
}
#if BY_EXPERT
// The same of a task's part; without groups where there is no such task, or no such part.
DEVICE Tile tile_of_task(const int *tasks) {
  static_assert(TASK % GROUPS == 0, "matmul: a task must be whole tiles");
  constexpr int PARTS = TASK / GROUPS;
  Tile tile = tile_of_block(0);
  const int number = tile.token_block / PARTS, first = tile.token_block % PARTS * GROUPS;
  if (number >= tasks[1]) return tile;
  const int *task = tasks + 2 + 3 * number;
  tile.expert = task[0], tile.first_group = task[1] + first, tile.groups = task[2] - first;
  return tile;
}
#endif

// Of a thread: its team, its warp in the team and in the team's grid of warps, its number in the team.
struct Place {
  int lane, team, warp, warp_o, warp_t, thread;
};
DEVICE Place place_of_thread() {
  const int warp = threadIdx.x / 32 % TEAM;
  return {(int)threadIdx.x % 32, (int)threadIdx.x / TEAM_THREADS, warp, warp % WARPS_O, warp / WARPS_O, (int)threadIdx.x % TEAM_THREADS};
}

constexpr int HALF = SILU ? WARP_O / 2 : 1;  // with SILU, half of a warp's row tiles are gate's, half up's

// Row tile `local` of a thread block among the tiles of out, counted from the block's first, and among those of weight.
DEVICE constexpr int out_tile(int local) { return SILU ? local / WARP_O * HALF + local % HALF : local; }
DEVICE constexpr int weight_tile(int local) { return out_tile(local) + (SILU && local % WARP_O >= HALF ? ALL_ROW_TILES / 2 : 0); }
constexpr int OUT_TILES = SILU ? EXPERT_TILES / 2 : EXPERT_TILES, OUT_TILES_OF_BLOCK = SILU ? ROW_TILES / 2 : ROW_TILES;

// Step `i` of a team: its block of columns, and the number of blocks it has there, 0 to K_BLOCKS.
DEVICE int block_at(const Tile &tile, int i, int team) {
  if (WARPS_K == 1) return tile.first * PIECE_STEPS + i * K_BLOCKS;
  return (tile.first + i / STAGES_OF_PIECE * WARPS_K + team) * PIECE_STEPS + i % STAGES_OF_PIECE * K_BLOCKS;
}
DEVICE int blocks_at(const Tile &tile, int i, int team) {
  if (WARPS_K == 1 && BLOCKS % K_BLOCKS == 0) return K_BLOCKS;
  const int end = tile.last * PIECE_STEPS < BLOCKS ? tile.last * PIECE_STEPS : BLOCKS, left = end - block_at(tile, i, team);
  return left < 0 ? 0 : left < K_BLOCKS ? left : K_BLOCKS;
}

// The number of steps of a tile: all rounds but the last are whole.
DEVICE int steps_of(const Tile &tile) {
  const int rounds = (tile.last - tile.first + WARPS_K - 1) / WARPS_K, left = BLOCKS - (tile.first + (rounds - 1) * WARPS_K) * PIECE_STEPS;
  return (rounds - 1) * STAGES_OF_PIECE + (left < PIECE_STEPS ? (left + K_BLOCKS - 1) / K_BLOCKS : STAGES_OF_PIECE);
}
