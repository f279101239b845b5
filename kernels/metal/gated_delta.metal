// o = S^T q of each value head, S being its state after the row: linear attention by the gated delta rule, for decodes and chunks
// (delta_norm.metal norms o, and replaces what a slot keeps).
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
//     grid (DV / (8 WARPS), VH, B), 32 * WARPS threads
// A threadgroup has 8 WARPS columns of a value head of a sequence, a SIMD group eight of them: S is read once, stays in registers through all
// rows of the step, and is written once. Lane l has column l % 8 and the keys 16 j + 4 (l / 8) + e, e from 0 to 3, of which it reads runs of
// eight columns, 32 bytes. STAGE rows at a time are convolved into threadgroup memory, again for each threadgroup with the key head: a launch
// less, and no scratch, for 4 TAPS of the 8 DK operations a column and row. DK 128, WARPS 4: 9.1 KiB.
//
// All in float32, a row's sums in one order whatever step it is in: a lane has a sum for each e, j ascending by fma; (0 + 1) + (2 + 3), then
// lanes 8 and 16 apart. Sums over a head's features: lane l has l, l + 32, ..., ascending, then lanes 16, 8, 4, 2 and 1 apart.
#include "delta.h"

#define THREADS (32 * WARPS)
#define COLUMNS (8 * WARPS)
#define STAGE 8
#define HELD (DK / 16)
#define ROW (2 * DK + COLUMNS)  // q, k and the threadgroup's columns of v

static_assert(DK % 16 == 0 && DK <= 256, "gated_delta: DK must be a multiple of 16 up to 256");
static_assert(DV % COLUMNS == 0 && DV % 16 == 0, "gated_delta: DV must be a multiple of 16 and of the columns of a threadgroup");

// Some rows of a sequence after the convolution: q, k and v; and g, sigmoid(b) and k . q.
struct Stage {
  threadgroup float4 *x;
  threadgroup float *gates;
};

// What a thread has: of a threadgroup, columns from `column` on of value head `head`, whose key head is `shared`.
struct Part {
  int head, shared, column, simd, lane;
};

INLINE threadgroup float *row_of(Stage stage, int r) { return (threadgroup float *)stage.x + r * ROW; }

INLINE ulong place_of(int slot, Part part);
INLINE void load(thread float4 (&S)[HELD], device const float *from, bool is_new);
INLINE void store(device float *to, thread const float4 (&S)[HELD]);
INLINE void convolve(Stage stage, device const float *before, device const float *y, device const float *taps, Sequence own, Part part,
                     int first, int rows);
INLINE device const float *gates_of(int t, device const float *before, device const float *y, Sequence own);
INLINE void finish(Stage stage, int r, device const float *gates, device const float *decay, device const float *shift, Part part);
INLINE float advance(thread float4 (&S)[HELD], Stage stage, int r, Part part);

[[max_total_threads_per_threadgroup(THREADS)]] kernel void gated_delta(
    device float *out, device float *states,
#if DRAFTS
    device int *taken,
#endif
    device const float *y, device const float *taps, device const float *decay, device const float *shift, device const int *slots,
    device const int *positions, device const int *query_starts, device const int *decodes, device const int *chunks,
    uint3 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 x[STAGE * ROW / 4];
  threadgroup float gates[STAGE * 3];
  Stage stage;
  stage.x = x, stage.gates = gates;
  const int b = (int)group.z;
  if (!is_counted(b, decodes[0], chunks[0], chunks[1]) || is_draft(b, decodes[0], slots)) return;
  Sequence own = sequence_at(b, decodes[0], slots, positions, query_starts);
  device const float *before = states + (ulong)own.before * STATE;
#if DRAFTS
  if (!own.is_new) own.taken = taken_drafts(positions[own.first], before[TOKENS]);
  if (group.x == 0 && group.y == 0 && simd == 0 && lane == 0) taken[b] = own.taken;
#endif
  Part part;
  part.head = (int)group.y, part.shared = TILED ? part.head % KH : part.head / (VH / KH), part.column = (int)group.x * COLUMNS;
  part.simd = (int)simd, part.lane = (int)lane;
  float4 S[HELD];
  load(S, states + place_of(own.before, part), own.is_new);
  for (int first = own.first - own.taken; first < own.end; first += STAGE) {
    const int rows = min(STAGE, own.end - first);
    convolve(stage, before, y, taps, own, part, first, rows);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = part.simd; r < rows; r += WARPS) finish(stage, r, gates_of(first + r, before, y, own), decay, shift, part);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = 0; r < rows; r++) {
      const float o = advance(S, stage, r, part);
      if (DRAFTS && first + r < own.first) continue;  // an accepted draft, whose values an earlier step has given
      if (part.lane < 8) out[(ulong)(first + r) * VALUES + part.head * DV + part.column + part.simd * 8 + part.lane] = o;
      if (first + r == own.copied) store(states + place_of(own.copy, part), S);
      if (DRAFTS && first + r + 1 == own.certain) store(states + place_of(own.slot, part), S);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (!DRAFTS) store(states + place_of(own.slot, part), S);
}

