// out = activation(x . weight^T + bias) + residual, or silu(gate) * up of the two halves of the outputs; for more than a few rows
//
//   out        [T, O] float32      does not alias residual
//   partial    float4, if SPLIT > 1: sums that are handed over; nothing to begin with
//   counters   [tiles of out] uint32, if SPLIT > 1; zero between launches: the last block of threads to come puts its counter back
//   prepared   x as quantize_input.cu lays it out for WEIGHT: [T, I] rounded, in fragments
//   weight     tiles of WEIGHT = BF16, F16, Q8_0 or Q4_0 of [O, I]; if SILU of [2 O, I], the rows of gate and then those of up
//   bias       [O] float32, if BIAS; [2 O] if SILU
//   residual   [T, O] float32, if RESIDUAL; not with SILU
//   rows       [1] int32           how many rows of x there are, 0 to T; the rows of out behind them stay as they are
//
// T % 8 == 0, I % 32 == 0, any O (SILU: O % 16 == 0, and TILE_O / WARPS_O % 32 == 0). ACTIVATION: NO_ACTIVATION or GELU. The order of
// every sum is that of product.cuh, so a row has the bits that matvec gives it.
//
// A block of threads makes a tile of TILE_O rows of weight by TILE_T tokens (multiples of 16 and 8). Its warps are WARPS_K teams of
// WARPS_O x WARPS_T warps; a team takes every WARPS_K-th piece of 512 columns, and the teams' sums are put together after each such round.
// The columns come through a ring of STAGES stages of K_BLOCKS (1, 2 or 4) x 32 columns for each team, by copies that go on behind the
// arithmetic. With SPLIT > 1 the pieces are shared out among SPLIT blocks of threads: the first adds up its own, the others leave each of
// theirs in `partial`, and the last of them to come adds all in ascending order. Both operands lie in memory as the fragments of mma, so
// a stage needs no other arrangement and no swizzle: every load from shared memory is of 16 bytes a lane, side by side.
//
//   block = 32 WARPS_O WARPS_T WARPS_K threads, numbers of warps powers of two; RESIDENT (at least 1): how many such blocks shall fit on a
//     multiprocessor by their registers
//   row_blocks = ceil(rows of weight / TILE_O), token_blocks = ceil(T / TILE_T)
//   grid (row_blocks token_blocks, SPLIT, 1); consecutive blocks walk over BAND token_blocks, then to the next row_block
//   shared = STAGES WARPS_K STAGE + (WARPS_K - 1) TILE_O TILE_T 4 bytes,
//     STAGE = K_BLOCKS (TILE_O / 16 W + TILE_T / 8 X), W = 1024, 544, 288 and X = 512, 320, 320 for 16 bits, Q8_0, Q4_0
//   partial = (pieces - ceil(pieces / SPLIT) + 1) row_blocks token_blocks TILE_O TILE_T 4 bytes, pieces = ceil(I / 512);
//     SPLIT so that (SPLIT - 1) ceil(pieces / SPLIT) < pieces
//
// The shape of the pipeline is that of CUTLASS's multistage product for sm_80 (Kerr et al., 2017-2020).
#include "product.cuh"

constexpr int TEAM = WARPS_O * WARPS_T, TEAM_THREADS = 32 * TEAM, THREADS = TEAM_THREADS * WARPS_K;
constexpr int ROW_TILES = TILE_O / 16, GROUPS = TILE_T / 8;            // of a block of threads
constexpr int MINE_O = ROW_TILES / WARPS_O, MINE_T = GROUPS / WARPS_T; // of a warp
constexpr int WEIGHT_ROWS = SILU ? 2 * O : O, ALL_ROW_TILES = tiles_of(WEIGHT_ROWS);
constexpr int ROW_BLOCKS = (ALL_ROW_TILES + ROW_TILES - 1) / ROW_TILES, TOKEN_BLOCKS = (T + TILE_T - 1) / TILE_T;
constexpr int BLOCKS = I / STEP, PIECES = pieces_of(I), STAGES_OF_PIECE = PIECE_STEPS / K_BLOCKS; // blocks are of 32 columns
constexpr int PER_SPLIT = (PIECES + SPLIT - 1) / SPLIT;
#define SCALED (WEIGHT == Q8_0 || WEIGHT == Q4_0)
constexpr int W_TILE = step_bytes(WEIGHT), X_TILE = SCALED ? 256 : 512; // bytes of a block
constexpr int W_SCALES = SCALED ? SCALE_BYTES : 0, X_SCALES = SCALED ? 64 : 0;
constexpr int X_AT = ROW_TILES * K_BLOCKS * W_TILE, W_SCALES_AT = X_AT + GROUPS * K_BLOCKS * X_TILE;
constexpr int X_SCALES_AT = W_SCALES_AT + ROW_TILES * K_BLOCKS * W_SCALES, STAGE = X_SCALES_AT + GROUPS * K_BLOCKS * X_SCALES;
constexpr int SUMS = MINE_O * MINE_T; // mma tiles of a warp
static_assert(ROW_TILES % WARPS_O == 0 && GROUPS % WARPS_T == 0 && PIECE_STEPS % K_BLOCKS == 0 && T % 8 == 0 && I % 32 == 0, "sizes");
static_assert(!SILU || (MINE_O % 2 == 0 && O % 16 == 0 && !RESIDUAL), "gate and up");
static_assert((SPLIT - 1) * PER_SPLIT < PIECES, "a share without pieces");

