// out = silu(z) * norm(out) of each value head, and the rows that the convolution of a sequence's next step reads: the second half of the
// gated delta rule (gated_delta.cu has the first, and the arguments' names).
//
//   out           [T, VH * DV] float32   o of each value head, which is replaced; rows that do not count are not touched
//   states        [P, STATE] float32     of each sequence's slot and of its copy the last rows are written, with DRAFTS also what it keeps of
//                                        drafts, and how many tokens the state is of
//   y             [T, WIDTH] float32
//   norm          [DV] float32           weights of the RMS norm; EPS is inside the root
//   taken         [B] int32              of each sequence, as gated_delta has written it; only with DRAFTS
//   slots, positions, query_starts, decodes, chunks  as in gated_delta.cu
//
// Constants: those of gated_delta.cu but WARPS, and EPS; T, B: lengths of y and slots, T the last argument. They are not one launch: thread
// blocks of gated_delta have parts of a head, and still read the rows and the number of tokens that are replaced here.
//
// Launch: grid (T + B, ceil(VH / 8)), 256 threads, no dynamic shared memory. Unit of work: of the first T thread blocks a warp has a value
// head of a row: lane l has the columns l, l + 32, ..., whose squares it adds by fma, ascending; then a butterfly (16, 8, 4, 2, 1). A thread
// of the others has a channel of a sequence at a time.
#include "delta.cuh"

constexpr int THREADS = 256;

DEVICE bool is_row(int t, const int *query_starts, const int *decodes, const int *chunks);
DEVICE void norm_head(float *o, const float *z, const float *norm, int lane);
DEVICE void last_rows(float (&x)[TAPS + DRAFTS], const float *before, const float *y, const Sequence &own, int certain, int end,
                      int channel);
DEVICE void keep(float *to, const float (&x)[TAPS + DRAFTS], int drafts, int channel);
DEVICE void keep_drafts(float *states, const float *y, const Sequence &own, int position);

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_norm(float *out, float *states, const float *y, const float *norm,
#if DRAFTS
               const int *taken,
#endif
               const int *slots, const int *positions, const int *query_starts, const int *decodes, const int *chunks, int T) {
  await_previous();
  if ((int)blockIdx.x < T) {
    const int t = blockIdx.x, head = blockIdx.y * (THREADS / 32) + threadIdx.x / 32;
    if (head >= VH || !is_row(t, query_starts, decodes, chunks)) return;
    norm_head(out + (s64)t * VALUES + head * DV, y + (s64)t * WIDTH + CHANNELS + head * DV, norm, threadIdx.x % 32);
    return;
  }
  const int b = blockIdx.x - T;
  if (!is_counted(b, decodes[0], chunks[0], chunks[1]) || is_draft(b, decodes[0], slots)) return;
  Sequence own = sequence_at(b, decodes[0], slots, positions, query_starts);
#if DRAFTS
  own.taken = taken[b];
#endif
  if (DRAFTS) keep_drafts(states, y, own, positions[own.first]);
  const float *before = states + (s64)own.before * STATE;
  for (int channel = blockIdx.y * THREADS + threadIdx.x; channel < CHANNELS; channel += gridDim.y * THREADS) {
    float last[TAPS + DRAFTS], copied[TAPS + DRAFTS];  // both are read before either is written
    last_rows(last, before, y, own, own.certain, own.end, channel);
    if (own.copied >= 0) {
      last_rows(copied, before, y, own, own.copied + 1, own.copied + 1, channel);
      keep(states + (s64)own.copy * STATE, copied, 0, channel);
    }
    keep(states + (s64)own.slot * STATE, last, own.end - own.certain, channel);
  }
}

DEVICE bool is_row(int t, const int *query_starts, const int *decodes, const int *chunks) {
  return t < decodes[0] || (chunks[1] && t >= query_starts[chunks[0]] && t < query_starts[chunks[0] + chunks[1]]);
}

DEVICE void norm_head(float *o, const float *z, const float *norm, int lane) {
  float sum = 0.0f;
  for (int i = lane; i < DV; i += 32) sum = fmaf(o[i], o[i], sum);
#pragma unroll
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  const float inverse = 1.0f / sqrtf(sum / (float)DV + EPS);
  for (int i = lane; i < DV; i += 32) o[i] = o[i] * inverse * norm[i] * silu(z[i]);
}

// The TAPS - 1 rows of a channel up to row `certain`, and the drafts from there up to `end`.
DEVICE void last_rows(float (&x)[TAPS + DRAFTS], const float *before, const float *y, const Sequence &own, int certain, int end,
                      int channel) {
#pragma unroll
  for (int i = 0; i < TAPS - 1 + DRAFTS; i++) {
    const int row = certain - (TAPS - 1) + i, old = row - own.first;  // below 0 in an earlier step
    if (DRAFTS && row >= end) continue;
    x[i] = old >= 0 ? y[(s64)row * WIDTH + channel] : own.is_new ? 0.0f : before[(TAPS - 1 + own.taken + old) * CHANNELS + channel];
  }
}

DEVICE void keep(float *to, const float (&x)[TAPS + DRAFTS], int drafts, int channel) {
#pragma unroll
  for (int i = 0; i < TAPS - 1 + DRAFTS; i++)
    if (!DRAFTS || i < TAPS - 1 + drafts) to[i * CHANNELS + channel] = x[i];
}

// b and a of the drafts, and the numbers of tokens.
DEVICE void keep_drafts(float *states, const float *y, const Sequence &own, int position) {
  float *slot = states + (s64)own.slot * STATE;
  const float *gates = y + (s64)own.certain * WIDTH + CHANNELS + VALUES;
  const int first = blockIdx.y * THREADS + threadIdx.x;
  for (int i = first; i < (own.end - own.certain) * 2 * VH; i += gridDim.y * THREADS)
    slot[GATES + i] = gates[(s64)(i / (2 * VH)) * WIDTH + i % (2 * VH)];
  if (first) return;
  slot[TOKENS] = (float)(position + own.certain - own.first);
  if (own.copied >= 0) states[(s64)own.copy * STATE + TOKENS] = (float)(position + own.copied + 1 - own.first);
}
