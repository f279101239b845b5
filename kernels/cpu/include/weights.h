// Products of rows of x with packed weights. A kernel says `#define I ...` (the width of x, a multiple of 32) and gets WEIGHT from
// outside; then
//
//     prepare_row / prepare_32 + prepare_end   put a row of x into scratch in the form that the weights want
//     panel_dot                                multiplies up to MOST_TOKENS prepared rows with two panels of sixteen weight rows
//
// Scratch: PREPARED_BYTES(I) for every row, rows counted up to a multiple of 16 (panel_dot reads, and forgets, rows behind the last).
//
//     BYTES(I) = 4 I for F32 and F16, 2 I for BF16, I / 32 * 40 for Q8_0 and Q4_0
//     PREPARED_BYTES(I) = 64 * (ceil(BYTES(I) / 64) | 1)
//
// An odd number of cache lines, so that the rows of a tile, which are read side by side, do not all fall into the same set of the L1.
//
// Accumulation: float32, k ascending, one accumulator an output (Q: integers within a block of 32, exact; then float32 over blocks).
// Nothing depends on how many rows or panels are computed together: every tile size gives a row the same bits.
//
// Panels (base 64-byte aligned; O rounded up to sixteen with rows of zeros), sixteen rows side by side in words of 32 bits:
//     F32   [O/16][I][16] float                     F16   [O/16][I][16] half             BF16  [O/16][I/2][16][2] bfloat16
//     Q8_0  [O/16][I/32]{ half scale[16]; uint8 q[8][16][4] }   q + 128, element k of a block at q[k / 4][row][k % 4]
//     Q4_0  [O/16][I/32]{ half scale[16]; uint8 q[4][16][4] }   low nibble of q[j][row][i]: element 4 j + i; high: 16 + 4 j + i
#pragma once
#include "numbers.h"
#include "lanes.h"
#include "thread_team.h"

#if WEIGHT == F32
#define PANEL_BYTES(width) ((long)(width)*64)
#define ROW_BYTES(width) ((long)(width)*4)
#elif WEIGHT == F16
#define PANEL_BYTES(width) ((long)(width)*32)
#define ROW_BYTES(width) ((long)(width)*4)
#elif WEIGHT == BF16
#define PANEL_BYTES(width) ((long)(width)*32)
#define ROW_BYTES(width) ((long)(width)*2)
#elif WEIGHT == Q8_0
#define QUANTISED
#define PANEL_BYTES(width) ((long)(width) / 32 * 544)
#define ROW_BYTES(width) ((long)(width) / 32 * 40)
#define ZERO_POINT 128
#elif WEIGHT == Q4_0
#define QUANTISED
#define PANEL_BYTES(width) ((long)(width) / 32 * 288)
#define ROW_BYTES(width) ((long)(width) / 32 * 40)
#define ZERO_POINT 8
#endif
#define PREPARED_BYTES(width) (((ROW_BYTES(width) + 63) / 64 | 1) * 64)
#define PREPARED PREPARED_BYTES(I)
#define PANEL PANEL_BYTES(I)

#define ALWAYS static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))

// Tiles of PANELS x TOKENS accumulators that fit the registers, by rising TOKENS. Few tokens take one panel at a time: one stream of
// memory from end to end was faster than two side by side (Q4_0, one token: 37 GB/s a core, not 29). Floats with many tokens take two,
// which halves the loads of x; integers need registers for both sums. Sixteen in one go let a batch of sixteen read weights once.
#if defined(LANES_AVX512) && defined(QUANTISED)
#define TILES(TILE) TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 6) TILE(1, 8) TILE(1, 12)
#define MOST_TOKENS 12
#define WIDE 12
#elif defined(LANES_AVX512)
#define TILES(TILE) TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 6) TILE(1, 8) TILE(2, 12) TILE(1, 16)
#define MOST_TOKENS 16
#define WIDE 12
#elif defined(LANES_PLAIN)
#define TILES(TILE) TILE(1, 1) TILE(1, 4)
#define MOST_TOKENS 4
#define WIDE 4
#else
#define TILES(TILE) TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 6)
#define MOST_TOKENS 6
#define WIDE 6
#endif
#ifdef LANES_PLAIN
#define ALL _Pragma("clang loop unroll(disable)") // nothing of it is in registers anyway, and unrolled it takes seconds to compile
#else
#define ALL _Pragma("clang loop unroll(full)")
#endif

// --- x

struct block { // of x, for quantised weights
  int8_t q[32];
  float scale;
  int32_t start; // -ZERO_POINT times the sum of q: what the weights' offset adds to every dot
};

