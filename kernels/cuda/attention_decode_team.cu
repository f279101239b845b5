// attention_decode.cu for few sequences: a partition of 256 keys is done by a thread block of four warps, in a third of the time. Same bits.
//
//   out           [T, H, D] float32          rows from `count` on are not touched
//   partial, counters                        scratch as there, without CASCADE
//   q             [T, H, D] float32          row b belongs to sequence b
//   cache         [P, 2, K, S, D] CACHE_TYPE, block_tables [B, M] int32, context_lens [B] int32, count [1] int32, sinks [H] float32, B: as there
//
// Constants: those of attention.cuh; TEAM, which is 4. CACHE_TYPE is F16 or BF16, D is 64 or 128.
// Launch: block 128; shared memory 512 * (2 * D + 16) + 28992 bytes; grid: as many blocks as the GPU holds at once, and at most as many as
// there can be units, B * K * PARTS * ceil(M * S / 256).
//
// Unit of work: as there, units are (sequence, KV head's rows, partition of 256 keys), in this order, and each thread block takes an equal
// run of them. One warp needs about 10,000 cycles for a partition, 2,500 for each of its four tiles of 64 keys, most of them latency, and
// with one sequence few warps have work. Here warp w has tile w: it computes the tile's scores and, once all warps have exchanged the
// largest scores of their rows, its weights under the maximum that the sequential kernel would have after that tile. The weighted values
// are divided by columns: each warp adds all four tiles, one after the other, to its quarter of the columns, so that every number of the
// result is one accumulator over ascending keys. The sums of weights, four for each row, are chains over ascending keys as well; sixteen
// lanes of each warp have one each. While the values are added, the next unit's keys are copied, and its values while it is scored.
#define CASCADE 0
#include "decode_merge.cuh"

static_assert(TEAM == 4 && TEAM * TILE == PARTITION, "attention_decode_team: a warp for each tile");
static_assert(!PACKED && !CASCADE && (D == 64 || D == 128), "attention_decode_team: F16 or BF16, D 64 or 128");

constexpr int TILE_BYTES = TILE * PITCH, CHAIN = 20;  // a lane's sixteen weights of a row and a tile, and padding
constexpr int CHAINS = 16 * 4;                        // rows, and the lanes of each
constexpr int VALUES_AT = TEAM * TILE_BYTES, OPERANDS_AT = 2 * VALUES_AT, WEIGHTS_AT = OPERANDS_AT + TEAM * 4 * 512;

// Of a thread block, in shared memory: keys and values [TEAM][TILE] rows; the weights as operands of mma [TEAM][4 steps][32 lanes], and as
// the chains of their sums [TEAM][CHAINS][CHAIN]; the largest scores of each tile [TEAM][16 rows], and the sums of weights [16].
struct Shared {
  u8 *keys, *values;
  uint4 *operands;
  float *weights, *tops, *sums;
};

// The blocks of the lane's keys, number lane and lane + 32 of the tile; -1 where the whole contiguous run of them is hidden.
struct Blocks {
  int of[2];
};

// The maxima of a row after each of the tiles, as `softmax` has them, and what the row's state is rescaled by at each.
struct Maxima {
  float max[TEAM], scale[TEAM];
};

DEVICE Shared shared_at(u8 *memory);
DEVICE int tile_of_warp();
DEVICE int tile_start(const Cursor &at, int tile);
DEVICE bool has_keys(const Cursor &at, int tile);
DEVICE Blocks look_up(const Cursor &at, const Batch &batch, const Run &run);
DEVICE void request(u8 *rows, const uint4 *side, const Blocks &blocks, const Cursor &at, const Run &run);
DEVICE Maxima maxima_of(const float *tops, int row);
DEVICE void store_weights(float (&s)[TILE / 8][4], const Shared &shared, const float (&max)[2]);
DEVICE void add_weights(const Shared &shared);
DEVICE void add_columns(RowState &state, const Shared &shared, const Maxima (&maxima)[2], const Cursor &at);

