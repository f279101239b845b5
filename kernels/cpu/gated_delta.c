// Linear attention by the gated delta rule, for decodes and chunks: each sequence has a state instead of keys and values.
//
//   out           [T, VH * DV] float32   silu(z) * norm(o), o being what a value head reads of its state
//   scratch       [T, SCRATCH] float32   a row's q, k and v after the convolution, its decays and rates, then k . q of each key head
//   states        [P, STATE] float32     of each slot: its last TAPS - 1 rows of q, k and v before the convolution, then [VH, DV / 16, DK, 16]
//   y             [T, WIDTH] float32     q [KH, DK], k [KH, DK], v [VH, DV], z [VH, DV], b [VH], a [VH] of each row
//   taps          [TAPS, CHANNELS] float32  of the convolution; the last is of the row itself
//   decay         [VH] float32           below 0
//   shift         [VH] float32           added to a
//   norm          [DV] float32
//   slots         [B, 4] int32           of each sequence its own slot, that of its state before the step, one for a copy of the state, and
//                                        after how many tokens of the sequence it is made; 0 for none
//   positions     [T] int32              a sequence whose first row has position 0 starts with a state of zeros
//   query_starts  [B + 1] int32          first row of each sequence
//   decodes       [1] int32              sequences of one row that count
//   chunks        [2] int32              the first sequence of several rows, and how many of them count
//
// Of each value head, with its state S [DK, DV], for row after row (Gated Delta Networks, Yang et al., 2024, arXiv:2412.06464):
//
//   g = e^(decay softplus(a + shift)), d = sigmoid(b) (v - g S^T k), o = g S^T q + (k . q) d, S = g S + k d^T
//
// q, k and v are silu of a causal convolution of each channel; q and k are then of length 1, and q is divided by sqrt(DK). Value head h has
// the key head h % KH if TILED, else h KH / VH. DK and DV are multiples of 16, VH of KH. A row has the same bits in a decode and in any chunk:
// its sums are over keys ascending, in two halves by parity, in sixteen columns a lane each. Units of work: a key head of a row, then
// a value head's columns of a sequence, then a value head of a row.
#include "activations.h"
#include "spread.h"
#include "thread_team.h"

#define KEYS (KH * DK)
#define VALUES (VH * DV)
#define CHANNELS (2 * KEYS + VALUES)
#define WIDTH (CHANNELS + VALUES + 2 * VH)
#define SCRATCH (CHANNELS + 2 * VH + KH)
#define KEPT ((TAPS - 1) * CHANNELS)
#define STATE (KEPT + VH * DK * DV)
#define GROUP (VH / KH)
#define TILES (DV / 16)
#define PAIRS ((TILES + 1) / 2)  // of tiles: a unit's columns

struct rows {                  // of one sequence
  int first, end, is_new, at;  // a copy is made after row `at`, -1 for none
  float *state, *copy;
  const float *before;
};

static inline int sequence_of(int t, const int32_t *query_starts, const int32_t *decodes, const int32_t *chunks);
static inline struct rows rows_of(int b, float *states, const int32_t *slots, const int32_t *positions, const int32_t *query_starts);
static inline void convolve(float *out, const float *y, int t, struct rows own, const float *taps, int from, int count);
static inline void scale_to_length(float *x, float length);
static inline void open_gates(float *gates, const float *y, const float *decay, const float *shift, int from, int count);
static inline void recur(float *out, const float *scratch, struct rows own, int head, int tile, int tiles);
static inline void keep_rows(struct rows own, const float *y);