#if SPLIT > 1
#define SPLIT_ARGUMENTS float4 *partial, u32 *counters,
#else
#define SPLIT_ARGUMENTS
#endif
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

struct Tile {
  int row_block, token_block, first, last, groups; // pieces first to last - 1; groups of tokens that count
};

// Who the thread is: its team, its warp in the team, its number in the team.
struct Place {
  int lane, team, warp, warp_o, warp_t, thread;
};
DEVICE Place my_place() {
  const int warp = threadIdx.x / 32 % TEAM;
  return {(int)threadIdx.x % 32, (int)threadIdx.x / TEAM_THREADS, warp, warp % WARPS_O, warp / WARPS_O, (int)threadIdx.x % TEAM_THREADS};
}

constexpr int HALF = SILU ? MINE_O / 2 : 1; // with SILU a warp's row tiles are half gate's, half up's

// Row tile `local` of a block of threads among the tiles of out, counted from the block's first, and among those of weight.
DEVICE constexpr int out_tile(int local) { return SILU ? local / MINE_O * HALF + local % HALF : local; }
DEVICE constexpr int weight_tile(int local) { return out_tile(local) + (SILU && local % MINE_O >= HALF ? ALL_ROW_TILES / 2 : 0); }
constexpr int OUT_TILES = SILU ? ALL_ROW_TILES / 2 : ALL_ROW_TILES, OUT_TILES_OF_BLOCK = SILU ? ROW_TILES / 2 : ROW_TILES;

// --- copying
//
// A stage's numbers are cut into chunks of 16 bytes, and a thread copies chunks number `thread`, + TEAM_THREADS, ... of them. Where a chunk
// comes from is the sum of what follows from `thread`, counted once, and of constants: every copy of the main loop has its address for one
// instruction.

template <int TILES, int BYTES> struct Chunks { // of `TILES` tiles that lie BLOCKS blocks of BYTES apart, K_BLOCKS of each
  static constexpr int RUN = K_BLOCKS * BYTES / 16, COUNT = TILES * RUN;
  static_assert(RUN % TEAM_THREADS == 0 || COUNT <= TEAM_THREADS || (TEAM_THREADS % RUN == 0 && TEAM_THREADS / RUN % HALF == 0),
                "chunks of a thread are not equally far apart");
};