extern "C" __global__ void __launch_bounds__(32 * TEAM, 1)
    attention_decode_team(float *out, float *partial, u32 *counters, const float *q, const uint4 *cache, const int *block_tables,
                          const int *context_lens, const int *count, SINKS_ARGUMENT int B) {
  await_previous();
  DYNAMIC_SHARED(memory);
  const Shared shared = shared_at(memory);
  const Batch batch = {block_tables, context_lens, nullptr, min(B, count[0]), 0};
  const Records records = records_at(partial, B, 0);
  Run run;
  Cursor at;
  if (!find_run(run, at, batch)) return;
  const int warp = tile_of_warp(), g = lane_of() / 4;
  u8 *own_keys = shared.keys + warp * TILE_BYTES, *own_values = shared.values + warp * TILE_BYTES;
  Blocks blocks = look_up(at, batch, run);
  request(own_keys, cache, blocks, at, run);
  request(own_values, cache + VALUES_OFFSET, blocks, at, run);
  Queries queries;
  bool loaded = false;
  while (at.unit < run.end) {
    Cursor next = at;
    at.start = min(tile_start(at, TEAM), (at.context + TILE - 1) & -TILE) - TILE;  // the unit's last tile
    next.start = at.start;
    advance(next, batch, run);
    blocks = look_up(next, batch, run);
    if (!loaded) load_queries(queries, row_pointer(q, at.b, at.head, g), row_pointer(q, at.b, at.head, g + 8), nullptr, lane_of(), 32);
    loaded = next.b == at.b && next.head == at.head;

    float s[TILE / 8][4];
    copy_wait<1>();
    __syncwarp();
    score<0, 32>(s, queries, own_keys + key_lane_offset());
    score<32, 32>(s, queries, own_keys + STAGE_KEYS * PITCH + key_lane_offset());
    __syncwarp();
    request(own_keys, cache, blocks, next, run);
    cap_scores(s);
    const int start = tile_start(at, warp);
    if (start < first_visible(at.context - 1) || start + TILE > at.context) mask(s, start, {at.context - 1, at.context - 1});
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float top = row_max(s, r);
      if (lane_of() % 4 == 0) shared.tops[warp * 16 + g + 8 * r] = top;
    }
    __syncthreads();

    const Maxima maxima[2] = {maxima_of(shared.tops, g), maxima_of(shared.tops, g + 8)};
    float own[2];
#pragma unroll
    for (int i = 0; i < 2 * TEAM; i++)
      if (i / 2 == warp) own[i % 2] = maxima[i % 2].max[i / 2];  // a register, not an address
    store_weights(s, shared, own);
    copy_wait<1>();
    __syncthreads();

    RowState state;
    reset(state);
    add_columns(state, shared, maxima, at);
    add_weights(shared);
    __syncthreads();
    request(own_values, cache + VALUES_OFFSET, blocks, next, run);
    const float sum[2] = {shared.sums[g], shared.sums[g + 8]};
#pragma unroll
    for (int r = 0; r < 2; r++) state.max[r] = maxima[r].max[TEAM - 1];
    end_partition(state, sum, out, SINKS_POINTER, records, counters, run, at);
    at = next;
  }
  copy_wait<0>();
}

DEVICE Shared shared_at(u8 *memory) {
  float *weights = (float *)(memory + WEIGHTS_AT), *tops = weights + TEAM * CHAINS * CHAIN;
  return {memory, memory + VALUES_AT, (uint4 *)(memory + OPERANDS_AT), weights, tops, tops + TEAM * 16};
}

DEVICE int tile_of_warp() { return threadIdx.x / 32; }
// The first key of tile `tile` of the cursor's partition.
DEVICE int tile_start(const Cursor &at, int tile) { return at.start / PARTITION * PARTITION + tile * TILE; }
DEVICE bool has_keys(const Cursor &at, int tile) {
  return tile_start(at, tile) < at.context && tile_start(at, tile) + TILE > first_visible(at.context - 1);
}

// --- copies of the warp's tile

DEVICE Blocks look_up(const Cursor &at, const Batch &batch, const Run &run) {
  Blocks blocks;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = tile_start(at, tile_of_warp()) + half * STAGE_KEYS + lane_of(), low = key & -RUN_KEYS;
    const bool visible = low < at.context && low + RUN_KEYS > first_visible(at.context - 1);
    blocks.of[half] = at.unit < run.end && visible ? batch.tables[(s64)at.b * M + key / S] : -1;
  }
  return blocks;
}

