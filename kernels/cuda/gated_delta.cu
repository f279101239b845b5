// o = S^T q of each value head, S being its state after the row: linear attention by the gated delta rule, for decodes and chunks
// (delta_norm.cu norms o, and replaces what a slot keeps).
//
//   out           [T, VH * DV] float32   o
//   states        [P, STATE] float32     of each slot: its last TAPS - 1 rows of q, k and v before the convolution, which are read, then
//                                        S [VH, DV / 16, DK, 16], which is read and written, and as below what it keeps of drafts
//   taken         [B] int32              how many drafts of earlier steps a sequence has taken; only with DRAFTS
//   y             [T, WIDTH] float32     q [KH, DK], k [KH, DK], v [VH, DV], z [VH, DV], b [VH], a [VH] of each row
//   taps          [TAPS, CHANNELS] float32  of the convolution; the last is of the row itself
//   decay         [VH] float32           below 0
//   shift         [VH] float32           added to a
//   slots         [B, 4] int32           of each sequence its own slot, that of its state before the step, one for a copy of the state, and
//                                        after how many tokens of the sequence it is made; 0 for none, never after a draft
//   positions     [T] int32              a sequence whose first row has position 0 starts with a state of zeros
//   query_starts  [B + 1] int32          first row of each sequence
//   decodes       [1] int32              sequences of one row that count; a row with the own slot of the row before it is a draft after that
//   chunks        [2] int32              the first sequence of several rows, and how many of them count
//
// Of each value head, with its state S [DK, DV], for row after row (Gated Delta Networks, Yang et al., 2024, arXiv:2412.06464):
//
//   g = e^(decay softplus(a + shift)), d = sigmoid(b) (v - g S^T k), o = g S^T q + (k . q) d, S = g S + k d^T
//
// q, k and v are silu of a causal convolution of each channel; q and k are then of length 1, and q is divided by sqrt(DK). Value head h has
// the key head h % KH if TILED, else h KH / VH. DK is a multiple of 16 up to 256, DV one of 8 WARPS, VH of KH; WARPS 2 or 4.
//
// Whether a draft is accepted is known after the step, so the state stays that after the rows before it. Where DRAFTS is above 0 a slot
// keeps q, k and v of up to DRAFTS drafts (after the last TAPS - 1 rows), b and a [DRAFTS, 2 VH], and after them the number of tokens that
// the state is of, as float32 (exact up to 2^24). A later step begins with the drafts of positions before its own: these were accepted.
//
// Launch: grid (DV / (8 WARPS), VH, B), 32 * WARPS threads, no dynamic shared memory; DK 128, WARPS 4: 9.1 KiB declared.
// Unit of work: a thread block has 8 WARPS columns of a value head of a sequence, a warp eight of them: S is read once, stays in registers
// through all rows of the step, and is written once. Lane l has column l % 8 and the keys 16 j + 4 (l / 8) + e, e from 0 to 3, of which it
// reads runs of eight columns, 32 bytes. STAGE rows at a time are convolved into shared memory, again for each thread block with the key head:
// a launch less, and no scratch, for 4 TAPS of the 8 DK operations a column and row.
//
// All in float32, a row's sums in one order whatever step it is in: a lane has a sum for each e, j ascending by fma; (0 + 1) + (2 + 3), then
// lanes 8 and 16 apart. Sums over a head's features: lane l has l, l + 32, ..., ascending, then a butterfly (16, 8, 4, 2, 1).
#include "delta.cuh"

constexpr int THREADS = 32 * WARPS, COLUMNS = 8 * WARPS, STAGE = 8, HELD = DK / 16;
constexpr int ROW = 2 * DK + COLUMNS;  // q, k and the block's columns of v
static_assert(DK % 16 == 0 && DK <= 256, "gated_delta: DK must be a multiple of 16 up to 256");
static_assert(DV % COLUMNS == 0 && DV % 16 == 0, "gated_delta: DV must be a multiple of 16 and of the columns of a block of threads");

