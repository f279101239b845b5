// Linear attention by the gated delta rule, for decodes and chunks: each sequence has a state instead of keys and values.
//
//   out           [T, VH * DV] float32   silu(z) * norm(o), o being what a value head reads of its state
//   scratch       [T, SCRATCH] float32   a row's q, k and v after the convolution, its decays and rates, then k . q of each key head
//   states        [P, STATE] float32     of each slot: its last TAPS - 1 rows of q, k and v before the convolution, [VH, DV / 16, DK, 16], and
//                                        as below what it keeps of drafts
//   y             [T, WIDTH] float32     q [KH, DK], k [KH, DK], v [VH, DV], z [VH, DV], b [VH], a [VH] of each row
//   taps          [TAPS, CHANNELS] float32  of the convolution; the last is of the row itself
//   decay         [VH] float32           below 0
//   shift         [VH] float32           added to a
//   norm          [DV] float32
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
// the key head h % KH if TILED, else h KH / VH. DK and DV are multiples of 16, VH of KH. A row has the same bits in a decode and in any chunk:
// its sums are over keys ascending, in two halves by parity, in sixteen columns a lane each. Units of work: a key head of a row, then
// a value head's columns of a sequence, then a value head of a row.
//
// Whether a draft is accepted is known after the step, so the state stays that after the rows before it. Where DRAFTS is above 0 a slot
// keeps q, k and v of up to DRAFTS drafts (after the last TAPS - 1 rows), b and a [DRAFTS, 2 VH], and after them the number of tokens that
// the state is of, as float32 (exact up to 2^24). A later step begins with the drafts of positions before its own: these were accepted.
#include "activations.h"
#include "spread.h"
#include "thread_team.h"

#define KEYS (KH * DK)
#define VALUES (VH * DV)
#define CHANNELS (2 * KEYS + VALUES)
#define WIDTH (CHANNELS + VALUES + 2 * VH)
#define SCRATCH (CHANNELS + 2 * VH + KH)
#define KEPT ((TAPS - 1 + DRAFTS) * CHANNELS)
#define GATES (KEPT + VH * DK * DV)
#define TOKENS (GATES + DRAFTS * 2 * VH)
#define STATE (DRAFTS ? (TOKENS + 16) / 16 * 16 : GATES)
#define GROUP (VH / KH)
#define TILES (DV / 16)
#define PAIRS ((TILES + 1) / 2)  // of tiles: a unit's columns

struct step {
  float *states;
  const int32_t *slots, *positions, *query_starts;
  int decodes, runs, first_chunk, chunks;  // runs: sequences among the decodes
};

struct layer {
  const float *taps, *decay, *shift;
};

struct rows {               // of one sequence
  int first, certain, end;  // those from `certain` on are drafts
  int taken;                // accepted drafts of earlier steps, which the state lacks
  int is_new, at;           // a copy is made after row `at`, -1 for none
  float *state, *copy;
  const float *before;
};

static inline int count_runs(const int32_t *slots, int decodes);
static inline int sequence_of(int t, const struct step *step);
static inline int sequence_at(int n, const struct step *step);
static inline struct rows rows_of(int b, const struct step *step);
static inline void convolve(float *out, const float *y, int t, struct rows own, const float *taps, int from, int count);
static inline void scale_to_length(float *x, float length);
static inline void open_gates(float *gates, const float *y, const struct layer *layer, int from, int count);
static inline void take_drafts(float *const *state, const float *y, struct rows own, const struct layer *layer, int head, int tile,
                               int tiles);
static inline void recur(float *out, const float *scratch, const float *y, struct rows own, const struct layer *layer, int head, int tile,
                         int tiles);
static inline void keep_rows(struct rows own, const float *y, const int32_t *positions);

