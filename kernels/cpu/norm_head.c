// logits = norm(x[row_index]) . weight^T, and the index of the largest; divided by DIVISOR, and then CAP tanh(logit / CAP), where these
// are defined
//
//   logits     [N, V] float32
//   best       [N] int32         the largest logit's index, the lowest of equals; -1 if a logit is NaN or none is above -inf
//   scratch    PREPARED_BYTES(E) (product.h) for every row, N rounded up to a multiple of 16; 64-byte aligned
//   x          [T, E] float32
//   norm       [E] float32; norm_bias [E] float32, if NORM == LAYER
//   weight     panels (format.h) of [V, E], V rounded up to a multiple of 16
//   row_index  [N] int32         the row of x for each n
//   count      [1] int32         how many n there are, 0 to N; further rows are unchanged
//
// E % 32 == 0, any V. Units of work: a row to prepare; some pairs of panels; a row to search.
#define I E
#include "activations.h"
#include "norm.h"
#include "product.h"
#include "thread_team.h"

static inline void store_columns(float *row, float *tile, int v);
static inline v16 finished(v16 y);
static inline int32_t argmax_of(const float *logits);

static void norm_head(float *logits, int32_t *best, void *scratch, const float *x, const float *norm, NORM_BIAS_ARGUMENT const void *weight,
                      const int32_t *row_index, const int32_t *count, const struct thread_team *team) {
  const int n = count[0], panels = (V + 15) / 16, pairs = (panels + 1) / 2;
  uint8_t *prepared = scratch;
  for (int t = next_unit(team); t < n; t = next_unit(team))
    prepare_normed(prepared + t * PREPARED, x + (long)row_index[t] * E, norm, norm_bias);
  barrier(team);

  const int run = pairs_in_unit(pairs, team->threads), units = (pairs + run - 1) / run;
  for (int unit = next_unit(team), ahead; unit < units; unit = unit_after(team, ahead)) {
    ahead = unit_ahead(team, unit, units);
    const int first = unit * run, end = first + run < pairs ? first + run : pairs;
    for (int pair = first; pair < end; pair++) {
      const int next = pair + 1 < end ? pair + 1 : likely_unit(team, unit, ahead, units) * run;
      const uint8_t *a = (const uint8_t *)weight + 2 * pair * PANEL, *b = 2 * pair + 1 < panels ? a + PANEL : a;
      const uint8_t *next_panel = (const uint8_t *)weight + 2 * next * PANEL;
      for (int t = 0, tokens; t < n; t += tokens) {
        float tile[MAX_TOKENS * 32];
        tokens = tile_tokens(n - t);
        panel_dot(a, b, t + tokens < n ? a : next_panel, prepared + t * PREPARED, tokens,
                  (struct results){tile, 32, logits + (long)t * V + pair * 32, V});
        for (int r = 0; r < tokens; r++) store_columns(logits + (long)(t + r) * V, tile + r * 32, pair * 32);
      }
    }
  }
  barrier(team);

  for (int t = next_unit(team); t < n; t = next_unit(team)) best[t] = argmax_of(logits + (long)t * V);
}

// A pair of panels' results for one row, to its logits from v on.
static inline void store_columns(float *row, float *tile, int v) {
  for (int c = 0; c < 32; c += 16) {
    v16_store(tile + c, finished(v16_load(tile + c)));
    if (v + c + 16 <= V) v16_store(row + v + c, v16_load(tile + c));
    else
      for (int i = c; i < c + 16 && v + i < V; i++) row[v + i] = tile[i];
  }
}

static inline v16 finished(v16 y) {
#ifdef DIVISOR
  y = v16_div(y, v16_set(DIVISOR));
#endif
#ifdef CAP
  y = capped(y, CAP);
#endif
  return y;
}

static inline uint32_t is_nan(float x) { return (bits_of_float(x) & 0x7FFFFFFFu) > 0x7F800000u; }

static inline int32_t argmax_of(const float *logits) {
  const float lowest = -__builtin_inff();
  v16 max16 = v16_set(lowest);
  uint32_t nan = 0;
  int v = 0;
  for (; v + 16 <= V; v += 16) {
    max16 = v16_max(v16_load(logits + v), max16);
    for (int i = 0; i < 16; i++) nan |= is_nan(logits[v + i]);
  }
  float max = v16_max_of(max16);
  for (; v < V; v++) {
    nan |= is_nan(logits[v]);
    if (logits[v] > max) max = logits[v];
  }
  if (nan || max == lowest) return -1;
  for (v = 0; v + 64 <= V; v += 64) {
    uint32_t found = 0;
    for (int i = 0; i < 64; i++) found |= logits[v + i] == max;
    if (found) break;
  }
  while (logits[v] != max) v++;
  return v;
}
