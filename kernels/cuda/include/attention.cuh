// What decode and prefill share: attention of a warp's sixteen rows to a tile of keys. A row's result has the same bits in both kernels, in
// any company and for any grid, because the order of its arithmetic is fixed here:
//
//   - q is rounded to CACHE_TYPE. A score is one accumulator of mma over d in steps of 16, ascending.
//   - Tiles of TILE keys begin at multiples of TILE, counted from the sequence's first token, and so do chunks of CHUNK keys and
//     stretches of STRETCH keys. A tile is softened at once: weights 2^(score * SCALE log2(e) - top), float32. They are summed as float32,
//     by each of a row's four lanes its own keys ascending, and rounded to CACHE_TYPE for their product with the values: one accumulator
//     over ascending keys.
//   - What a chunk has so far is rescaled when a tile raises its top. A chunk's sum is that of lanes (0 + 1) + (2 + 3).
//   - The chunks of a stretch are merged in ascending order, then the stretches, by `fades_of` and o = fmaf(o', b, o * a).
//
// A key that a row does not see has the weight 0 exactly, and tiles, chunks and stretches that it does not see leave what it has as it is.
// Scores of hidden keys may be NaN; their values must be finite: who loads a tile puts zeros for keys that none of its rows sees.
//
// Constants: H, K, D, S, M, CACHE_TYPE (F16, BF16), SCALE (above 0), WINDOW (0: none), and STRETCH where another than 4096 is wanted (a
// multiple of 256). H % K == 0, D % 16 == 0, D from 32 to 256, S a power of two from 8 to 256. A layer's cache is smaller than 64 GiB.
//
// Keys and values lie in shared memory as rows of D numbers and 16 bytes of padding, so that the eight rows which ldmatrix reads at a time
// begin in different banks.
//
// The online softmax is Milakov and Gimelshein's (arXiv:1805.02867), tiles and the delayed division are FlashAttention-2's
// (arXiv:2307.08691), the split over keys and its merge are flash decoding's.
#pragma once
#include "formats.cuh"

#ifndef STRETCH
#define STRETCH 4096
#endif
#define NEVER __uint_as_float(0xFF800000u) // -infinity: the top of no key at all

constexpr int G = H / K;
constexpr int TILE = 64;
constexpr int CHUNK = 256;
constexpr int STEPS = D / 16;      // of a score's mma
constexpr int COLUMNS = D / 8;     // of an output's mma
constexpr int PIECES = D / 8;      // of 16 bytes in a row of the cache
constexpr int PITCH = D * 2 + 16;  // bytes from row to row in shared memory
constexpr float SCALE_2 = (float)(SCALE * 1.4426950408889634);

static_assert(CACHE_TYPE == F16 || CACHE_TYPE == BF16, "attention: CACHE_TYPE is F16 or BF16");
static_assert(H % K == 0, "attention: query heads must be a multiple of key heads");
static_assert(D % 16 == 0 && D >= 32 && D <= 256, "attention: D is a multiple of 16 from 32 to 256");
static_assert(S >= 8 && S <= 256 && (S & (S - 1)) == 0, "attention: S is a power of two from 8 to 256");
static_assert(STRETCH % CHUNK == 0, "attention: STRETCH is a multiple of 256");

// A chunk's state, spread over the lanes as the C of an mma: with g = lane / 4, index 0 and o[.][0..1] are of row g, index 1 and o[.][2..3]
// of row g + 8.
struct Rows {
  float o[COLUMNS][4]; // weighted sums of values
  float top[2];        // largest score * SCALE_2 so far; -infinity before the first key
  float sum[2];        // of the weights: this lane's part
};

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE int first_seen(int position) { return WINDOW > 0 ? larger(0, position - WINDOW + 1) : 0; }

DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (CACHE_TYPE == F16) mma_f16(c, a, b0, b1);
  else mma_bf16(c, a, b0, b1);
}