// `from`: where the thread's chunk of block 0 is. Blocks of a short last stage beyond `blocks`, and what is read of tiles that do not exist
// (zeros), belong to sums that nobody uses.
template <int TILES, int BYTES> DEVICE void copy_weight(u8 *stage, const u8 *from, int tiles_left, int blocks, int thread) {
  typedef Chunks<TILES, BYTES> C;
#pragma unroll
  for (int first = 0; first < C::COUNT; first += TEAM_THREADS) {
    const int within = thread % C::RUN + (C::RUN > TEAM_THREADS ? first % C::RUN : 0);
    if (C::COUNT % TEAM_THREADS && first + thread >= C::COUNT) continue;
    if (BLOCKS % K_BLOCKS && within >= blocks * (BYTES / 16)) continue;
    const u8 *chunk = from + (s64)weight_tile(first / C::RUN) * (BLOCKS * BYTES) + first % C::RUN * 16;
    if (OUT_TILES % OUT_TILES_OF_BLOCK == 0) copy_16(stage + (first + thread) * 16, chunk);
    else copy_16_or_zero(stage + (first + thread) * 16, chunk, out_tile(first / C::RUN) < tiles_left);
  }
}
template <int BYTES> DEVICE void copy_x(u8 *stage, const u8 *from, int groups_left, int blocks, int thread) {
  typedef Chunks<GROUPS, BYTES> C;
#pragma unroll
  for (int first = 0; first < C::COUNT; first += TEAM_THREADS) {
    const int within = thread % C::RUN + (C::RUN > TEAM_THREADS ? first % C::RUN : 0);
    if (C::COUNT % TEAM_THREADS && first + thread >= C::COUNT) continue;
    if (BLOCKS % K_BLOCKS && within >= blocks * (BYTES / 16)) continue;
    const u8 *chunk = from + (s64)(first / C::RUN) * (BLOCKS * BYTES) + first % C::RUN * 16;
    copy_16_or_zero(stage + (first + thread) * 16, chunk, first / C::RUN < groups_left);
  }
}

// Where a thread's chunks come from, and how many tiles and groups there are from its first on; [1] are scales.
struct Source {
  const u8 *weight[2], *x[2];
  int tiles_left[2], groups_left[2];
};

template <int BYTES> DEVICE void find_weight(const u8 *&from, int &left, const u8 *weight, const Tile &tile, int thread) {
  constexpr int RUN = K_BLOCKS * BYTES / 16;
  from = weight + (u64)(tile.row_block * OUT_TILES_OF_BLOCK + weight_tile(thread / RUN)) * (BLOCKS * BYTES) + thread % RUN * 16;
  left = OUT_TILES - tile.row_block * OUT_TILES_OF_BLOCK - out_tile(thread / RUN);
}
template <int BYTES> DEVICE void find_x(const u8 *&from, int &left, const u8 *x, const Tile &tile, int thread) {
  constexpr int RUN = K_BLOCKS * BYTES / 16;
  from = x + (u64)(tile.token_block * GROUPS + thread / RUN) * (BLOCKS * BYTES) + thread % RUN * 16;
  left = tile.groups - thread / RUN;
}
DEVICE Source source_of(const u8 *prepared, const u8 *weight, const Tile &tile, int thread) {
  Source source;
  find_weight<W_TILE>(source.weight[0], source.tiles_left[0], weight, tile, thread);
  find_x<X_TILE>(source.x[0], source.groups_left[0], prepared, tile, thread);
#if SCALED
  find_weight<SCALE_BYTES>(source.weight[1], source.tiles_left[1], weight + (u64)ALL_ROW_TILES * BLOCKS * W_TILE, tile, thread);
  find_x<X_SCALES>(source.x[1], source.groups_left[1], prepared + (u64)(T / 8) * BLOCKS * X_TILE, tile, thread);
#endif
  return source;
}

// Where step `i` of a team stands: its block of columns, and how many blocks it has there, 0 to K_BLOCKS.
DEVICE int block_at(const Tile &tile, int i, int team) {
  if (WARPS_K == 1) return tile.first * PIECE_STEPS + i * K_BLOCKS;
  return (tile.first + i / STAGES_OF_PIECE * WARPS_K + team) * PIECE_STEPS + i % STAGES_OF_PIECE * K_BLOCKS;
}
DEVICE int blocks_at(const Tile &tile, int i, int team) {
  if (WARPS_K == 1 && BLOCKS % K_BLOCKS == 0) return K_BLOCKS;
  const int end = tile.last * PIECE_STEPS < BLOCKS ? tile.last * PIECE_STEPS : BLOCKS, left = end - block_at(tile, i, team);
  return left < 0 ? 0 : left < K_BLOCKS ? left : K_BLOCKS;
}

DEVICE void fetch(u8 *stage, const Source &source, const Tile &tile, int i, int team, int thread) {
  const int k = block_at(tile, i, team), blocks = blocks_at(tile, i, team);
  if (blocks == 0) return;
  copy_weight<ROW_TILES, W_TILE>(stage, source.weight[0] + k * W_TILE, source.tiles_left[0], blocks, thread);
  copy_x<X_TILE>(stage + X_AT, source.x[0] + k * X_TILE, source.groups_left[0], blocks, thread);
#if SCALED
  copy_weight<ROW_TILES, W_SCALES>(stage + W_SCALES_AT, source.weight[1] + k * W_SCALES, source.tiles_left[1], blocks, thread);
  copy_x<X_SCALES>(stage + X_SCALES_AT, source.x[1] + k * X_SCALES, source.groups_left[1], blocks, thread);
#endif
}