static void gated_delta(float *out, float *scratch, float *states, const float *y, const float *taps, const float *decay,
                        const float *shift, const float *norm, const int32_t *slots, const int32_t *positions, const int32_t *query_starts,
                        const int32_t *decodes, const int32_t *chunks, const struct thread_team *team) {
  const struct layer layer = {taps, decay, shift};
  const struct step step = {states, slots, positions, query_starts, decodes[0], count_runs(slots, decodes[0]), chunks[0], chunks[1]};
  const int sequences = step.runs + step.chunks, first_row = step.chunks ? query_starts[step.first_chunk] : 0,
            chunk_rows = step.chunks ? query_starts[step.first_chunk + step.chunks] - first_row : 0;
  const int rows = step.decodes + chunk_rows;  // those between decodes and chunks are padding

  for (int unit = next_unit(team); unit < rows * KH; unit = next_unit(team)) {
    const int n = unit / KH, h = unit % KH, t = n < step.decodes ? n : first_row + n - step.decodes;
    const struct rows own = rows_of(sequence_of(t, &step), &step);
    float *row = scratch + (long)t * SCRATCH, *q = row + h * DK, *k = q + KEYS;
    convolve(q, y, t, own, taps, h * DK, DK);
    convolve(k, y, t, own, taps, KEYS + h * DK, DK);
    convolve(row + 2 * KEYS + h * GROUP * DV, y, t, own, taps, 2 * KEYS + h * GROUP * DV, GROUP * DV);
    scale_to_length(q, 1.0f / __builtin_sqrtf((float)DK));
    scale_to_length(k, 1.0f);
    open_gates(row + CHANNELS, y + (long)t * WIDTH + CHANNELS + VALUES, &layer, h * GROUP, GROUP);
    v16 dot = v16_set(0.0f);
    for (int i = 0; i < DK; i += 16) dot = v16_fma(v16_load(k + i), v16_load(q + i), dot);
    row[CHANNELS + 2 * VH + h] = v16_sum(dot);
  }
  barrier(team);

  const int pieces = VH * PAIRS;
  for (int unit = next_unit(team); unit < sequences * pieces; unit = next_unit(team)) {
    const int piece = unit % pieces, head = piece / PAIRS, tile = piece % PAIRS * 2;
    const struct rows own = rows_of(sequence_at(unit / pieces, &step), &step);
    if (tile + 1 < TILES) recur(out, scratch, y, own, &layer, head, tile, 2);
    else recur(out, scratch, y, own, &layer, head, tile, 1);
  }
  barrier(team);

  for (int unit = next_unit(team); unit < rows * VH + sequences; unit = next_unit(team)) {
    if (unit >= rows * VH) {  // after the barrier: units before it read what is kept of earlier steps
      keep_rows(rows_of(sequence_at(unit - rows * VH, &step), &step), y, positions);
      continue;
    }
    const int n = unit / VH, h = unit % VH, t = n < step.decodes ? n : first_row + n - step.decodes;
    float *o = out + (long)t * VALUES + h * DV;
    const float *z = y + (long)t * WIDTH + CHANNELS + h * DV;
    const v16 inverse = v16_set(inverse_spread(o, DV, 0.0f, EPS));
    for (int i = 0; i < DV; i += 16)
      v16_store(o + i, v16_mul(v16_mul(v16_mul(v16_load(o + i), inverse), v16_load(norm + i)), silu(v16_load(z + i))));
  }
}

static inline int is_draft(int t, const int32_t *slots) { return DRAFTS && t && slots[4 * t] == slots[4 * (t - 1)]; }

static inline int count_runs(const int32_t *slots, int decodes) {
  int runs = 0;
  for (int t = 0; t < decodes; t++) runs += !is_draft(t, slots);
  return runs;
}

// The sequence of a row.
static inline int sequence_of(int t, const struct step *step) {
  if (t < step->decodes) {
    while (is_draft(t, step->slots)) t--;
    return t;
  }
  int b = step->first_chunk;
  while (step->query_starts[b + 1] <= t) b++;
  return b;
}

// The n-th sequence: decodes, then chunks.
static inline int sequence_at(int n, const struct step *step) {
  if (n >= step->runs) return step->first_chunk + n - step->runs;
  if (step->runs == step->decodes) return n;
  int t = 0;
  for (; n; n--) do
      t++;
    while (is_draft(t, step->slots));
  return t;
}

static inline struct rows rows_of(int b, const struct step *step) {
  const int32_t *own = step->slots + 4 * b;
  const int first = step->query_starts[b], certain = step->query_starts[b + 1], position = step->positions[first];
  const float *before = step->states + (long)own[1] * STATE;
  const int at = first + own[3] - 1 - position, taken = DRAFTS && position ? position - (int)before[TOKENS] : 0;
  int end = certain;
  if (b < step->decodes)
    while (end < step->decodes && is_draft(end, step->slots)) end++;
  return (struct rows){first,
                       certain,
                       end,
                       taken,
                       position == 0,
                       at >= first && at < certain ? at : -1,
                       step->states + (long)own[0] * STATE,
                       step->states + (long)own[2] * STATE,
                       before};
}