// Elements i .. i+31 of a row. `odd` gathers what is not finite: an integer could not say it.
ALWAYS void prepare_32(uint8_t *row, int i, v16 a, v16 b, v16 *odd) {
#if WEIGHT == F32 || WEIGHT == F16
  v16_store((float *)row + i, a);
  v16_store((float *)row + i + 16, b);
#elif WEIGHT == BF16
  v16_store_bf16((uint16_t *)row + i, a);
  v16_store_bf16((uint16_t *)row + i + 16, b);
#else
  struct block *block = (struct block *)row + i / 32;
  float most = v16_max_of(v16_max(v16_abs(a), v16_abs(b)));
  v16 inverse = v16_set(most > 1e-36f ? 127.0f / most : 0.0f); // below, 127 / most is infinite
  v16 qa = v16_round(v16_mul(a, inverse)), qb = v16_round(v16_mul(b, inverse));
  *odd = v16_fma(a, v16_set(0.0f), v16_fma(b, v16_set(0.0f), *odd));
  v16_store_i8(block->q, qa);
  v16_store_i8(block->q + 16, qb);
  block->scale = most / 127.0f;
  block->start = -ZERO_POINT * (int32_t)v16_sum(v16_add(qa, qb));
#endif
}

// After the last prepare_32 of a row: a row with an inf or a NaN in it gives NaN, as it does with float weights.
ALWAYS void prepare_end(uint8_t *row, v16 odd) {
#ifdef QUANTISED
  float sum = v16_sum(odd);
  if (sum != 0.0f) ((struct block *)row)->scale = __builtin_nanf("");
#endif
}

static inline void prepare_row(uint8_t *row, const float *x) {
  v16 odd = v16_set(0.0f);
  for (int i = 0; i < I; i += 32) prepare_32(row, i, v16_load(x + i), v16_load(x + i + 16), &odd);
  prepare_end(row, odd);
}

// --- tiles. `panels` and `tokens` are constants wherever dot_tile is inlined, so that the accumulators are registers.

// How many bytes ahead weights are prefetched; hardware alone stops at every page. More work on a line needs no less of it: the latency
// of memory must be hidden behind the lines that are already there, and slow lines leave the hardware's own prefetch idle.
// One panel's last bytes prefetch the first of the next: without that a core reads a quarter less (Q4_0: 18 KB a panel).
#define AHEAD(panels, tokens) ((panels) == 2 ? 2048 : (tokens) <= 2 ? 4096 : 8192)

