// The copies of matmul.cu from global memory to the stages in shared memory.
//
// A stage is copied in vectors of 16 bytes. SPAN threads, a power of two, copy the vectors of a tile's blocks, and the team takes as many tiles
// at once as it has spans. So the address of a vector is the sum of a part that depends on `thread`, computed once, and of constants, and
// every copy of the main loop needs one instruction for its address.
#pragma once
#include "matmul_tile.cuh"

DEVICE constexpr int power_of_two_from(int count) { return count <= 1 ? 1 : 2 * power_of_two_from((count + 1) / 2); }

template <int BYTES> struct Vectors {  // of tiles that are BLOCKS blocks of BYTES apart, K_BLOCKS of each
  static constexpr int RUN = K_BLOCKS * BYTES / 16, SPAN = RUN >= TEAM_THREADS ? TEAM_THREADS : power_of_two_from(RUN);
  static constexpr int TILES_AT_ONCE = TEAM_THREADS / SPAN;
};

// Whether the thread copies a vector: of the tile at `tile` + its span, and `part` vectors after its first.
template <int TILES, int BYTES> DEVICE bool copies(int tile, int part, int blocks, int thread) {
  typedef Vectors<BYTES> V;
  const int within = part + thread % V::SPAN;
  if (TILES % V::TILES_AT_ONCE && tile + thread / V::SPAN >= TILES) return false;
  if (V::RUN % V::SPAN && within >= V::RUN) return false;
  return BLOCKS % K_BLOCKS == 0 || within < blocks * (BYTES / 16);
}

// `from`: the thread's vector of block 0. Blocks of a short last stage after `blocks`, and tiles that do not exist (zeros), contribute only
// to sums that are not used.
template <int TILES, int BYTES> DEVICE void copy_weight(u8 *stage, const u8 *from, int tiles_left, int blocks, int thread) {
  typedef Vectors<BYTES> V;
  u8 *to = stage + (thread / V::SPAN * V::RUN + thread % V::SPAN) * 16;
#pragma unroll
  for (int tile = 0; tile < TILES; tile += V::TILES_AT_ONCE) {
#pragma unroll
    for (int part = 0; part < V::RUN; part += V::SPAN) {
      if (!copies<TILES, BYTES>(tile, part, blocks, thread)) continue;
      const u8 *vector = from + (s64)weight_tile(tile) * (BLOCKS * BYTES) + part * 16;
      if (OUT_TILES % OUT_TILES_OF_BLOCK == 0) copy_16(to + (tile * V::RUN + part) * 16, vector);
      else copy_16_or_zero(to + (tile * V::RUN + part) * 16, vector, out_tile(tile) < tiles_left);
    }
  }
}
template <int BYTES> DEVICE void copy_x(u8 *stage, const u8 *from, int groups_left, int blocks, int thread) {
  typedef Vectors<BYTES> V;
  u8 *to = stage + (thread / V::SPAN * V::RUN + thread % V::SPAN) * 16;
#pragma unroll
  for (int group = 0; group < GROUPS; group += V::TILES_AT_ONCE) {
#pragma unroll
    for (int part = 0; part < V::RUN; part += V::SPAN) {
      if (!copies<GROUPS, BYTES>(group, part, blocks, thread)) continue;
      const u8 *vector = from + (s64)group * (BLOCKS * BYTES) + part * 16;
      copy_16_or_zero(to + (group * V::RUN + part) * 16, vector, group < groups_left);
    }
  }
}

// A thread's first vectors, and how many tiles and groups there are from them on; [1] are scales and records.
struct Source {
  const u8 *weight[2], *x[2];
  int tiles_left[2], groups_left[2];
};

template <int BYTES> DEVICE void find_weight(const u8 *&from, int &left, const u8 *weight, const Tile &tile, int thread) {
  constexpr int SPAN = Vectors<BYTES>::SPAN;
  const int first = tile.expert * OUT_TILES + tile.row_block * OUT_TILES_OF_BLOCK;
  from = weight + (u64)(first + weight_tile(thread / SPAN)) * (BLOCKS * BYTES) + thread % SPAN * 16;
  left = OUT_TILES - tile.row_block * OUT_TILES_OF_BLOCK - out_tile(thread / SPAN);
}
template <int BYTES> DEVICE void find_x(const u8 *&from, int &left, const u8 *x, const Tile &tile, int thread) {
  constexpr int SPAN = Vectors<BYTES>::SPAN;
  from = x + (u64)(tile.first_group + thread / SPAN) * (BLOCKS * BYTES) + thread % SPAN * 16;
  left = tile.groups - thread / SPAN;
}
DEVICE Source source_of(const u8 *prepared, const u8 *weight, int T, const Tile &tile, int thread) {
  Source source;
  find_weight<W_TILE>(source.weight[0], source.tiles_left[0], weight, tile, thread);
  find_x<X_TILE>(source.x[0], source.groups_left[0], prepared, tile, thread);
#if QUANTIZED
  find_weight<W_SCALES>(source.weight[1], source.tiles_left[1], weight + (u64)ALL_ROW_TILES * BLOCKS * W_TILE, tile, thread);
#endif
#if SCALED_X
  find_x<X_SCALES>(source.x[1], source.groups_left[1], prepared + (u64)(T / 8) * BLOCKS * X_TILE, tile, thread);
#endif
  return source;
}

// Starts the copies of step `i` of a team.
DEVICE void fetch(u8 *stage, const Source &source, const Tile &tile, int i, int team, int thread) {
  const int k = block_at(tile, i, team), blocks = blocks_at(tile, i, team);
  if (blocks == 0) return;
  copy_weight<ROW_TILES, W_TILE>(stage, source.weight[0] + k * W_TILE, source.tiles_left[0], blocks, thread);
  copy_x<X_TILE>(stage + X_AT, source.x[0] + k * X_TILE, source.groups_left[0], blocks, thread);
#if QUANTIZED
  copy_weight<ROW_TILES, W_SCALES>(stage + W_SCALES_AT, source.weight[1] + k * W_SCALES, source.tiles_left[1], blocks, thread);
#endif
#if SCALED_X
  copy_x<X_SCALES>(stage + X_SCALES_AT, source.x[1] + k * X_SCALES, source.groups_left[1], blocks, thread);
#endif
}