// Copies the tile's rows to `rows`, zeros for hidden keys; after the last unit nothing, but still an empty group.
DEVICE void request(u8 *rows, const uint4 *side, const Blocks &blocks, const Cursor &at, const Run &run) {
  const int start = tile_start(at, tile_of_warp());
#pragma unroll
  for (int half = 0; half < 2 && at.unit < run.end; half++) {
    const int key = start + half * STAGE_KEYS, first = first_visible(at.context - 1) - key, end = at.context - key;
    const u32 offset = key_offset(max(blocks.of[half], 0), at.head / PARTS, key + lane_of());
    u8 *to = rows + half * STAGE_KEYS * PITCH;
    if (first <= 0 && end >= STAGE_KEYS) copy_stage<true>(to, side, offset, first, end);
    else copy_stage<false>(to, side, offset, first, end);
  }
  copy_commit();
}

// --- weights

DEVICE Maxima maxima_of(const float *tops, int row) {
  Maxima found;
  float old = MINUS_INFINITY;
#pragma unroll
  for (int tile = 0; tile < TEAM; tile++) {
    const float max = fmaxf(old, tops[tile * 16 + row] * SCALE_2);
    found.max[tile] = max, found.scale[tile] = fast_exp2(old - subtrahend(max)), old = max;
  }
  return found;
}

// Scores of the warp's tile become weights, for all warps to read.
DEVICE void store_weights(float (&s)[TILE / 8][4], const Shared &shared, const float (&max)[2]) {
  const int tile = tile_of_warp(), lane = lane_of();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float base = subtrahend(max[r]);
    float4 *chain = (float4 *)(shared.weights + (tile * CHAINS + lane + 32 * r) * CHAIN);  // lane = 4 row + t
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; i++) s[n][i] = fast_exp2(fmaf(s[n][i], SCALE_2, -base));
#pragma unroll
    for (int n = 0; n < TILE / 8; n += 2) chain[n / 2] = make_float4(s[n][2 * r], s[n][2 * r + 1], s[n + 1][2 * r], s[n + 1][2 * r + 1]);
  }
#pragma unroll
  for (int n = 0; n < TILE / 8; n += 2)
    shared.operands[(tile * 4 + n / 2) * 32 + lane] =
        make_uint4(pack_pair<COMPUTE>(s[n][0], s[n][1]), pack_pair<COMPUTE>(s[n][2], s[n][3]), pack_pair<COMPUTE>(s[n + 1][0], s[n + 1][1]),
                   pack_pair<COMPUTE>(s[n + 1][2], s[n + 1][3]));
}

// The sums of the weights of four rows, sixteen chains: the lanes from 16 on do what the others do.
DEVICE void add_weights(const Shared &shared) {
  const int chain = tile_of_warp() * 16 + lane_of() % 16, row = chain / 4;
  const Maxima maxima = maxima_of(shared.tops, row);
  float sum = 0.0f;
#pragma unroll
  for (int tile = 0; tile < TEAM; tile++) {
    const float4 *weights = (const float4 *)(shared.weights + (tile * CHAINS + chain) * CHAIN);
    sum *= maxima.scale[tile];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 four = weights[i];
      sum += four.x, sum += four.y, sum += four.z, sum += four.w;
    }
  }
  sum = row_sum(sum);
  if (lane_of() < 16 && chain % 4 == 0) shared.sums[row] = sum;
}

// The weighted values of the warp's columns, all tiles.
DEVICE void add_columns(RowState &state, const Shared &shared, const Maxima (&maxima)[2], const Cursor &at) {
  const u8 *columns = shared.values + value_lane_offset() + first_column() * 2;
#pragma unroll
  for (int tile = 0; tile < TEAM; tile++) {
    if (!has_keys(at, tile)) continue;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) state.o[n][i] *= maxima[i / 2].scale[tile];
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) {
      const uint4 words = shared.operands[(tile * 4 + step) * 32 + lane_of()];
      const u32 p[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int column = 0; column < COLUMNS; column += 2) {
        u32 v[4];
        load_matrices_transposed(v, columns + tile * TILE_BYTES + step * 16 * PITCH + column * 16);
        multiply(state.o[column], p, v[0], v[1]);
        multiply(state.o[column + 1], p, v[2], v[3]);
      }
    }
  }
}