DEVICE void begin(Rows &rows) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) rows.o[n][i] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; r++) rows.top[r] = NEVER, rows.sum[r] = 0.0f;
}

// Two rows of q [D] as the A of the scores' mma. What registers have no room for, steps from OWN_STEPS on, lies in shared memory, where
// nobody but the thread looks: QUERY_BYTES a thread.
constexpr int OWN_STEPS = STEPS <= 8 ? STEPS : 4;
constexpr int QUERY_BYTES = (STEPS - OWN_STEPS) * 16;
struct Queries {
  u32 own[OWN_STEPS][4];
  uint4 *rest; // those of a step lie side by side
  int threads;
};
DEVICE void query_step(u32 (&a)[4], const Queries &q, int step) {
  if (step >= OWN_STEPS) {
    const uint4 rest = q.rest[(step - OWN_STEPS) * q.threads];
    a[0] = rest.x, a[1] = rest.y, a[2] = rest.z, a[3] = rest.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = q.own[step % OWN_STEPS][i];
  }
}

DEVICE u32 query_pair(const float *from) {
  const float2 pair = from ? *(const float2 *)from : make_float2(0.0f, 0.0f);
  return pack_pair<CACHE_TYPE>(pair.x, pair.y);
}

// A step of them, from float32; zeros for a row that is null.
DEVICE void load_step(u32 (&a)[4], const float *row, const float *other, int step) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float *from = i % 2 ? other : row;
    a[i] = query_pair(from ? from + step * 16 + i / 2 * 8 + threadIdx.x % 4 * 2 : nullptr);
  }
}

// All of them. `shared` [QUERY_BYTES / 16][threads], this one being number `thread` of them.
DEVICE void load_queries(Queries &q, const float *row, const float *other, void *shared, int thread, int threads) {
  q.rest = (uint4 *)shared + thread;
  q.threads = threads;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 a[4];
    load_step(a, row, other, step);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (step < OWN_STEPS) q.own[step % OWN_STEPS][i] = a[i];
    if (step >= OWN_STEPS) q.rest[(step - OWN_STEPS) * threads] = make_uint4(a[0], a[1], a[2], a[3]);
  }
}

// Where this lane's rows for load_matrices begin in keys, and in values that are loaded transposed.
DEVICE int key_place() { return ((threadIdx.x / 16 % 2 * 8) + threadIdx.x % 8) * PITCH + threadIdx.x / 8 % 2 * 16; }
DEVICE int value_place() { return ((threadIdx.x / 8 % 2 * 8) + threadIdx.x % 8) * PITCH + threadIdx.x / 16 % 2 * 16; }

// Scores of KEYS keys of a tile, the first of which is key FIRST of it. `keys`: their first row, and the lane's place. `queries`: Queries,
// or something else with a query_step.
template <int FIRST, int KEYS, typename Rows16> DEVICE void score(float (&s)[TILE / 8][4], const Rows16 &queries, const u8 *keys) {
#pragma unroll
  for (int n = FIRST / 8; n < (FIRST + KEYS) / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
#pragma unroll
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

// Keys of the tile at `start` that rows at these positions do not see.
DEVICE void hide(float (&s)[TILE / 8][4], int start, const int (&position)[2]) {
  const int key = start + threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < TILE / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = key + n * 8 + i % 2, last = position[i / 2];
      if (at > last || at < first_seen(last)) s[n][i] = NEVER;
    }
}

DEVICE float largest_of(const float (&s)[TILE / 8][4], int r) {
  float most = NEVER;
#pragma unroll
  for (int n = 0; n < TILE / 8; n++) most = fmaxf(most, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
  most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
  return fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
}

// What is subtracted from scores: -infinity from -infinity would be NaN.
DEVICE float base_of(float top) { return top == NEVER ? 0.0f : top; }

// Scores become weights under the rows' new tops; what the rows have so far is rescaled. To rescale by 1, or nothing, changes no bit: that
// is the common case, and left out.
DEVICE void soften(float (&s)[TILE / 8][4], Rows &rows) {
  float fade[2];
  bool rises = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float before = rows.top[r], top = fmaxf(before, largest_of(s, r) * SCALE_2), base = base_of(top);
    fade[r] = fast_exp2(before - base);
    rises |= top != before && before != NEVER;
    rows.top[r] = top;
    float sum = rows.sum[r] * fade[r];
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; i++) {
        s[n][i] = fast_exp2(fmaf(s[n][i], SCALE_2, -base));
        sum += s[n][i];
      }
    rows.sum[r] = sum;
  }
  if (!__any_sync(ALL_LANES, rises)) return;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) rows.o[n][i] *= fade[i / 2];
}