// --- multiplying

typedef float Sums[MINE_O][MINE_T][4];

DEVICE void four_words(u32 (&to)[4], const u8 *from) {
  const uint4 v = *(const uint4 *)from;
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// A block of 32 columns. `w` and `x`: the warp's first row tile and first group in the stage; the next are K_BLOCKS further.
DEVICE void multiply_16_bits(Sums &sums, const u8 *w, const u8 *x, int lane) {
  u32 b[MINE_T][4];
#pragma unroll
  for (int n = 0; n < MINE_T; n++) four_words(b[n], x + n * K_BLOCKS * X_TILE + lane * 16);
#pragma unroll
  for (int m = 0; m < MINE_O; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 a[4];
      four_words(a, w + m * K_BLOCKS * W_TILE + half * 512 + lane * 16);
#pragma unroll
      for (int n = 0; n < MINE_T; n++) {
        if constexpr (WEIGHT == BF16) mma_bf16(sums[m][n], a, b[n][2 * half], b[n][2 * half + 1]);
        else mma_f16(sums[m][n], a, b[n][2 * half], b[n][2 * half + 1]);
      }
    }
  }
}

// An int32 near 0 as float32 without a conversion, of which a GPU makes fewer than sums: counted from the bits of 1.5 x 2^23 on.
constexpr int NEUTRAL = 0x4B400000;
DEVICE float from_neutral(int count) { return __int_as_float(count) - 12582912.0f; }

DEVICE void multiply_scaled(Sums &sums, const u8 *w, const u8 *x, const u8 *w_scales, const u8 *x_scales, int lane) {
  const int g = lane / 4, t = lane % 4;
  uint2 b[MINE_T];
  float2 xs[MINE_T];
  int start[MINE_T][4];
#pragma unroll
  for (int n = 0; n < MINE_T; n++) {
    b[n] = *(const uint2 *)(x + n * K_BLOCKS * X_TILE + lane * 8);
    const u8 *scales = x_scales + n * K_BLOCKS * X_SCALES + t * 8;
    xs[n] = *(const float2 *)scales;
    const int2 sum = WEIGHT == Q4_0 ? *(const int2 *)(scales + 32) : make_int2(0, 0);
    start[n][0] = start[n][2] = NEUTRAL - 8 * sum.x;
    start[n][1] = start[n][3] = NEUTRAL - 8 * sum.y;
  }
#pragma unroll
  for (int m = 0; m < MINE_O; m++) {
    const float2 ws = unpack_f16(*(const u32 *)(w_scales + m * K_BLOCKS * W_SCALES + g * 4));
    u32 a[4];
    if constexpr (WEIGHT == Q8_0) {
      four_words(a, w + m * K_BLOCKS * W_TILE + lane * 16);
    } else {
      const uint2 v = *(const uint2 *)(w + m * K_BLOCKS * W_TILE + lane * 8);
      a[0] = v.x & 0x0F0F0F0Fu, a[1] = v.y & 0x0F0F0F0Fu, a[2] = v.x >> 4 & 0x0F0F0F0Fu, a[3] = v.y >> 4 & 0x0F0F0F0Fu;
    }
#pragma unroll
    for (int n = 0; n < MINE_T; n++) {
      int dot[4];
      mma_s8_from(dot, start[n], a, b[n].x, b[n].y);
      float(&sum)[4] = sums[m][n];
      sum[0] = fmaf(from_neutral(dot[0]), ws.x * xs[n].x, sum[0]);
      sum[1] = fmaf(from_neutral(dot[1]), ws.x * xs[n].y, sum[1]);
      sum[2] = fmaf(from_neutral(dot[2]), ws.y * xs[n].x, sum[2]);
      sum[3] = fmaf(from_neutral(dot[3]), ws.y * xs[n].y, sum[3]);
    }
  }
}