// Some rows of a sequence after the convolution: q, k and v; and g, sigmoid(b) and k . q.
struct Stage {
  float x[STAGE][ROW], gates[STAGE][3];
};

// A lane's numbers of S.
struct Held {
  float keys[HELD][4];
};

// What a block of threads has: columns from `column` on of value head `head`, whose key head is `shared`.
struct Part {
  int head, shared, column;
};

DEVICE s64 place_of(int slot, const Part &part);
DEVICE void load(Held &S, const float *from, bool is_new);
DEVICE void store(float *to, const Held &S);
DEVICE void convolve(Stage &stage, const float *states, const float *y, const float *taps, const Sequence &own, const Part &part, int first,
                     int rows);
DEVICE const float *gates_of(int t, const float *states, const float *y, const Sequence &own);
DEVICE void finish(Stage &stage, int r, const float *gates, const float *decay, const float *shift, const Part &part);
DEVICE float advance(Held &S, const Stage &stage, int r);

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_delta(float *out, float *states,
#if DRAFTS
                int *taken,
#endif
                const float *y, const float *taps, const float *decay, const float *shift, const int *slots, const int *positions,
                const int *query_starts, const int *decodes, const int *chunks) {
  await_previous();
  static __shared__ __align__(16) Stage stage;
  const int b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (!is_counted(b, decodes[0], chunks[0], chunks[1]) || is_draft(b, decodes[0], slots)) return;
  Sequence own = sequence_at(b, decodes[0], slots, positions, query_starts);
#if DRAFTS
  if (!own.is_new) own.taken = taken_drafts(positions[own.first], states[(s64)own.before * STATE + TOKENS]);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) taken[b] = own.taken;
#endif
  const Part part = {(int)blockIdx.y, (int)(TILED ? blockIdx.y % KH : blockIdx.y / (VH / KH)), (int)blockIdx.x * COLUMNS};
  Held S;
  load(S, states + place_of(own.before, part), own.is_new);
  for (int first = own.first - own.taken; first < own.end; first += STAGE) {
    const int rows = min(STAGE, own.end - first);
    convolve(stage, states, y, taps, own, part, first, rows);
    __syncthreads();
    for (int r = warp; r < rows; r += WARPS) finish(stage, r, gates_of(first + r, states, y, own), decay, shift, part);
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < rows; r++) {
      const float o = advance(S, stage, r);
      if (DRAFTS && first + r < own.first) continue;  // an accepted draft, whose values an earlier step has given
      if (lane < 8) out[(s64)(first + r) * VALUES + part.head * DV + part.column + warp * 8 + lane] = o;
      if (first + r == own.copied) store(states + place_of(own.copy, part), S);
      if (DRAFTS && first + r + 1 == own.certain) store(states + place_of(own.slot, part), S);
    }
    __syncthreads();
  }
  if (!DRAFTS) store(states + place_of(own.slot, part), S);
}

DEVICE float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

// The lane's first number of S in the state of a slot: keys are 16 numbers apart.
DEVICE s64 place_of(int slot, const Part &part) {
  const int lane = threadIdx.x % 32, column = part.column + threadIdx.x / 32 * 8 + lane % 8;
  return (s64)slot * STATE + KEPT + ((s64)part.head * (DV / 16) + column / 16) * DK * 16 + lane / 8 * 64 + column % 16;
}

DEVICE void load(Held &S, const float *from, bool is_new) {
#pragma unroll
  for (int j = 0; j < HELD; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) S.keys[j][e] = is_new ? 0.0f : from[j * 256 + e * 16];
}

DEVICE void store(float *to, const Held &S) {
#pragma unroll
  for (int j = 0; j < HELD; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) to[j * 256 + e * 16] = S.keys[j][e];
}

// The channel of y that is number i of a stage's row.
DEVICE int channel_of(int i, const Part &part) {
  if (i < 2 * DK) return (i < DK ? part.shared * DK : KEYS + part.shared * DK - DK) + i;
  return 2 * KEYS + part.head * DV + part.column + i - 2 * DK;
}