// Weighted values of KEYS keys of a tile, the first of which is key FIRST of it. `values`: their first row, and the lane's place.
template <int FIRST, int KEYS> DEVICE void weigh(Rows &rows, const float (&s)[TILE / 8][4], const u8 *values) {
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++) {
    const int n = FIRST / 8 + 2 * step;
    const u32 p[4] = {pack_pair<CACHE_TYPE>(s[n][0], s[n][1]), pack_pair<CACHE_TYPE>(s[n][2], s[n][3]),
                      pack_pair<CACHE_TYPE>(s[n + 1][0], s[n + 1][1]), pack_pair<CACHE_TYPE>(s[n + 1][2], s[n + 1][3])};
#pragma unroll
    for (int column = 0; column < COLUMNS; column += 2) {
      u32 v[4];
      load_matrices_transposed(v, values + step * 16 * PITCH + column * 16);
      multiply(rows.o[column], p, v[0], v[1]);
      multiply(rows.o[column + 1], p, v[2], v[3]);
    }
  }
}

// A chunk is over: its sum of row r, in each of the row's four lanes.
DEVICE float whole_sum(float part) {
  part += __shfl_xor_sync(ALL_LANES, part, 1);
  return part + __shfl_xor_sync(ALL_LANES, part, 2);
}

// What was merged so far is scaled by a, what comes next by b. Either may be empty: top -infinity, and zeros.
struct Fades {
  float top, a, b;
};
DEVICE Fades fades_of(float top, float next) {
  const float both = fmaxf(top, next), base = base_of(both);
  return {both, fast_exp2(top - base), fast_exp2(next - base)};
}

// --- where things lie

// Row `key % S` of a KV head's keys in a block, in units of 16 bytes; its values lie SIDE further on. [P, 2, K, S, D]
constexpr u32 SIDE = (u32)K * S * PIECES;
DEVICE u32 row_at(int block, int head, int key) { return (u32)block * (2 * SIDE) + (u32)head * (S * PIECES) + (u32)(key % S) * PIECES; }

// The lanes have n units each, in their order, behind `before` others: whose is unit `unit`? `before` becomes the number of units before
// that lane's, or, if the unit is nobody's here (-1), before those behind the lanes'.
DEVICE int find_lane(int unit, int n, int &before) {
  const int lane = threadIdx.x % 32, own = n;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const int left = __shfl_up_sync(ALL_LANES, n, apart);
    if (lane >= apart) n += left;
  }
  const u32 beyond = __ballot_sync(ALL_LANES, before + n > unit);
  const int owner = __ffs((int)beyond) - 1;
  before += __shfl_sync(ALL_LANES, beyond ? n - own : n, beyond ? owner : 31);
  return owner;
}

// Sequences have units(b) units each, in their order; which one has unit `unit`, and how many units lie before it? The whole warp asks for
// one of them. False if there are not so many.
template <typename Units> DEVICE bool find(int unit, int first, int past, Units units, int &b, int &before) {
  const int lane = threadIdx.x % 32;
  before = 0;
  for (int base = first; base < past; base += 32) {
    const int owner = find_lane(unit, base + lane < past ? units(base + lane) : 0, before);
    b = base + owner;
    if (owner >= 0) return true;
  }
  return false;
}