// silu of channels from, ... of row t, from its own and the TAPS - 1 rows before it. Rows before the first are accepted drafts.
static inline void convolve(float *out, const float *y, int t, struct rows own, const float *taps, int from, int count) {
  for (int c = from; c < from + count; c += 16) {
    v16 sum = v16_set(0.0f);
    for (int i = 0; i < TAPS; i++) {
      const int row = t - (TAPS - 1) + i, before = row - own.first;  // below 0 in an earlier step
      if (before < 0 && own.is_new) continue;
      const float *x = before < 0 ? own.before + (long)(TAPS - 1 + own.taken + before) * CHANNELS : y + (long)row * WIDTH;
      sum = v16_fma(v16_load(taps + (long)i * CHANNELS + c), v16_load(x + c), sum);
    }
    v16_store(out + (c - from), silu(sum));
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
static inline void open_gates(float *gates, const float *y, const struct layer *layer, int from, int count) {
  for (int h = from; h < from + count; h += 16) {
    float a[16] = {0}, b[16] = {0}, rates[16] = {0};
    const int some = from + count - h < 16 ? from + count - h : 16;
    for (int i = 0; i < some; i++) {
      b[i] = y[h + i];
      a[i] = y[VH + h + i] + layer->shift[h + i];
      rates[i] = layer->decay[h + i];
    }
    v16_store(a, v16_exp(v16_mul(softplus(v16_load(a)), v16_load(rates))));
    v16_store(b, sigmoid(v16_load(b)));
    for (int i = 0; i < some; i++) gates[h + i] = a[i], gates[VH + h + i] = b[i];
  }
}

// Accepted drafts of earlier steps, in some columns of a value head. Their values were read by the step that had them.
INLINE void take_drafts(float *const *state, const float *y, struct rows own, const struct layer *layer, int head, int tile, int tiles) {
  const int shared = TILED ? head % KH : head / GROUP;
  float k[DK], v[32], gates[2 * VH];
  for (int t = own.first - own.taken; t < own.first; t++) {
    convolve(k, y, t, own, layer->taps, KEYS + shared * DK, DK);
    convolve(v, y, t, own, layer->taps, 2 * KEYS + head * DV + tile * 16, tiles * 16);
    scale_to_length(k, 1.0f);
    open_gates(gates, own.before + GATES + (long)(t - own.first + own.taken) * 2 * VH, layer, head, 1);
    const v16 g = v16_set(gates[head]), rate = v16_set(gates[VH + head]);
    v16 along_k[2][2], d[2];
    for (int j = 0; j < tiles; j++) along_k[j][0] = along_k[j][1] = v16_set(0.0f);
    for (int i = 0; i < DK; i += 2)
      UNROLL for (int p = 0; p < 2; p++) UNROLL for (int j = 0; j < tiles; j++) along_k[j][p] =
          v16_fma(v16_load(state[j] + (i + p) * 16), v16_set(k[i + p]), along_k[j][p]);
    for (int j = 0; j < tiles; j++) d[j] = v16_mul(rate, v16_sub(v16_load(v + j * 16), v16_mul(g, v16_add(along_k[j][0], along_k[j][1]))));
    for (int i = 0; i < DK; i++)
      UNROLL for (int j = 0; j < tiles; j++)
          v16_store(state[j] + i * 16, v16_fma(v16_set(k[i]), d[j], v16_mul(g, v16_load(state[j] + i * 16))));
  }
}

// All rows of a sequence, in some columns of a value head. A row's state is written while it is multiplied with the next row's k and q;
// after drafts it is in memory that is not kept.
INLINE void recur(float *out, const float *scratch, const float *y, struct rows own, const struct layer *layer, int head, int tile,
                  int tiles) {
  const int shared = TILED ? head % KH : head / GROUP;
  const long place = KEPT + ((long)head * TILES + tile) * DK * 16;
  float *state[2] = {own.state + place, own.state + place + DK * 16};
  float guessed[DRAFTS ? 2 * DK * 16 : 1];
  v16 along_k[2][2], along_q[2][2];
  for (int j = 0; j < tiles; j++) {
    if (own.is_new || own.before != own.state)
      for (int i = 0; i < DK; i++)
        v16_store(state[j] + i * 16, own.is_new ? v16_set(0.0f) : v16_load(own.before + place + (j * DK + i) * 16));
    for (int p = 0; p < 2; p++) along_k[j][p] = along_q[j][p] = v16_set(0.0f);
  }
  if (own.taken) take_drafts(state, y, own, layer, head, tile, tiles);

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
    if (t >= own.certain && t + 1 == own.end) break;
    for (int j = 0; t == own.certain && j < tiles; j++) {
      for (int i = 0; i < DK; i++) v16_store(guessed + (j * DK + i) * 16, v16_load(state[j] + i * 16));
      state[j] = guessed + j * DK * 16;
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

// What later steps read: the last rows up to `certain` of q, k and v, with those of the drafts up to `end`, and the drafts' b and a.
// Ascending: a row that moves within the state comes from a place after its own.
static inline void keep_rows_to(float *kept, int certain, int end, struct rows own, const float *y, const int32_t *positions) {
  for (int i = 0; i < TAPS - 1 + end - certain; i++) {
    const int row = certain - (TAPS - 1) + i, before = row - own.first;
    const float *from = before < 0 ? own.before + (long)(TAPS - 1 + own.taken + before) * CHANNELS : y + (long)row * WIDTH;
    const v16 zero = v16_set(0.0f);
    for (int c = 0; c < CHANNELS; c += 16) v16_store(kept + (long)i * CHANNELS + c, before < 0 && own.is_new ? zero : v16_load(from + c));
  }
  for (int t = certain; t < end; t++)
    for (int i = 0; i < 2 * VH; i++) kept[GATES + (long)(t - certain) * 2 * VH + i] = y[(long)t * WIDTH + CHANNELS + VALUES + i];
  if (DRAFTS) kept[TOKENS] = (float)(positions[own.first] + certain - own.first);
}

static inline void keep_rows(struct rows own, const float *y, const int32_t *positions) {
  if (own.at >= 0) keep_rows_to(own.copy, own.at + 1, own.at + 1, own, y, positions);
  keep_rows_to(own.state, own.certain, own.end, own, y, positions);
}