// Block `k` of a stage.
DEVICE void multiply(Sums &sums, const u8 *stage, int k, int warp_o, int warp_t, int lane) {
  const int m = warp_o * MINE_O * K_BLOCKS + k, n = warp_t * MINE_T * K_BLOCKS + k;
  const u8 *w = stage + m * W_TILE, *x = stage + X_AT + n * X_TILE;
  if constexpr (SCALED) multiply_scaled(sums, w, x, stage + W_SCALES_AT + m * W_SCALES, stage + X_SCALES_AT + n * X_SCALES, lane);
  else multiply_16_bits(sums, w, x, lane);
}

// --- putting together

DEVICE void fill(Sums &sums, float value) {
#pragma unroll
  for (int i = 0; i < SUMS * 4; i++) sums[i / 4 / MINE_T][i / 4 % MINE_T][i % 4] = value;
}
DEVICE void add(Sums &total, const Sums &sums) {
#pragma unroll
  for (int i = 0; i < SUMS * 4; i++) total[i / 4 / MINE_T][i / 4 % MINE_T][i % 4] += sums[i / 4 / MINE_T][i / 4 % MINE_T][i % 4];
}
// A warp's sums in memory: [SUMS][32 lanes] float4.
DEVICE void put(float4 *place, const Sums &sums, int lane) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    const float(&s)[4] = sums[i / MINE_T][i % MINE_T];
    place[i * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
  }
}
DEVICE void add_from(Sums &total, const float4 *place, int lane) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    const float4 v = place[i * 32 + lane];
    float(&s)[4] = total[i / MINE_T][i % MINE_T];
    s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
  }
}

// Where the sums of a warp of a team lie in slot `slot` of `partial`.
DEVICE float4 *partial_of(float4 *partial, const Tile &tile, int slot, int warp) {
  return partial + (((u64)slot * ROW_BLOCKS * TOKEN_BLOCKS + tile.token_block * ROW_BLOCKS + tile.row_block) * TEAM + warp) * (SUMS * 32);
}

// A round of pieces is over: team 0 of the first share adds them up in `total`; the other shares leave every piece in its slot.
DEVICE void end_round(Sums &total, Sums &sums, float4 *partial, float4 *merge, const Tile &tile, int piece, int team, int warp, int lane) {
  if (SPLIT > 1 && tile.first > 0) {
    if (piece + team < tile.last) put(partial_of(partial, tile, piece + team - PER_SPLIT + 1, warp), sums, lane);
  } else if constexpr (WARPS_K == 1) {
    add(total, sums);
  } else {
    if (team > 0 && piece + team < tile.last) put(merge + ((team - 1) * TEAM + warp) * (SUMS * 32), sums, lane);
    __syncthreads();
    if (team == 0) {
      add(total, sums);
      for (int other = 1; other < WARPS_K && piece + other < tile.last; other++)
        add_from(total, merge + ((other - 1) * TEAM + warp) * (SUMS * 32), lane);
    }
  }
  fill(sums, 0.0f);
}

// Whether this block of threads is the last of its tile; then `total` becomes the sum of all pieces.
DEVICE bool last_of_split(Sums &total, float4 *partial, u32 *counters, const Tile &tile, const Place &me) {
  static __shared__ u32 before;
  if (tile.first == 0 && me.team == 0) put(partial_of(partial, tile, 0, me.warp), total, me.lane);
  __syncthreads();
  u32 *counter = counters + tile.token_block * ROW_BLOCKS + tile.row_block;
  if (threadIdx.x == 0) {
    before = arrive(counter);
    if (before == SPLIT - 1) *counter = 0;
  }
  __syncthreads();
  if (before != SPLIT - 1) return false;
  if (me.team > 0) return true;
  fill(total, -0.0f); // added to a number, it leaves all its bits
  for (int slot = 0; slot < PIECES - PER_SPLIT + 1; slot++) add_from(total, partial_of(partial, tile, slot, me.warp), me.lane);
  return true;
}

// --- writing

