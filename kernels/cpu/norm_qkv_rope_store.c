// q, k, v = norm(x) . weight^T + bias, heads of q and k normed and rotated; q is returned, k and v go into their slots of the cache
//
//   q            [T, H, D] float32                               rotated further as the keys are, if CACHE_TYPE is KV_INT4
//   keys         [P, BLOCK] CACHE_TYPE                           the pool of blocks (cache.h)
//   keys_again                                                   the same memory once more; not used
//   scratch      PREPARED_BYTES(E) (product.h) for every row, T rounded up to a multiple of 16; 64-byte aligned
//   x            [T, E] float32
//   norm         [E] float32; norm_bias [E] float32, if NORM == LAYER
//   weight       panels (format.h) of the first MAIN heads, [MAIN D, E], of HEADS: the H of q, the K of k and the K of v
//   second       [T, SECOND, D] float32, if MAIN < HEADS: products of the heads after them, whose weights have another format
//   third        [T, HEADS - MAIN - SECOND, D] float32, if MAIN + SECOND < HEADS: products of the last heads
//   bias         [HEADS D] float32, if BIAS; with BIAS_PITCH = HEADS D [T, HEADS D], a row's own (lora_bias.c)
//   q_norm, k_norm  [D] float32, if QK_NORM                      RMS norm of every head of q and k, with QK_EPS, before the rotation
//   angles       [T, R] float32, if R > 0                        R / 2 cosines, then R / 2 sines
//   slots        [T] int32                                       block * S + offset: where a row's k and v go; no two are equal,
//                                                                except for negative ones: those k and v are not stored
//   rows         [1] int32                                       how many rows of x there are, 0 to T; further rows of q are unchanged
//
// PROJECTIONS are 3; with 2 there are no heads of v, which is k before its norm and rotation; with 1 there are only those of q, and nothing is
// stored. With VALUE_NORM every head of v has an RMS norm without a weight, with QK_EPS.
//
// E % 32 == 0, D % 16 == 0, R even, R <= D. Feature i is rotated with feature i + R / 2; those from R on are not rotated. All that follows
// the products is in float32, then k and v are stored as cache.h says. A row to prepare is a unit of work, then a head of q, k or v.
#define I E
#include "cache.h"
#include "norm.h"
#include "product.h"
#include "thread_team.h"

#ifndef PROJECTIONS
#define PROJECTIONS 3
#endif
#ifndef VALUE_NORM
#define VALUE_NORM 0
#endif
#define HEADS (H + (PROJECTIONS - 1) * K)
#define PITCH ((D + 31) / 32 * 32)  // of a tile's rows: an odd last panel is computed twice

#if BIAS
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#endif
#if QK_NORM && PROJECTIONS > 1
#define QK_NORM_ARGUMENTS const float *q_norm, const float *k_norm,
#elif QK_NORM
#define QK_NORM_ARGUMENTS const float *q_norm,
#define k_norm q_norm
#else
#define QK_NORM_ARGUMENTS
#endif
#if MAIN < HEADS
#define SECOND_ARGUMENT const float *second,
#else
#define SECOND_ARGUMENT
#define second ((const float *)0)
#endif
#if MAIN + SECOND < HEADS
#define THIRD_ARGUMENT const float *third,
#else
#define THIRD_ARGUMENT
#define third ((const float *)0)
#endif
#if R > 0
#define ANGLES_ARGUMENT const float *angles,
#else
#define ANGLES_ARGUMENT
#endif

static inline const float *product_row(const float *more, const float *last, int row, int head);
static inline void add_bias(float *y, const float *bias);
static inline void norm_one_head(float *y, const float *weight);
static inline void norm_value(float *y);
static inline void rotate(float *y, const float *angles);

