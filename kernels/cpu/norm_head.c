// logits = norm(x[row_index]) . weight^T, and the index of the largest
//
//   logits     [N, V] float32
//   best       [N] int32         the largest logit's index, the lowest of equals; -1 if a logit is NaN or none is above -inf
//   scratch    PREPARED_BYTES(E) (weights.h) for every row, N counted up to a multiple of 16; 64-byte aligned
//   x          [T, E] float32
//   norm       [E] float32; norm_bias [E] float32, if NORM == LAYER
//   weight     panels (weights.h) of [V, E], V counted up to a multiple of 16
//   row_index  [N] int32         the row of x that n is made of
//   count      [1] int32         how many n there are, 0 to N; what belongs to those behind them stays as it is
//
// E % 32 == 0, any V. Units of work: a row to prepare; a pair of panels; a row to search.
#define I E
#include "norm.h"
#include "team.h"
#include "weights.h"

#if NORM == LAYER
#define NORM_BIAS_ARGUMENT const float *norm_bias,
#else
#define NORM_BIAS_ARGUMENT
#define norm_bias 0
#endif

static inline int32_t index_of_largest(const float *y) {
  const float lowest = -__builtin_inff();
  v16 most16 = v16_set(lowest);
  uint32_t nan = 0;
  int v = 0;
  for (; v + 16 <= V; v += 16) {
    most16 = v16_max(v16_load(y + v), most16);
    for (int i = 0; i < 16; i++) nan |= (bits_of_float(y[v + i]) & 0x7FFFFFFFu) > 0x7F800000u;
  }
  float most = v16_max_of(most16);
  for (; v < V; v++) {
    nan |= (bits_of_float(y[v]) & 0x7FFFFFFFu) > 0x7F800000u;
    if (y[v] > most) most = y[v];
  }
  if (nan || most == lowest) return -1;
  for (v = 0; v + 64 <= V; v += 64) {
    uint32_t found = 0;
    for (int i = 0; i < 64; i++) found |= y[v + i] == most;
    if (found) break;
  }
  while (y[v] != most) v++;
  return v;
}

static void norm_head(float *logits, int32_t *best, void *scratch, const float *x, const float *norm, NORM_BIAS_ARGUMENT
                      const void *weight, const int32_t *row_index, const int32_t *count, const struct team *team) {
  const int n = count[0], panels = (V + 15) / 16, pairs = (panels + 1) / 2;
  uint8_t *prepared = scratch;
  for (int t = next(team); t < n; t = next(team)) prepare_normed(prepared + t * PREPARED, x + (long)row_index[t] * E, norm, norm_bias);
  meet(team);

  for (int pair = next(team), ahead; pair < pairs; pair = unit_after(team, ahead)) {
    ahead = unit_ahead(team, pair, pairs);
    const uint8_t *follow = (const uint8_t *)weight + 2 * likely_unit(team, pair, ahead, pairs) * PANEL;
    const uint8_t *a = (const uint8_t *)weight + 2 * pair * PANEL, *b = 2 * pair + 1 < panels ? a + PANEL : a;
    const int v = pair * 32, columns = V - v < 32 ? V - v : 32;
    for (int t = 0, tokens; t < n; t += tokens) {
      float tile[MOST_TOKENS * 32];
      tokens = tile_tokens(n - t);
      panel_dot(a, b, t + tokens < n ? a : follow, prepared + t * PREPARED, tokens, tile, 32);
      for (int r = 0; r < tokens; r++) {
        float *to = logits + (long)(t + r) * V + v;
        if (columns == 32) {
          v16_store(to, v16_load(tile + r * 32));
          v16_store(to + 16, v16_load(tile + r * 32 + 16));
        } else {
          for (int c = 0; c < columns; c++) to[c] = tile[r * 32 + c];
        }
      }
    }
  }
  meet(team);

  for (int t = next(team); t < n; t = next(team)) best[t] = index_of_largest(logits + (long)t * V);
}
