// Attention of sixteen query rows to one tile of keys, done by a warp; shared by decode and prefill. The order of arithmetic is fixed here,
// so a row has the same bits in both kernels, for any batch and any grid:
//
//   - q is rounded to CACHE_TYPE, or to bfloat16 where that is packed. A score is one mma accumulator over d in steps of 16, ascending.
//   - Tiles of TILE keys start at multiples of TILE counted from the first token of the sequence; likewise partitions of PARTITION keys and
//     sections of SECTION keys. A tile's weights are 2^(score * SCALE log2(e) - max), float32. Each of the four lanes of a row sums the
//     weights of its own keys, ascending, in float32. For the product with the values, weights are rounded to CACHE_TYPE and accumulated in
//     one accumulator over ascending keys.
//   - When a tile raises the maximum of a partition, what the partition has so far is rescaled. Its sum is that of lanes (0 + 1) + (2 + 3).
//   - The partitions of a section are merged in ascending order, then the sections, by `merge_scales_of` and o = fmaf(o', next, o * old).
//   - A sink, one more score of a head that has no value, is added to the sum of the weights last, after the sections are merged.
//
// A key hidden from a row has weight exactly 0; hidden tiles, partitions and sections leave the row's state unchanged. Scores of hidden
// keys may be NaN, but their values must be finite: the code that loads a tile writes zeros for keys that none of its rows sees.
//
// Constants: H, K, D, S, M, CACHE_TYPE (F16, BF16, or packed as in packed_cache.cuh), SCALE (above 0), WINDOW (0: none), SECTION (default 4096; a multiple of 256),
// CAP (of scores * SCALE, none if not defined), SINKS (none if not defined; they are not scaled).
// H % K == 0, D % 16 == 0, D from 32 to 512, S a power of two from 8 to 256. One layer's cache is smaller than 64 GiB. Heads above 256 are
// multiples of 32.
//
// A warp has registers for 256 columns of the values of sixteen rows. Wider heads have two HALVES of D / 2 columns: a thread block has one of
// them, and computes all scores. The row's bits are those of one warp that had all columns, as columns do not depend on each other.
//
// Keys and values are stored in shared memory as rows of D numbers plus 16 bytes of padding, so that the eight rows that ldmatrix reads at
// once start in different banks.
//
// Sources: online softmax, Milakov and Gimelshein (arXiv:1805.02867); tiles and the deferred division, FlashAttention-2 (arXiv:2307.08691);
// the split over keys and its merge, flash decoding.
#pragma once
#include "formats.cuh"
#include "kv_cache.h"
#include "own_keys.cuh"
#include "portable.h"

#ifndef SECTION
#define SECTION 4096
#endif
#ifndef SINKS
#define SINKS 0
#endif
#if SINKS
#define SINKS_ARGUMENT const float *sinks,
#define SINKS_POINTER sinks
#else
#define SINKS_ARGUMENT
#define SINKS_POINTER nullptr
#endif
#ifndef TEAM  // warps that share a partition, each with its part of the values' columns
#define TEAM 1
#endif
#define MINUS_INFINITY float_from_bits(0xFF800000u)  // the maximum before the first key

constexpr int G = H / K;  // query heads of a KV head
constexpr int TILE = 64;
constexpr int PARTITION = 256;
constexpr int STEPS = D / 16;  // mma steps of a score
constexpr int HALVES = D > 256 ? 2 : 1;
constexpr int VALUES = D / HALVES;          // columns of an output row that a thread block has
constexpr int COLUMNS = VALUES / 8 / TEAM;  // mma column groups of them that a warp has
constexpr int PIECES = D / 8;               // of 16 bytes in a row of the cache
constexpr int PITCH = D * 2 + 16;           // bytes from row to row of keys in shared memory
constexpr int VALUES_PITCH = VALUES * 2 + 16;
constexpr float SCALE_2 = (float)(SCALE * 1.4426950408889634);