static void gated_delta(float *out, float *scratch, float *states, const float *y, const float *taps, const float *decay,
                        const float *shift, const float *norm, const int32_t *slots, const int32_t *positions, const int32_t *query_starts,
                        const int32_t *decodes, const int32_t *chunks, const struct thread_team *team) {
  const int sequences = decodes[0] + chunks[1], after = chunks[0] - decodes[0];  // those in between are padding
  const int first_row = chunks[1] ? query_starts[chunks[0]] : 0,
            chunk_rows = chunks[1] ? query_starts[chunks[0] + chunks[1]] - first_row : 0;
  const int rows = decodes[0] + chunk_rows;

  for (int unit = next_unit(team); unit < rows * KH; unit = next_unit(team)) {
    const int n = unit / KH, h = unit % KH, t = n < decodes[0] ? n : first_row + n - decodes[0];
    const struct rows own = rows_of(sequence_of(t, query_starts, decodes, chunks), states, slots, positions, query_starts);
    float *row = scratch + (long)t * SCRATCH, *q = row + h * DK, *k = q + KEYS;
    convolve(row, y, t, own, taps, h * DK, DK);
    convolve(row, y, t, own, taps, KEYS + h * DK, DK);
    convolve(row, y, t, own, taps, 2 * KEYS + h * GROUP * DV, GROUP * DV);
    scale_to_length(q, 1.0f / __builtin_sqrtf((float)DK));
    scale_to_length(k, 1.0f);
    open_gates(row + CHANNELS, y + (long)t * WIDTH + CHANNELS + VALUES, decay, shift, h * GROUP, GROUP);
    v16 dot = v16_set(0.0f);
    for (int i = 0; i < DK; i += 16) dot = v16_fma(v16_load(k + i), v16_load(q + i), dot);
    row[CHANNELS + 2 * VH + h] = v16_sum(dot);
  }
  barrier(team);

  const int pieces = VH * PAIRS + 1;
  for (int unit = next_unit(team); unit < sequences * pieces; unit = next_unit(team)) {
    const int n = unit / pieces, piece = unit % pieces, tile = piece % PAIRS * 2;
    const struct rows own = rows_of(n < decodes[0] ? n : n + after, states, slots, positions, query_starts);
    if (piece == VH * PAIRS) keep_rows(own, y);
    else if (tile + 1 < TILES) recur(out, scratch, own, piece / PAIRS, tile, 2);
    else recur(out, scratch, own, piece / PAIRS, tile, 1);
  }
  barrier(team);

  for (int unit = next_unit(team); unit < rows * VH; unit = next_unit(team)) {
    const int n = unit / VH, h = unit % VH, t = n < decodes[0] ? n : first_row + n - decodes[0];
    float *o = out + (long)t * VALUES + h * DV;
    const float *z = y + (long)t * WIDTH + CHANNELS + h * DV;
    const v16 inverse = v16_set(inverse_spread(o, DV, 0.0f, EPS));
    for (int i = 0; i < DV; i += 16)
      v16_store(o + i, v16_mul(v16_mul(v16_mul(v16_load(o + i), inverse), v16_load(norm + i)), silu(v16_load(z + i))));
  }
}

static inline int sequence_of(int t, const int32_t *query_starts, const int32_t *decodes, const int32_t *chunks) {
  if (t < decodes[0]) return t;
  int b = chunks[0];
  while (query_starts[b + 1] <= t) b++;
  return b;
}

static inline struct rows rows_of(int b, float *states, const int32_t *slots, const int32_t *positions, const int32_t *query_starts) {
  const int first = query_starts[b], end = query_starts[b + 1], *own = slots + 4 * b, at = first + own[3] - 1 - positions[first];
  return (struct rows){first,
                       end,
                       positions[first] == 0,
                       at >= first && at < end ? at : -1,
                       states + (long)own[0] * STATE,
                       states + (long)own[2] * STATE,
                       states + (long)own[1] * STATE};
}

// silu of channels from, ... of row t, from its own and the TAPS - 1 rows before it.
static inline void convolve(float *out, const float *y, int t, struct rows own, const float *taps, int from, int count) {
  for (int c = from; c < from + count; c += 16) {
    v16 sum = v16_set(0.0f);
    for (int i = 0; i < TAPS; i++) {
      const int row = t - (TAPS - 1) + i, before = row - own.first;  // below 0 in an earlier step
      if (before < 0 && own.is_new) continue;
      const float *x = before < 0 ? own.before + (long)(TAPS - 1 + before) * CHANNELS : y + (long)row * WIDTH;
      sum = v16_fma(v16_load(taps + (long)i * CHANNELS + c), v16_load(x + c), sum);
    }
    v16_store(out + c, silu(sum));
  }
}

static inline void scale_to_length(float *x, float length) {
  const float inverse = inverse_spread(x, DK, 0.0f, 1e-6f / DK) / __builtin_sqrtf((float)DK);  // 1 / sqrt(sum + 1e-6)
  for (int i = 0; i < DK; i += 16) v16_store(x + i, v16_mul(v16_load(x + i), v16_set(inverse * length)));
}

// log(1 + e^x): max(x, 0) + log(1 + u), u = e^-|x|, which is 2 artanh(u / (2 + u)), whose series ends below 1e-8.
static inline v16 softplus(v16 x) {
  const v16 u = v16_exp(v16_sub(v16_set(0.0f), v16_abs(x))), s = v16_div(u, v16_add(v16_set(2.0f), u)), square = v16_mul(s, s);
  v16 sum = v16_set(1.0f / 15);
  for (int n = 13; n > 0; n -= 2) sum = v16_fma(sum, square, v16_set(1.0f / (float)n));
  return v16_fma(v16_mul(s, v16_set(2.0f)), sum, v16_max(v16_set(0.0f), x));
}