DEVICE void write(float *out, const Sums &total, const float *bias, const float *residual, const Tile &tile, int count,
                  const Place &me) {
  constexpr int MADE = SILU ? MINE_O / 2 : MINE_O; // tiles of out
#pragma unroll
  for (int m = 0; m < MADE; m++) {
#pragma unroll
    for (int n = 0; n < MINE_T; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int o = (tile.row_block * OUT_TILES_OF_BLOCK + out_tile(me.warp_o * MINE_O + m)) * 16 + me.lane / 4 + e / 2 * 8;
        const int token = tile.token_block * TILE_T + (me.warp_t * MINE_T + n) * 8 + me.lane % 4 * 2 + e % 2;
        if (o >= O || token >= count) continue;
        float y = total[m][n][e];
        const u64 place = (u64)token * O + o;
        y = finished<BIAS, ACTIVATION, RESIDUAL>(y, bias + o, residual + place);
        if constexpr (SILU) y = silu(y) * finished<BIAS, NO_ACTIVATION, false>(total[m + MADE][n][e], bias + O + o, nullptr);
        out[place] = y;
      }
    }
  }
}

DEVICE Tile my_tile(int count) {
  const int band = blockIdx.x / (BAND * ROW_BLOCKS), within = blockIdx.x % (BAND * ROW_BLOCKS);
  const int left = TOKEN_BLOCKS - band * BAND, width = left < BAND ? left : BAND;
  Tile tile;
  tile.row_block = within / width;
  tile.token_block = band * BAND + within % width;
  tile.first = blockIdx.y * PER_SPLIT;
  tile.last = tile.first + PER_SPLIT < PIECES ? tile.first + PER_SPLIT : PIECES;
  tile.groups = (count + 7) / 8 - tile.token_block * GROUPS;
  return tile;
}

// How many steps a tile takes: all rounds but the last are whole.
DEVICE int steps_of(const Tile &tile) {
  const int rounds = (tile.last - tile.first + WARPS_K - 1) / WARPS_K, left = BLOCKS - (tile.first + (rounds - 1) * WARPS_K) * PIECE_STEPS;
  return (rounds - 1) * STAGES_OF_PIECE + (left < PIECE_STEPS ? (left + K_BLOCKS - 1) / K_BLOCKS : STAGES_OF_PIECE);
}

// The tile's pieces, summed as `end_round` says.
DEVICE void sum_pieces(Sums &total, float4 *partial, u8 *ring, const Source &source, const Tile &tile, const Place &me) {
  float4 *merge = (float4 *)(ring + STAGES * WARPS_K * STAGE);
  u8 *mine = ring + me.team * STAGE;
  const bool useful = me.warp_t * MINE_T < tile.groups;
  Sums sums;
  fill(total, -0.0f); // added to a number, it leaves all its bits
  fill(sums, 0.0f);
  const int steps = steps_of(tile);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < steps) fetch(mine + i * (WARPS_K * STAGE), source, tile, i, me.team, me.thread);
    copy_commit();
  }
  int reading = 0, writing = STAGES - 1;
  for (int i = 0; i < steps; i++) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    const int blocks = blocks_at(tile, i, me.team);
#pragma unroll
    for (int k = 0; k < K_BLOCKS; k++) {
      if (useful && k < blocks) multiply(sums, mine + reading * (WARPS_K * STAGE), k, me.warp_o, me.warp_t, me.lane);
      if (k > 0) continue; // behind the first block, so that the tensor cores have work meanwhile
      if (i + STAGES - 1 < steps) fetch(mine + writing * (WARPS_K * STAGE), source, tile, i + STAGES - 1, me.team, me.thread);
      copy_commit();
    }
    if (i % STAGES_OF_PIECE == STAGES_OF_PIECE - 1 || i == steps - 1)
      end_round(total, sums, partial, merge, tile, tile.first + i / STAGES_OF_PIECE * WARPS_K, me.team, me.warp, me.lane);
    reading = reading + 1 < STAGES ? reading + 1 : 0;
    writing = writing + 1 < STAGES ? writing + 1 : 0;
  }
  copy_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    matmul(float *out, SPLIT_ARGUMENTS const u8 *prepared, const u8 *weight, BIAS_ARGUMENT RESIDUAL_ARGUMENT const int *rows) {
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
  const int count = rows[0];
  const Tile tile = my_tile(count);
  if (tile.groups <= 0) return;
  const Place me = my_place();
  Sums total;
  sum_pieces(total, partial, ring, source_of(prepared, weight, tile, me.thread), tile, me);
#if SPLIT > 1
  if (!last_of_split(total, partial, counters, tile, me)) return;
#endif
  if (me.team == 0 && me.warp_t * MINE_T < tile.groups) write(out, total, bias, residual, tile, count, me);
}