#if CACHE_TYPE == KV_INT8 || CACHE_TYPE == KV_INT4 || CACHE_TYPE == KV_FP8
#define PACKED 1
#include "packed_cache.cuh"
constexpr int COMPUTE = BF16;  // what is multiplied
static_assert(CACHE_TYPE != KV_INT4 || D % 32 == 0, "attention: D must be a multiple of 32 for KV_INT4");
#else
#define PACKED 0
constexpr int COMPUTE = CACHE_TYPE;
static_assert(CACHE_TYPE == F16 || CACHE_TYPE == BF16, "attention: CACHE_TYPE must be F16 or BF16, or packed");
#endif
static_assert(H % K == 0, "attention: H must be a multiple of K");
static_assert(D % 16 == 0 && D >= 32 && D <= 512, "attention: D must be a multiple of 16 from 32 to 512");
static_assert(HALVES == 1 || D % 32 == 0, "attention: D above 256 must be a multiple of 32");
static_assert(S >= 8 && S <= 256 && (S & (S - 1)) == 0, "attention: S must be a power of two from 8 to 256");
static_assert(SECTION % PARTITION == 0, "attention: SECTION must be a multiple of 256");

// The state of sixteen rows in one partition, spread over the lanes like the C of an mma: with g = lane / 4, index 0 and o[.][0..1] belong
// to row g, index 1 and o[.][2..3] to row g + 8.
struct RowState {
  float o[COLUMNS][4];  // weighted sums of values
  float max[2];         // largest score * SCALE_2 so far; -infinity before the first key
  float sum[2];         // of the weights: this lane's part
};

DEVICE u32 lane_of() { return TEAM == 1 ? threadIdx.x : threadIdx.x % 32; }
// The first of a warp's columns of the values.
DEVICE int first_column() { return TEAM == 1 ? 0 : threadIdx.x / 32 * (COLUMNS * 8); }

// First key that the row at `position` sees.
DEVICE int first_visible(int position) { return WINDOW > 0 ? max(0, position - WINDOW + 1) : 0; }

DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (COMPUTE == F16) mma_f16(c, a, b0, b1);
  else mma_bf16(c, a, b0, b1);
}

DEVICE void reset(RowState &state) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) state.o[n][i] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; r++) state.max[r] = MINUS_INFINITY, state.sum[r] = 0.0f;
}

// --- queries

// Two rows of q [D] per lane, as the A operand of the scores' mma. Steps from REGISTER_STEPS on, for which there are no registers, are kept
// in shared memory, QUERY_BYTES a thread, each read only by the thread that wrote it.
constexpr int REGISTER_STEPS = STEPS <= 8 ? STEPS : HALVES == 1 ? 4 : 0;
constexpr int KEPT_STEPS = REGISTER_STEPS ? REGISTER_STEPS : 1;  // no array is empty
constexpr int STEP_UNROLL = HALVES == 1 ? STEPS : 4;             // full where steps are registers
constexpr int QUANT_UNROLL = HALVES == 1 ? STEPS : 2;            // the same of packed keys; 4 would spill
constexpr int QUERY_BYTES = (STEPS - REGISTER_STEPS) * 16;
struct Queries {
  u32 registers[KEPT_STEPS][4];
  uint4 *shared;  // [STEPS - REGISTER_STEPS][threads]; this points to the thread's own column
  int threads;
};
DEVICE void query_step(u32 (&a)[4], const Queries &q, int step) {
  if (step >= REGISTER_STEPS) {
    const uint4 words = q.shared[(step - REGISTER_STEPS) * q.threads];
    a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = q.registers[step % KEPT_STEPS][i];
  }
}

DEVICE u32 query_pair(const float *from) {
  const float2 pair = from ? *(const float2 *)from : make_float2(0.0f, 0.0f);
  return pack_pair<COMPUTE>(pair.x, pair.y);
}

// One step of two rows, rounded from float32; zeros for a row that is null.
DEVICE void load_step(u32 (&a)[4], const float *row, const float *row_plus_8, int step) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float *from = i % 2 ? row_plus_8 : row;
    const int column = PACKED ? threadIdx.x % 4 * 4 + i / 2 * 2 : i / 2 * 8 + threadIdx.x % 4 * 2;  // of sixteen
    a[i] = query_pair(from ? from + step * 16 + column : nullptr);
  }
}