// `rows` rows from `first` on, of the step, or accepted drafts before it.
DEVICE void convolve(Stage &stage, const float *states, const float *y, const float *taps, const Sequence &own, const Part &part, int first,
                     int rows) {
  const float *before = states + (s64)own.before * STATE;
  for (int i = threadIdx.x; i < rows * ROW; i += THREADS) {
    const int t = first + i / ROW, channel = channel_of(i % ROW, part);
    float sum = 0.0f;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
      const int row = t - (TAPS - 1) + tap, old = row - own.first;  // below 0 in an earlier step
      if (old < 0 && own.is_new) continue;
      const float x = old < 0 ? before[(TAPS - 1 + own.taken + old) * CHANNELS + channel] : y[(s64)row * WIDTH + channel];
      sum = fmaf(taps[tap * CHANNELS + channel], x, sum);
    }
    stage.x[i / ROW][i % ROW] = silu(sum);
  }
}

// b and a of a row of the step, or of an accepted draft before it.
DEVICE const float *gates_of(int t, const float *states, const float *y, const Sequence &own) {
  if (DRAFTS && t < own.first) return states + (s64)own.before * STATE + GATES + (t - own.first + own.taken) * 2 * VH;
  return y + (s64)t * WIDTH + CHANNELS + VALUES;
}

DEVICE float length_inverse(const float *x, int lane) {
  float sum = 0.0f;
  for (int i = lane; i < DK; i += 32) sum = fmaf(x[i], x[i], sum);
  return 1.0f / sqrtf(sum_of_warp(sum) + 1e-6f);
}

// Done by a warp: q and k of a row get their lengths; `gates` are its b and a.
DEVICE void finish(Stage &stage, int r, const float *gates, const float *decay, const float *shift, const Part &part) {
  const int lane = threadIdx.x % 32;
  float *q = stage.x[r], *k = q + DK;
  const float of_q = length_inverse(q, lane) * (1.0f / sqrtf((float)DK)), of_k = length_inverse(k, lane);
  float dot = 0.0f;
  for (int i = lane; i < DK; i += 32) {
    q[i] *= of_q, k[i] *= of_k;
    dot = fmaf(k[i], q[i], dot);
  }
  dot = sum_of_warp(dot);
  if (lane) return;
  const float a = gates[VH + part.head] + shift[part.head];
  stage.gates[r][0] = expf(decay[part.head] * softplus(a, expf(-fabsf(a))));
  stage.gates[r][1] = sigmoid(gates[part.head]);
  stage.gates[r][2] = dot;
}

DEVICE float sum_of_keys(const float (&sums)[4]) {
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  sum += __shfl_xor_sync(ALL_LANES, sum, 8);
  return sum + __shfl_xor_sync(ALL_LANES, sum, 16);
}

// One row: S of the row before becomes that of this one. Returns the lane's column of o, in each of its four lanes.
DEVICE float advance(Held &S, const Stage &stage, int r) {
  const float *q = stage.x[r] + threadIdx.x % 32 / 8 * 4, *k = q + DK;
  float along_q[4], along_k[4];
#pragma unroll
  for (int e = 0; e < 4; e++) along_q[e] = along_k[e] = 0.0f;
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    const float4 k4 = *(const float4 *)(k + 16 * j), q4 = *(const float4 *)(q + 16 * j);
    const float ks[4] = {k4.x, k4.y, k4.z, k4.w}, qs[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      along_k[e] = fmaf(S.keys[j][e], ks[e], along_k[e]);
      along_q[e] = fmaf(S.keys[j][e], qs[e], along_q[e]);
    }
  }
  const float g = stage.gates[r][0], v = stage.x[r][2 * DK + threadIdx.x / 32 * 8 + threadIdx.x % 8];
  const float d = stage.gates[r][1] * (v - g * sum_of_keys(along_k));
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    const float4 k4 = *(const float4 *)(k + 16 * j);
    const float ks[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
    for (int e = 0; e < 4; e++) S.keys[j][e] = fmaf(ks[e], d, g * S.keys[j][e]);
  }
  return fmaf(stage.gates[r][2], d, g * sum_of_keys(along_q));
}