// The lane's first number of S in the state of a slot: keys are 16 numbers apart.
INLINE ulong place_of(int slot, Part part) {
  const int column = part.column + part.simd * 8 + part.lane % 8;
  return (ulong)slot * STATE + KEPT + ((ulong)part.head * (DV / 16) + column / 16) * DK * 16 + part.lane / 8 * 64 + column % 16;
}

INLINE void load(thread float4 (&S)[HELD], device const float *from, bool is_new) {
#pragma unroll
  for (int j = 0; j < HELD; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) S[j][e] = is_new ? 0.0f : from[j * 256 + e * 16];
}

INLINE void store(device float *to, thread const float4 (&S)[HELD]) {
#pragma unroll
  for (int j = 0; j < HELD; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) to[j * 256 + e * 16] = S[j][e];
}

// The channel of y that is number i of a stage's row.
INLINE int channel_of(int i, Part part) {
  if (i < 2 * DK) return (i < DK ? part.shared * DK : KEYS + part.shared * DK - DK) + i;
  return 2 * KEYS + part.head * DV + part.column + i - 2 * DK;
}

// `rows` rows from `first` on, of the step, or accepted drafts before it. `before`: the slot of the state before the step.
INLINE void convolve(Stage stage, device const float *before, device const float *y, device const float *taps, Sequence own, Part part,
                     int first, int rows) {
  for (int i = part.simd * LANES + part.lane; i < rows * ROW; i += THREADS) {
    const int t = first + i / ROW, channel = channel_of(i % ROW, part);
    float sum = 0.0f;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
      const int row = t - (TAPS - 1) + tap, old = row - own.first;  // below 0 in an earlier step
      if (old < 0 && own.is_new) continue;
      const float x = old < 0 ? before[(TAPS - 1 + own.taken + old) * CHANNELS + channel] : y[(ulong)row * WIDTH + channel];
      sum = fma(taps[tap * CHANNELS + channel], x, sum);
    }
    row_of(stage, i / ROW)[i % ROW] = silu(sum);
  }
}

// b and a of a row of the step, or of an accepted draft before it.
INLINE device const float *gates_of(int t, device const float *before, device const float *y, Sequence own) {
  if (DRAFTS && t < own.first) return before + GATES + (t - own.first + own.taken) * 2 * VH;
  return y + (ulong)t * WIDTH + CHANNELS + VALUES;
}

INLINE float length_inverse(threadgroup const float *x, int lane) {
  float sum = 0.0f;
  for (int i = lane; i < DK; i += LANES) sum = fma(x[i], x[i], sum);
  return 1.0f / precise::sqrt(sum_lanes(sum) + 1e-6f);
}

// Done by a SIMD group: q and k of a row get their lengths; `gates` are its b and a.
INLINE void finish(Stage stage, int r, device const float *gates, device const float *decay, device const float *shift, Part part) {
  threadgroup float *q = row_of(stage, r), *k = q + DK;
  const float of_q = length_inverse(q, part.lane) * (1.0f / precise::sqrt((float)DK)), of_k = length_inverse(k, part.lane);
  float dot = 0.0f;
  for (int i = part.lane; i < DK; i += LANES) {
    q[i] *= of_q, k[i] *= of_k;
    dot = fma(k[i], q[i], dot);
  }
  dot = sum_lanes(dot);
  if (part.lane) return;
  const float a = gates[VH + part.head] + shift[part.head];
  threadgroup float *to = stage.gates + r * 3;
  to[0] = precise::exp(decay[part.head] * softplus(a, precise::exp(-fabs(a))));
  to[1] = sigmoid(gates[part.head]);
  to[2] = dot;
}

INLINE float sum_of_keys(float4 sums) {
  float sum = (sums.x + sums.y) + (sums.z + sums.w);
  sum += simd_shuffle_xor(sum, (ushort)8);
  return sum + simd_shuffle_xor(sum, (ushort)16);
}

// One row: S of the row before becomes that of this one. Returns the lane's column of o, in each of its four lanes.
INLINE float advance(thread float4 (&S)[HELD], Stage stage, int r, Part part) {
  threadgroup const float4 *q = stage.x + r * (ROW / 4) + part.lane / 8, *k = q + DK / 4;
  float4 along_q = float4(0.0f), along_k = float4(0.0f);
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    along_k = fma(S[j], k[4 * j], along_k);
    along_q = fma(S[j], q[4 * j], along_q);
  }
  threadgroup const float *gates = stage.gates + r * 3;
  const float g = gates[0], v = row_of(stage, r)[2 * DK + part.simd * 8 + part.lane % 8];
  const float d = gates[1] * (v - g * sum_of_keys(along_k));
#pragma unroll
  for (int j = 0; j < HELD; j++) S[j] = fma(k[4 * j], float4(d), g * S[j]);
  return fma(gates[2], d, g * sum_of_keys(along_q));
}