// All steps. `shared` [QUERY_BYTES / 16][threads]; the caller is number `thread` of them. UNROLL: all where steps are kept in registers.
template <int UNROLL = STEPS>
DEVICE void load_queries(Queries &q, const float *row, const float *row_plus_8, void *shared, int thread, int threads) {
  q.shared = (uint4 *)shared + thread;
  q.threads = threads;
#pragma unroll(UNROLL)
  for (int step = 0; step < STEPS; step++) {
    u32 a[4];
    load_step(a, row, row_plus_8, step);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (step < REGISTER_STEPS) q.registers[step % KEPT_STEPS][i] = a[i];
    if (step >= REGISTER_STEPS) q.shared[(step - REGISTER_STEPS) * threads] = make_uint4(a[0], a[1], a[2], a[3]);
  }
}

// --- a tile: scores, softmax, weighted values

#if PACKED

DEVICE int key_lane_offset() { return 0; }
DEVICE int value_lane_offset() { return 0; }
// The tile's key of score s[n][i], without the lane's four of sixteen; and the distance of the keys of two lanes.
DEVICE int key_of(int n, int i) { return n / 2 * 16 + n % 2 * 2 + i % 2; }
constexpr int LANE_KEYS = 4;

// Scores of the KEYS keys in a stage, which are those of a tile from its key FIRST on.
template <int FIRST, int KEYS, typename Operand> DEVICE void score(float (&s)[TILE / 8][4], const Operand &queries, const u8 *stage) {
  static_assert(KEYS == 32, "a packed stage has 32 keys");
  const int g = threadIdx.x % 32 / 4;
  const u32 *words = (const u32 *)stage + threadIdx.x % 4 * KEY_PITCH + g / 2 * 4 + g % 2;
#pragma unroll
  for (int n = FIRST / 8; n < (FIRST + KEYS) / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
#pragma unroll(QUANT_UNROLL)
  for (int step = 0; step < ROW_BYTES / 16; step++) {
    u32 low[4], high[4], b0, b1;
    query_step(low, queries, step);
    if (CACHE_TYPE == KV_INT4) query_step(high, queries, step + STEPS / 2);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
      const u32 word = words[step * 4 * KEY_PITCH + key_of(n, 0)];
      quant_operand(b0, b1, word, 0);
      multiply(s[FIRST / 8 + n], low, b0, b1);
      if (CACHE_TYPE != KV_INT4) continue;
      quant_operand(b0, b1, word, 1);
      multiply(s[FIRST / 8 + n], high, b0, b1);
    }
  }
#pragma unroll
  for (int n = FIRST / 8; n < (FIRST + KEYS) / 8; n += 2) {
    float scale[4];
    lane_scales(scale, stage, (n - FIRST / 8) / 2);
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] *= scale[i % 2], s[n + 1][i] *= scale[2 + i % 2];
  }
}

#else

DEVICE int key_of(int n, int i) { return n * 8 + i % 2; }
constexpr int LANE_KEYS = 2;

// Byte offsets of this lane's rows for load_matrices in keys, and for load_matrices_transposed in values.
DEVICE int key_lane_offset() { return ((threadIdx.x / 16 % 2 * 8) + threadIdx.x % 8) * PITCH + threadIdx.x / 8 % 2 * 16; }
DEVICE int value_lane_offset() { return ((threadIdx.x / 8 % 2 * 8) + threadIdx.x % 8) * VALUES_PITCH + threadIdx.x / 16 % 2 * 16; }

