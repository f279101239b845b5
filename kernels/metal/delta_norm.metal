// out = silu(z) * norm(out) of each value head, and the rows that the convolution of a sequence's next step reads: the second half of the
// gated delta rule (gated_delta.metal has the first, and the arguments' names).
//
//   out           [T, VH * DV] float32   o of each value head, which is replaced; rows that do not count are not touched
//   states        [P, STATE] float32     of each sequence's slot and of its copy the last rows are written, with DRAFTS also what it keeps of
//                                        drafts, and how many tokens the state is of
//   y             [T, WIDTH] float32
//   norm          [DV] float32           weights of the RMS norm; EPS is inside the root
//   taken         [B] int32              of each sequence, as gated_delta has written it; only with DRAFTS
//   slots, positions, query_starts, decodes, chunks  as in gated_delta.metal
//
// Constants: those of gated_delta.metal but WARPS, and EPS; T, rows of y, and GROUPS = ceil(VH / 8). They are not one launch: threadgroups
// of gated_delta have parts of a head, and still read the rows and the number of tokens that are replaced here.
//
//     grid (T + B, GROUPS), 256 threads
// Of the first T threadgroups a SIMD group has a value head of a row: lane l has the columns l, l + 32, ..., whose squares it adds by fma,
// ascending; then lanes 16, 8, 4, 2 and 1 apart. A thread of the others has a channel of a sequence at a time.
#include "delta.h"

#define THREADS 256

INLINE bool is_row(int t, device const int *query_starts, device const int *decodes, device const int *chunks);
INLINE void norm_head(device float *o, device const float *z, device const float *norm, int lane);
INLINE void last_rows(thread float (&x)[TAPS + DRAFTS], device const float *before, device const float *y, Sequence own, int certain,
                      int end, int channel);
INLINE void keep(device float *to, thread const float (&x)[TAPS + DRAFTS], int drafts, int channel);
INLINE void keep_drafts(device float *states, device const float *y, Sequence own, int position, int first);

[[max_total_threads_per_threadgroup(THREADS)]] kernel void delta_norm(
    device float *out, device float *states, device const float *y, device const float *norm,
#if DRAFTS
    device const int *taken,
#endif
    device const int *slots, device const int *positions, device const int *query_starts, device const int *decodes,
    device const int *chunks, uint3 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  if (group.x < T) {
    const int t = (int)group.x, head = (int)(group.y * (THREADS / LANES) + simd);
    if (head >= VH || !is_row(t, query_starts, decodes, chunks)) return;
    norm_head(out + (ulong)t * VALUES + head * DV, y + (ulong)t * WIDTH + CHANNELS + head * DV, norm, (int)lane);
    return;
  }
  const int b = (int)(group.x - T);
  if (!is_counted(b, decodes[0], chunks[0], chunks[1]) || is_draft(b, decodes[0], slots)) return;
  Sequence own = sequence_at(b, decodes[0], slots, positions, query_starts);
  const int first = (int)(group.y * THREADS + simd * LANES + lane);
#if DRAFTS
  own.taken = taken[b];
#endif
  if (DRAFTS) keep_drafts(states, y, own, positions[own.first], first);
  device const float *before = states + (ulong)own.before * STATE;
  for (int channel = first; channel < CHANNELS; channel += GROUPS * THREADS) {
    float last[TAPS + DRAFTS], copied[TAPS + DRAFTS];  // both are read before either is written
    last_rows(last, before, y, own, own.certain, own.end, channel);
    if (own.copied >= 0) {
      last_rows(copied, before, y, own, own.copied + 1, own.copied + 1, channel);
      keep(states + (ulong)own.copy * STATE, copied, 0, channel);
    }
    keep(states + (ulong)own.slot * STATE, last, own.end - own.certain, channel);
  }
}

INLINE bool is_row(int t, device const int *query_starts, device const int *decodes, device const int *chunks) {
  return t < decodes[0] || (chunks[1] && t >= query_starts[chunks[0]] && t < query_starts[chunks[0] + chunks[1]]);
}

INLINE void norm_head(device float *o, device const float *z, device const float *norm, int lane) {
  float sum = 0.0f;
  for (int i = lane; i < DV; i += LANES) sum = fma(o[i], o[i], sum);
  const float inverse = 1.0f / precise::sqrt(sum_lanes(sum) / (float)DV + EPS);
  for (int i = lane; i < DV; i += LANES) o[i] = o[i] * inverse * norm[i] * silu(z[i]);
}

// The TAPS - 1 rows of a channel up to row `certain`, and the drafts from there up to `end`.
INLINE void last_rows(thread float (&x)[TAPS + DRAFTS], device const float *before, device const float *y, Sequence own, int certain,
                      int end, int channel) {
#pragma unroll
  for (int i = 0; i < TAPS - 1 + DRAFTS; i++) {
    const int row = certain - (TAPS - 1) + i, old = row - own.first;  // below 0 in an earlier step
    if (DRAFTS && row >= end) continue;
    x[i] = old >= 0 ? y[(ulong)row * WIDTH + channel] : own.is_new ? 0.0f : before[(TAPS - 1 + own.taken + old) * CHANNELS + channel];
  }
}

INLINE void keep(device float *to, thread const float (&x)[TAPS + DRAFTS], int drafts, int channel) {
#pragma unroll
  for (int i = 0; i < TAPS - 1 + DRAFTS; i++)
    if (!DRAFTS || i < TAPS - 1 + drafts) to[i * CHANNELS + channel] = x[i];
}

// b and a of the drafts, and the numbers of tokens. `first`: of the thread.
INLINE void keep_drafts(device float *states, device const float *y, Sequence own, int position, int first) {
  device float *slot = states + (ulong)own.slot * STATE;
  device const float *gates = y + (ulong)own.certain * WIDTH + CHANNELS + VALUES;
  for (int i = first; i < (own.end - own.certain) * 2 * VH; i += GROUPS * THREADS)
    slot[GATES + i] = gates[(ulong)(i / (2 * VH)) * WIDTH + i % (2 * VH)];
  if (first) return;
  slot[TOKENS] = (float)(position + own.certain - own.first);
  if (own.copied >= 0) states[(ulong)own.copy * STATE + TOKENS] = (float)(position + own.copied + 1 - own.first);
}