// Prefetch of the `bytes` that are AHEAD of `at` in a panel; what would lie behind its end is taken from the start of `follow`.
ALWAYS void fetch_ahead(const uint8_t *panel, const uint8_t *follow, const long at, const int bytes, const int ahead) {
  const long lead = (ahead < PANEL ? ahead : PANEL) / bytes * bytes;
  const uint8_t *from = (at < PANEL - lead ? panel + lead : follow - (PANEL - lead)) + at;
  ALL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

#ifdef QUANTISED
#define OF_ROW(t) ((const struct block *)((const uint8_t *)block + (t)*PREPARED)) // this block of row t

// sum[t] += integer dots of a block of sixteen rows' weights with a block of every row of x
ALWAYS void block_dot(const int tokens, const uint8_t *weights, const struct block *block, i16 *sum) {
#if WEIGHT == Q8_0
  ALL for (int j = 0; j < 8; j++) {
    w16 w = w16_load(weights + 64 * j);
    ALL for (int t = 0; t < tokens; t++) sum[t] = i16_dot_u8s8(sum[t], w, ((const uint32_t *)OF_ROW(t)->q)[j]);
  }
#else
  ALL for (int j = 0; j < 4; j++) {
    w16 w = w16_load(weights + 64 * j), low = w16_low_nibbles(w), high = w16_high_nibbles(w);
    ALL for (int t = 0; t < tokens; t++) {
      sum[t] = i16_dot_u8s8(sum[t], low, ((const uint32_t *)OF_ROW(t)->q)[j]);
      sum[t] = i16_dot_u8s8(sum[t], high, ((const uint32_t *)OF_ROW(t)->q)[j + 4]);
    }
  }
#endif
}

ALWAYS void dot_tile(const int panels, const int tokens, const uint8_t *panel, long apart, const uint8_t *follow, const uint8_t *x,
                    float *tile, int pitch) {
  const long step = PANEL_BYTES(32);
  v16 acc[MOST_TOKENS];
  ALL for (int t = 0; t < tokens; t++) acc[t] = v16_set(0.0f);
  for (long b = 0; b < I / 32; b++) {
    i16 sum[MOST_TOKENS];
    const struct block *block = (const struct block *)x + b;
    fetch_ahead(panel, follow, b * step, step, AHEAD(panels, tokens));
    ALL for (int t = 0; t < tokens; t++) sum[t] = i16_set(OF_ROW(t)->start);
    block_dot(tokens, panel + b * step + 32, block, sum);
    const v16 scale = v16_load_f16((const uint16_t *)(panel + b * step));
    ALL for (int t = 0; t < tokens; t++) acc[t] = v16_fma(v16_from_i16(sum[t]), v16_mul(scale, v16_set(OF_ROW(t)->scale)), acc[t]);
  }
  ALL for (int t = 0; t < tokens; t++) v16_store(tile + t * pitch, acc[t]);
}

#else
#if WEIGHT == BF16
#define STEPS (I / 2)
#define WORDS 64
#else
#define STEPS I
#define WORDS (WEIGHT == F32 ? 64 : 32)
#endif

// One step of k: acc[p][t] += the words of panel p, which is `apart` bytes behind the one before, with row t's word.
ALWAYS void dot_step(const int panels, const int tokens, const uint8_t *panel, long apart, const uint8_t *x, long k,
                     v16 acc[2][MOST_TOKENS]) {
#if WEIGHT == BF16
  w16 w[2];
  ALL for (int p = 0; p < panels; p++) w[p] = w16_load(panel + p * apart + k * WORDS);
  ALL for (int t = 0; t < tokens; t++) {
    uint32_t pair = *(const uint32_t *)(x + t * PREPARED + 4 * k);
    ALL for (int p = 0; p < panels; p++) acc[p][t] = v16_dot_bf16(acc[p][t], w[p], pair);
  }
#else
  v16 w[2];
  ALL for (int p = 0; p < panels; p++) {
#if WEIGHT == F32
    w[p] = v16_load((const float *)(panel + p * apart + k * WORDS));
#else
    w[p] = v16_load_f16((const uint16_t *)(panel + p * apart + k * WORDS));
#endif
  }
  ALL for (int t = 0; t < tokens; t++) {
    v16 one = v16_set(*(const float *)(x + t * PREPARED + 4 * k));
    ALL for (int p = 0; p < panels; p++) acc[p][t] = v16_fma(w[p], one, acc[p][t]);
  }
#endif
}

ALWAYS void dot_tile(const int panels, const int tokens, const uint8_t *panel, long apart, const uint8_t *follow, const uint8_t *x,
                    float *tile, int pitch) {
  v16 acc[2][MOST_TOKENS];
  ALL for (int p = 0; p < panels; p++) ALL for (int t = 0; t < tokens; t++) acc[p][t] = v16_set(0.0f);
  for (long k = 0; k < STEPS; k += 4) {
    ALL for (int p = 0; p < panels; p++) fetch_ahead(panel + p * apart, follow, k * WORDS, 4 * WORDS, AHEAD(panels, tokens));
    ALL for (int i = 0; i < 4; i++) dot_step(panels, tokens, panel, apart, x, k + i, acc);
  }
  ALL for (int t = 0; t < tokens; t++) ALL for (int p = 0; p < panels; p++) v16_store(tile + t * pitch + p * 16, acc[p][t]);
}
#endif

#define DOT(panels, tokens) \
  APART void dot_##panels##_##tokens(const uint8_t *panel, long apart, const uint8_t *follow, const uint8_t *x, float *tile, int pitch) { \
    dot_tile(panels, tokens, panel, apart, follow, x, tile, pitch); \
  }
TILES(DOT)
#undef DOT

// How many of `left` rows the next tile takes.
static inline int tile_tokens(int left) { return left <= MOST_TOKENS ? left : WIDE; }

// tile[t * pitch + r] = row t of x . row r of panel `a` for r < 16, row r - 16 of panel `b` above; t < tokens <= MOST_TOKENS. x: prepared
// rows. The tile has room for MOST_TOKENS rows; rows from `tokens` on hold nothing meant. `follow`: the panel that will be read next.
static inline void panel_dot(const uint8_t *a, const uint8_t *b, const uint8_t *follow, const uint8_t *x, int tokens, float *tile,
                             int pitch) {
#define DOT(panels, most) \
  if (tokens <= most) { \
    dot_##panels##_##most(a, b - a, panels == 1 ? b : follow, x, tile, pitch); \
    if (panels == 1) dot_##panels##_##most(b, 0, follow, x, tile + 16, pitch); \
    return; \
  }
  TILES(DOT)
#undef DOT
}

// How many of all `pairs` of panels make a unit of work: some 128 KB of memory in one run, but at least eight units a lane.
static inline int pairs_in_unit(int pairs, int lanes) {
  const int most = 163840 / (2 * PANEL), share = pairs / (8 * lanes);
  return share < 2 || most < 2 ? 1 : share < most ? share : most;
}

// A lane asks for its next unit before it works on this one, so that panel_dot can prefetch it; not near the end, where a unit that waits
// behind another would be waited for. -1: it has not asked; `unit_after` then does.
static inline int unit_ahead(const struct team *team, int unit, int units) { return unit + 2 * team->lanes < units ? next(team) : -1; }
static inline int unit_after(const struct team *team, int ahead) { return ahead < 0 ? next(team) : ahead; }
// Which unit's panels to prefetch: the one ahead, or a guess.
static inline int likely_unit(const struct team *team, int unit, int ahead, int units) {
  int likely = ahead < 0 ? unit + team->lanes : ahead;
  return likely < units ? likely : units - 1;
}