// Scores of KEYS keys of a tile, starting with its key FIRST. `keys`: their first row plus key_lane_offset(). `queries`: Queries, or
// another type that has a query_step.
template <int FIRST, int KEYS, typename Operand> DEVICE void score(float (&s)[TILE / 8][4], const Operand &queries, const u8 *keys) {
#pragma unroll
  for (int n = FIRST / 8; n < (FIRST + KEYS) / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
#pragma unroll(STEP_UNROLL)
  for (int step = 0; step < STEPS; step++) {
    u32 q[4];
    query_step(q, queries, step);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) {
      u32 k[4];
      load_matrices(k, keys + n * 8 * PITCH + step * 32);
      multiply(s[FIRST / 8 + n], q, k[0], k[1]);
      multiply(s[FIRST / 8 + n + 1], q, k[2], k[3]);
    }
  }
}

#endif

// Scores become what `softmax` needs for CAP tanh(score * SCALE / CAP): with c = CAP / SCALE, c tanh(s / c) = c - 2 c / (e^(2 s / c) + 1).
// Hidden keys must be hidden afterwards.
DEVICE void cap_scores(float (&s)[TILE / 8][4]) {
#ifdef CAP
  constexpr float c = (float)(CAP / SCALE), twice = (float)(2 * 1.4426950408889634 * SCALE / CAP);
#pragma unroll
  for (int n = 0; n < TILE / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = c - __fdividef(2.0f * c, fast_exp2(s[n][i] * twice) + 1.0f);
#endif
}

// Hides the keys of the tile at `start` that rows at these positions do not see.
DEVICE void mask(float (&s)[TILE / 8][4], int start, const int (&position)[2]) {
  const int first_key = start + threadIdx.x % 4 * LANE_KEYS;
#pragma unroll
  for (int n = 0; n < TILE / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = first_key + key_of(n, i), last = position[i / 2];
      if (key > last || key < first_visible(last)) s[n][i] = MINUS_INFINITY;
    }
}

// The largest score of a lane's row r, in each of the row's four lanes.
DEVICE float row_max(const float (&s)[TILE / 8][4], int r) {
  float largest = MINUS_INFINITY;
#pragma unroll
  for (int n = 0; n < TILE / 8; n++) largest = fmaxf(largest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
  largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
}

// What is subtracted from scores: -infinity minus -infinity would be NaN.
DEVICE float subtrahend(float max) { return max == MINUS_INFINITY ? 0.0f : max; }

// Scores become weights under the new maxima, and the rows' state is rescaled. Rescaling by 1, or of nothing, changes no bit; it is the
// common case and skipped.
DEVICE void softmax(float (&s)[TILE / 8][4], RowState &state) {
  float scale[2];
  bool rescale = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float old = state.max[r], max = fmaxf(old, row_max(s, r) * SCALE_2), base = subtrahend(max);
    scale[r] = fast_exp2(old - base);
    rescale |= max != old && old != MINUS_INFINITY;
    state.max[r] = max;
    float sum = state.sum[r] * scale[r];
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; i++) {
        s[n][i] = fast_exp2(fmaf(s[n][i], SCALE_2, -base));
        sum += s[n][i];
      }
    state.sum[r] = sum;
  }
  if (!__any_sync(ALL_LANES, rescale)) return;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) state.o[n][i] *= scale[i / 2];
}

#if PACKED

// A weight times the scale of its value. A hidden value's scale may be anything.
DEVICE float scaled(float weight, float scale) { return weight == 0.0f ? 0.0f : weight * scale; }

// Adds the weighted values of a stage, which are those of a tile from its key FIRST on.
template <int FIRST, int KEYS> DEVICE void add_values(RowState &state, const float (&s)[TILE / 8][4], const u8 *stage) {
  static_assert(KEYS == 32, "a packed stage has 32 values");
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++) {
    const int n = FIRST / 8 + 2 * step;
    const u32 *words = (const u32 *)stage + (4 * step + threadIdx.x % 4) * VALUE_PITCH + threadIdx.x % 32 / 4;
    float c[4];
    lane_scales(c, stage, step);
    const u32 p[4] = {pack_bf16(scaled(s[n][0], c[0]), scaled(s[n][1], c[1])), pack_bf16(scaled(s[n][2], c[0]), scaled(s[n][3], c[1])),
                      pack_bf16(scaled(s[n + 1][0], c[2]), scaled(s[n + 1][1], c[3])),
                      pack_bf16(scaled(s[n + 1][2], c[2]), scaled(s[n + 1][3], c[3]))};
#pragma unroll
    for (int column = 0; column < VALUE_BYTES / 8; column++) {
      const u32 word = words[column * 8];
      u32 b0, b1;
      quant_operand(b0, b1, word, HALVES == 2 ? blockIdx.y % HALVES : 0);
      multiply(state.o[column], p, b0, b1);
      if (CACHE_TYPE != KV_INT4 || HALVES == 2) continue;
      quant_operand(b0, b1, word, 1);
      multiply(state.o[COLUMNS / 2 + column % (COLUMNS / 2)], p, b0, b1);
    }
  }
}