// g and sigmoid(b) of some value heads, from b and a.
static inline void open_gates(float *gates, const float *y, const float *decay, const float *shift, int from, int count) {
  for (int h = from; h < from + count; h += 16) {
    float a[16] = {0}, b[16] = {0}, rates[16] = {0};
    const int some = from + count - h < 16 ? from + count - h : 16;
    for (int i = 0; i < some; i++) {
      b[i] = y[h + i];
      a[i] = y[VH + h + i] + shift[h + i];
      rates[i] = decay[h + i];
    }
    v16_store(a, v16_exp(v16_mul(softplus(v16_load(a)), v16_load(rates))));
    v16_store(b, sigmoid(v16_load(b)));
    for (int i = 0; i < some; i++) gates[h + i] = a[i], gates[VH + h + i] = b[i];
  }
}

// All rows of a sequence, in some columns of a value head. A row's state is written while it is multiplied with the next row's k and q.
INLINE void recur(float *out, const float *scratch, struct rows own, int head, int tile, int tiles) {
  const int shared = TILED ? head % KH : head / GROUP;
  const long place = KEPT + ((long)head * TILES + tile) * DK * 16;
  float *state[2] = {own.state + place, own.state + place + DK * 16};
  v16 along_k[2][2], along_q[2][2];
  for (int j = 0; j < tiles; j++) {
    if (own.is_new || own.before != own.state)
      for (int i = 0; i < DK; i++)
        v16_store(state[j] + i * 16, own.is_new ? v16_set(0.0f) : v16_load(own.before + place + (j * DK + i) * 16));
    for (int p = 0; p < 2; p++) along_k[j][p] = along_q[j][p] = v16_set(0.0f);
  }

  const float *row = scratch + (long)own.first * SCRATCH, *q = row + shared * DK, *k = q + KEYS;
  for (int i = 0; i < DK; i += 2) UNROLL for (int p = 0; p < 2; p++) UNROLL for (int j = 0; j < tiles; j++) {
      const v16 s = v16_load(state[j] + (i + p) * 16);
      along_k[j][p] = v16_fma(s, v16_set(k[i + p]), along_k[j][p]);
      along_q[j][p] = v16_fma(s, v16_set(q[i + p]), along_q[j][p]);
    }

  for (int t = own.first; t < own.end; t++) {
    const v16 g = v16_set(row[CHANNELS + head]), rate = v16_set(row[CHANNELS + VH + head]);
    const v16 dot = v16_set(row[CHANNELS + 2 * VH + shared]);
    v16 d[2];
    UNROLL for (int j = 0; j < tiles; j++) {
      const v16 known = v16_mul(g, v16_add(along_k[j][0], along_k[j][1])), read = v16_mul(g, v16_add(along_q[j][0], along_q[j][1]));
      d[j] = v16_mul(rate, v16_sub(v16_load(row + 2 * KEYS + head * DV + (tile + j) * 16), known));
      v16_store(out + (long)t * VALUES + head * DV + (tile + j) * 16, v16_fma(dot, d[j], read));
      for (int p = 0; p < 2; p++) along_k[j][p] = along_q[j][p] = v16_set(0.0f);
    }
    const float *here = k;
    if (t + 1 < own.end) row += SCRATCH, q += SCRATCH, k += SCRATCH;  // of the last row the sums are not used
    for (int i = 0; i < DK; i += 2) UNROLL for (int p = 0; p < 2; p++) UNROLL for (int j = 0; j < tiles; j++) {
        const v16 s = v16_fma(v16_set(here[i + p]), d[j], v16_mul(g, v16_load(state[j] + (i + p) * 16)));
        v16_store(state[j] + (i + p) * 16, s);
        along_k[j][p] = v16_fma(s, v16_set(k[i + p]), along_k[j][p]);
        along_q[j][p] = v16_fma(s, v16_set(q[i + p]), along_q[j][p]);
      }
    if (t == own.at)
      for (int i = 0; i < tiles * DK; i++) v16_store(own.copy + place + i * 16, v16_load(state[0] + i * 16));
  }
}

// The rows that the convolution of later ones reads: those up to `end`. Ascending: a row that moves within the state comes from a place
// after its own.
static inline void keep_rows_to(float *kept, int end, struct rows own, const float *y) {
  for (int i = 0; i < TAPS - 1; i++) {
    const int row = end - (TAPS - 1) + i, before = row - own.first;
    const float *from = before < 0 ? own.before + (long)(TAPS - 1 + before) * CHANNELS : y + (long)row * WIDTH;
    const v16 zero = v16_set(0.0f);
    for (int c = 0; c < CHANNELS; c += 16) v16_store(kept + (long)i * CHANNELS + c, before < 0 && own.is_new ? zero : v16_load(from + c));
  }
}

static inline void keep_rows(struct rows own, const float *y) {
  if (own.at >= 0) keep_rows_to(own.copy, own.at + 1, own, y);
  keep_rows_to(own.state, own.end, own, y);
}