static void norm_qkv_rope_store(float *q, cached *keys, void *keys_again, void *scratch, const float *x, const float *norm,
                                NORM_BIAS_ARGUMENT const void *weight,
                                SECOND_ARGUMENT THIRD_ARGUMENT BIAS_ARGUMENT QK_NORM_ARGUMENTS ANGLES_ARGUMENT const int32_t *slots,
                                const int32_t *rows, const struct thread_team *team) {
  const int count = rows[0], heads = HEADS;
  uint8_t *prepared = scratch;
  (void)keys_again;
  for (int t = next_unit(team); t < count; t = next_unit(team)) prepare_normed(prepared + t * PREPARED, x + (long)t * E, norm, norm_bias);
  barrier(team);

  const int piece = rows_in_piece(count, heads, 8 * team->threads);
  const int pieces = (count + piece - 1) / piece, units = heads * pieces;
  for (int unit = next_unit(team), ahead; unit < units; unit = unit_after(team, ahead)) {
    ahead = unit_ahead(team, unit, units);
    const int likely = run_of(likely_unit(team, unit, ahead, units), heads, pieces);
    const uint8_t *next_panel = (const uint8_t *)weight + (long)(likely < MAIN ? likely : MAIN - 1) * (D / 16) * PANEL;
    const int head = run_of(unit, heads, pieces), from = piece_of(unit, heads, pieces) * piece,
              to = from + piece < count ? from + piece : count;
    const uint8_t *first = (const uint8_t *)weight + (long)head * (D / 16) * PANEL;
    for (int t = from, tokens; t < to; t += tokens) {
      float tile[MAX_TOKENS * PITCH];
      tokens = tile_tokens(to - t);
      for (int p = 0; head < MAIN && p < D / 16; p += 2) {
        const uint8_t *a = first + p * PANEL, *next = p + 2 < D / 16 ? a + 2 * PANEL : t + tokens < to ? first : next_panel;
        const float *to_q = head < H ? q + ((long)t * H + head) * D + p * 16 : 0;
        panel_dot(a, p + 1 < D / 16 ? a + PANEL : a, next, prepared + t * PREPARED, tokens,
                  (struct results){tile + p * 16, PITCH, to_q, H * D});
      }
      for (int r = 0; r < tokens; r++) {
        float *y = tile + r * PITCH;
        const int row = t + r;
        if (head >= MAIN) {
          const float *from_others = product_row(second, third, row, head);
          for (int d = 0; d < D; d += 16) v16_store(y + d, v16_load(from_others + d));
        }
#if BIAS
        add_bias(y, bias + (long)row * BIAS_PITCH + head * D);
#endif
#if PROJECTIONS == 2
        float value[PITCH];  // before its norm and rotation as a key
        for (int d = 0; d < D; d += 16) v16_store(value + d, v16_load(y + d));
        norm_value(value);
#endif
#if QK_NORM
        if (head < H + K) norm_one_head(y, head < H ? q_norm : k_norm);
#endif
#if R > 0
        if (head < H + K) rotate(y, angles + (long)row * R);
#endif
        if (head < H) {
#if CACHE_TYPE == KV_INT4
          hadamard(y);  // as the keys
#endif
          for (int d = 0; d < D; d += 16) v16_store(q + ((long)row * H + head) * D + d, v16_load(y + d));
        } else {
#if PROJECTIONS == 2
          for (int side = 0; side < 2; side++) store_row(keys, slots[row], side, head - H, side ? value : y);
#else
          if (head >= H + K) norm_value(y);
          store_row(keys, slots[row], head >= H + K, (head - H) % K, y);
#endif
        }
      }
    }
  }
}

// Where a head at or after MAIN is in `second` or `third`.
static inline const float *product_row(const float *more, const float *last, int row, int head) {
  const int in_second = head < MAIN + SECOND, heads = in_second ? SECOND : HEADS - MAIN - SECOND;
  return (in_second ? more : last) + ((long)row * heads + head - (in_second ? MAIN : MAIN + SECOND)) * D;
}

#if BIAS
static inline void add_bias(float *y, const float *bias) {
  for (int d = 0; d < D; d += 16) v16_store(y + d, v16_add(v16_load(y + d), v16_load(bias + d)));
}
#endif

#if QK_NORM
static inline void norm_one_head(float *y, const float *weight) {
  const v16 inverse = v16_set(inverse_spread(y, D, 0.0f, QK_EPS));
  for (int d = 0; d < D; d += 16) v16_store(y + d, v16_mul(v16_mul(v16_load(y + d), inverse), v16_load(weight + d)));
}
#endif

static inline void norm_value(float *y) {
#if VALUE_NORM
  const v16 inverse = v16_set(inverse_spread(y, D, 0.0f, QK_EPS));
  for (int d = 0; d < D; d += 16) v16_store(y + d, v16_mul(v16_load(y + d), inverse));
#else
  (void)y;
#endif
}

#if R > 0
static inline void rotate(float *y, const float *angles) {
  for (int i = 0; i < R / 2; i++) {
    float a = y[i], b = y[i + R / 2], cosine = angles[i], sine = angles[i + R / 2];
    y[i] = a * cosine - b * sine;
    y[i + R / 2] = b * cosine + a * sine;
  }
}
#endif