#else

// Adds the weighted values of KEYS keys of a tile, starting with its key FIRST. `values`: their first row plus value_lane_offset().
template <int FIRST, int KEYS> DEVICE void add_values(RowState &state, const float (&s)[TILE / 8][4], const u8 *values) {
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++) {
    const int n = FIRST / 8 + 2 * step;
    const u32 p[4] = {pack_pair<COMPUTE>(s[n][0], s[n][1]), pack_pair<COMPUTE>(s[n][2], s[n][3]),
                      pack_pair<COMPUTE>(s[n + 1][0], s[n + 1][1]), pack_pair<COMPUTE>(s[n + 1][2], s[n + 1][3])};
#pragma unroll
    for (int column = 0; column < COLUMNS; column += 2) {
      u32 v[4];
      load_matrices_transposed(v, values + step * 16 * VALUES_PITCH + column * 16);
      multiply(state.o[column], p, v[0], v[1]);
      multiply(state.o[column + 1], p, v[2], v[3]);
    }
  }
}

#endif

// --- merging partitions and sections

// A row's sum of weights at the end of a partition, from its four lanes' parts, in each of them.
DEVICE float row_sum(float part) {
  part += __shfl_xor_sync(ALL_LANES, part, 1);
  return part + __shfl_xor_sync(ALL_LANES, part, 2);
}

// To merge two results: the first is scaled by `old`, the second by `next`. Either may be empty: maximum -infinity, and zeros.
struct MergeScales {
  float max, old, next;
};
DEVICE MergeScales merge_scales_of(float old_max, float next_max) {
  const float max = fmaxf(old_max, next_max), base = subtrahend(max);
  return {max, fast_exp2(old_max - base), fast_exp2(next_max - base)};
}

// The sum of a row's weights, relative to its largest score `max`, with that of its head's sink. A sink far above all scores makes it
// infinite: then nothing is left of the values.
DEVICE float with_sink(float sum, float max, const float *head_sinks, int head) {
  return SINKS ? sum + fast_exp2(fmaf(head_sinks[head], 1.4426950408889634f, -subtrahend(max))) : sum;
}

// --- addresses and the division of work

// Offset of row `key % S` of a KV head's keys in a block, in units of 16 bytes; the row's values are VALUES_OFFSET further. [P, 2, K, S, D]
constexpr u32 VALUES_OFFSET = (u32)K * S * PIECES;
DEVICE u32 key_offset(int block, int head, int key) {
  return (u32)block * (2 * VALUES_OFFSET) + (u32)head * (S * PIECES) + (u32)(key % S) * PIECES;
}

// Each lane owns n consecutive units, in lane order, after `before` units of earlier lanes. Returns the lane that owns `unit`, or -1 if
// none does; `before` becomes the number of units before that lane's, or before the unit that follows the last lane's.
DEVICE int find_lane(int unit, int n, int &before) {
  const int lane = threadIdx.x % 32, own = n;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int lower = __shfl_up_sync(ALL_LANES, n, distance);
    if (lane >= distance) n += lower;
  }
  const u32 reached = __ballot_sync(ALL_LANES, before + n > unit);
  const int owner = __ffs((int)reached) - 1;
  before += __shfl_sync(ALL_LANES, reached ? n - own : n, reached ? owner : 31);
  return owner;
}
