// Weights of 16 bits, F16 or BF16: x is rounded to the same format, and a step is two mma of k16. The format's header defines MMA and
// WARPGROUP_MMA.
//
// Tiles [O/16][I/16][32 lanes][8]: W[g][2t], W[g][2t+1], W[g+8][the same], W[g][2t+8], W[g][2t+9], W[g+8][the same]; lane = 4 g + t.
#pragma once
#include "formats.cuh"

constexpr int STEPS_OF_BLOCK = 1, CHUNKS = 2, CHUNK_BYTES = 512, BLOCK_BYTES = 1024, STEP_BYTES = BLOCK_BYTES;
constexpr int STEPS_AHEAD = 8;  // 8 KiB a warp
typedef uint4 Chunk;            // the A operand of an mma
DEVICE constexpr int last_step(int) { return 0; }

// The eight numbers of x that lane (g, t) contributes of token g: 2t, 2t+1, 2t+8, 2t+9, 2t+16, ... of a block of 32 columns. A warp reads
// whole sectors of 32 bytes.
DEVICE void read_cell(float (&v)[8], const float *block, int t) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 two = *(const float2 *)(block + 2 * t + 8 * i);
    v[2 * i] = two.x, v[2 * i + 1] = two.y;
  }
}
typedef uint4 XCell;  // what a lane contributes of a token to a step
// The cell as the B operands of both mma.
DEVICE XCell round_cell(const float (&v)[8]) {
  const u32 b0 = pack_pair<WEIGHT>(v[0], v[1]), b1 = pack_pair<WEIGHT>(v[2], v[3]);
  return make_uint4(b0, b1, pack_pair<WEIGHT>(v[4], v[5]), pack_pair<WEIGHT>(v[6], v[7]));
}

struct Tokens {  // B operands of both mma, of token g
  u32 b[4];
};

DEVICE Tokens tokens_at(const u8 *cell) {
  const uint4 b = *(const uint4 *)cell;
  return {{b.x, b.y, b.z, b.w}};
}

// A step: c += W x. c[0], c[1] are row g of tokens 2t, 2t + 1; c[2], c[3] row g + 8 of the same.
DEVICE void multiply(float (&c)[4], const Chunk *chunks, const Tokens &x) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 words = chunks[half];
    const u32 a[4] = {words.x, words.y, words.z, words.w};
    MMA(c, a, x.b[2 * half], x.b[2 * half + 1]);
  }
}

// --- single numbers

DEVICE float4 floats_of(uint2 words) {
  const float2 low = unpack_pair<WEIGHT>(words.x), high = unpack_pair<WEIGHT>(words.y);
  return make_float4(low.x, low.y, high.x, high.y);
}
DEVICE float4 read_row(const u8 *table, int width, int row, int column) {
  return floats_of(((const uint2 *)table)[((s64)row * width + column) / 4]);
}
DEVICE float4 read_tile(const u8 *table, int rows, int width, int row, int column) {
  const int tile = row / 16, g = row % 8, upper = row % 16 / 8;
  const int lane = g * 4 + column % 8 / 2, word = column % 16 / 8 * 2 + upper;
  const u32 *words = (const u32 *)table + ((s64)tile * (width / 16) + column / 16) * 128 + lane * 4 + word;
  return floats_of(make_uint2(words[0], words[4]));
}
