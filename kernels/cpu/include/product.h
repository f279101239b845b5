// Products of rows of x with packed weights. A kernel says `#define I ...` (the width of x, a multiple of 32 and of the format's blocks)
// and gets WEIGHT from outside; then
//
//     prepare_row, or prepare_32 and prepare_end   put a row of x into scratch in the form that the weights want
//     panel_dot                                    multiplies up to MAX_TOKENS prepared rows with two panels of sixteen weight rows
//
// Scratch: PREPARED_BYTES(I) for each row, rows rounded up to a multiple of 16 (panel_dot reads the rows after the last and drops their
// results).
//
//     X_BYTES(I) = 4 I for F32 and F16, 2 I or 4 I for BF16 and floats in groups, I / 32 times 40, 44 or 72 for integer formats
//     PREPARED_BYTES(I) = 64 * (ceil(X_BYTES(I) / 64) | 1)
//
// An odd number of cache lines, so that the rows of a tile, which are read together, do not all map to the same set of the L1.
//
// Accumulation: float32, k ascending, one accumulator per output. Integer formats: exact integers within a PART, 16 or 32 weights with one
// scale, then float32 over parts. Floats in groups: float32 within each of CHAINS runs of a group, then over
// runs. Nothing depends on how many rows or panels are computed together: every tile size gives a row the same bits.
//
// With SLICES defined, the columns are slices.h's, each slice has an accumulator that begins at 0, and their sums are added in a tree.
//
// Panels (base 64-byte aligned, O rounded up to sixteen with rows of zeros): format.h.
#pragma once
#include "format.h"
#include "lanes.h"
#include "slices.h"
#include "thread_team.h"

#if INTEGERS
#define X_BYTES(width) ((long)(width) / 32 * (long)sizeof(struct x_group))
#else
#define X_BYTES(width) ((long)(width) / STEP_COLUMNS * STEP_X_BYTES)
#endif
#define PREPARED_BYTES(width) (((X_BYTES(width) + 63) / 64 | 1) * 64)
#define PREPARED PREPARED_BYTES(I)
#define PANEL PANEL_BYTES(PANEL_COLUMNS)

#if (defined(LANES_AVX2) || defined(LANES_AMX)) && INTEGERS
#define UNPACKS 1  // unpacked.h
#else
#define UNPACKS 0
#endif
#if defined(LANES_AMX) && (INTEGERS || WEIGHT == BF16)
#define BY_TILES 1  // tiles.h
#else
#define BY_TILES 0
#endif

// Tiles of PANELS x TOKENS accumulators that fit the registers, by rising TOKENS. Few tokens take one panel at a time: one stream of
// memory from end to end was faster than two in parallel (Q4_0, one token: 37 GB/s a core, not 29). Floats with many tokens take two,
// which halves the loads of x; integers need registers for both sums. Sixteen at once let a batch of sixteen read weights once.
#if BY_TILES && INTEGERS  // from nine rows on, tiles: sixteen rows cost them what nine or ten cost dot products
#define TILES(TILE) TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 8)
#define STREAM_TOKENS 8
#ifdef TILE_ROWS  // of experts, whose rows are gathered
#define MAX_TOKENS TILE_ROWS
#else
#define MAX_TOKENS 64  // a panel is unpacked once for them
#endif
#define WIDE MAX_TOKENS
#elif BY_TILES
#define TILES(TILE)
#define STREAM_TOKENS 16
#ifdef TILE_ROWS
#define MAX_TOKENS TILE_ROWS
#else  // rows that take half of an L2 of 2 MB; of long rows half of the columns at a time
#define PASSES (SLICES >= 4 && PREPARED > 6000 ? 2 : 1)
#define ROWS_IN_L2 (1100000 * PASSES / PREPARED / 32 * 32)
#define MAX_TOKENS (ROWS_IN_L2 > 256 ? 256 : ROWS_IN_L2 < 64 ? 64 : ROWS_IN_L2)
#endif
#define WIDE MAX_TOKENS
#elif defined(LANES_AVX512) && (INTEGERS || GROUPS)
#define TILES(TILE) TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 6) TILE(1, 8) TILE(1, 12)
#define MAX_TOKENS 12
#define WIDE 12
#elif defined(LANES_AVX512)
#define TILES(TILE) TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 6) TILE(1, 8) TILE(2, 12) TILE(1, 16)
#define MAX_TOKENS 16
#define WIDE 12
#elif defined(LANES_PLAIN)
#define TILES(TILE) TILE(1, 1) TILE(1, 4)
#define MAX_TOKENS 4
#define WIDE 4
#elif defined(LANES_AVX2) && (WEIGHT == BF16 || WEIGHT == F16)  // one panel would wait for its additions: 8 bytes a cycle
#define TILES(TILE) TILE(2, 1) TILE(2, 2) TILE(1, 4) TILE(1, 6)
#define MAX_TOKENS 6
#define WIDE 6
#elif UNPACKS  // from seven rows on, weights are unpacked once for all of them
#define TILES(TILE) TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 6)
#define STREAM_TOKENS 6
#define MAX_TOKENS 24
#define WIDE 24
#else
#define TILES(TILE) TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 6)
#define MAX_TOKENS 6
#define WIDE 6
#endif
#ifndef PASSES
#define PASSES 1  // runs of slices whose sums are in the output between them
#endif
#ifndef STREAM_TOKENS
#define STREAM_TOKENS MAX_TOKENS  // rows, at most, that multiply weights as they come from memory
#endif

// --- x

// Numbers i to i + 31 of a row. `odd` collects what is not finite, which an integer could not express.
INLINE void prepare_32(uint8_t *row, int i, v16 a, v16 b, v16 *odd) {
#if INTEGERS
  struct x_group *group = (struct x_group *)row + i / 32;
  *odd = v16_fma(a, v16_set(0.0f), v16_fma(b, v16_set(0.0f), *odd));
  fill_group(group, a, b);
#else
  (void)odd;
  store_x(row, i, a);
  store_x(row, i + 16, b);
#endif
}

// After the last prepare_32 of a row: a row with an inf or a NaN in it gives NaN, as it does with float weights.
INLINE void prepare_end(uint8_t *row, v16 odd) {
#if INTEGERS
  if (v16_sum(odd) != 0.0f) ((struct x_group *)row)->scale = __builtin_nanf("");
#else
  (void)row, (void)odd;
#endif
}

static inline void prepare_row(uint8_t *row, const float *x) {
  v16 odd = v16_set(0.0f);
  for (int i = 0; i < I; i += 32) prepare_32(row, i, v16_load(x + i), v16_load(x + i + 16), &odd);
  prepare_end(row, odd);
}

// --- tiles. `panels` and `tokens` are constants wherever dot_tile is inlined, so that the accumulators are registers.

// How many bytes ahead weights are prefetched; hardware alone stops at every page. More work on a line needs no less of it: the lines
// that have arrived must hide the latency of memory, and slow lines leave the hardware's own prefetch idle.
// One panel's last bytes prefetch the first of the next: without that a core reads a quarter less (Q4_0: 18 KB a panel).
#ifdef LANES_AVX2
#define AHEAD(panels, tokens) ((panels) == 2 ? 4096 : 8192)
#elif defined(LANES_AMX) || (INTEGERS && BLOCK > PART)
#define AHEAD(panels, tokens) 8192
#else
#define AHEAD(panels, tokens) ((panels) == 2 ? 4096 : (tokens) == 1 ? 4096 : 8192)
#endif

// Whether prefetches go to the L2 only. A core waits for fewer lines of its L1 than of its L2, and lines that its sums do not need
// yet take those places: several rows 1.1 to 1.4 times as fast on Zen 4, all on Emerald Rapids 1.02 to 1.1. One row that reads memory from end to
// end is 1.04 times as fast with the L1, and so are parts of sixteen with few rows by other code than AVX-512's, whose lines are not read in order.
#if defined(LANES_NEON) || defined(LANES_PLAIN)
#define TO_L2(tokens) 0
#elif defined(LANES_AMX)
#define TO_L2(tokens) (!(INTEGERS && PART == 16))
#elif defined(LANES_AVX2)
#define TO_L2(tokens) ((tokens) > (INTEGERS && PART == 16 ? 6 : 1))
#else
#define TO_L2(tokens) ((tokens) > (INTEGERS ? 1 : 2) || (INTEGERS && BLOCK > PART))
#endif

// Prefetch, for a tile, of the `bytes` that are AHEAD of `at` in a panel; what would be after its end is taken from the start of `next_panel`.
INLINE void fetch_ahead(const int panels, const int tokens, const uint8_t *panel, const uint8_t *next_panel, const long at,
                        const int bytes) {
  const long ahead = AHEAD(panels, tokens), lead = (ahead < PANEL ? ahead : PANEL) / bytes * bytes;
  const uint8_t *from = (at < PANEL - lead ? panel + lead : next_panel - (PANEL - lead)) + at;
  if (TO_L2(tokens)) UNROLL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  else UNROLL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// acc[t], the sums of one slice, join those of the slices before it: waiting[n] is the sum of 2^n slices whose neighbour comes next. After
// the last slice acc[t] is the sum of all.
INLINE void add_slice(const int tokens, int slice, v16 *acc, v16 waiting[WAITING][MAX_TOKENS]) {
  if (SLICES == 1) return;
  int level = 0;
  for (; slice >> level & 1; level++) UNROLL for (int t = 0; t < tokens; t++) acc[t] = v16_add(waiting[level][t], acc[t]);
  if (slice + 1 < SLICES) UNROLL for (int t = 0; t < tokens; t++) waiting[level][t] = acc[t];
}

#if INTEGERS
#define PARTS (BLOCK / PART)
#define SHARE (PANEL_BLOCK_BYTES / PARTS)  // a whole number for every format
#ifdef LANES_AMX
#define UNROLLED 0
#else
#define UNROLLED 2  // rows, at most, for which all parts of a block are written out: what their words and scales share is computed once
#endif

// acc[t] += a part, whose sums of integers are `sum`.
INLINE void add_part(const int tokens, const struct part_sum *sum, const struct x_group *group, int half, v16 scale, v16 *acc) {
  UNROLL for (int t = 0; t < tokens; t++) {
    const struct x_group *of = of_row(group, t, PREPARED);
    acc[t] = v16_fma(v16_from_i16(end_part(sum[t], of, half)), v16_mul(scale, v16_set(of->scale)), acc[t]);
  }
}
#if MINIMUMS
INLINE void add_minimum(const int tokens, v16 minimum, const struct x_group *group, int half, v16 *acc) {
  UNROLL for (int t = 0; t < tokens; t++) acc[t] = v16_fma(minimum, v16_set(of_row(group, t, PREPARED)->offsets[half]), acc[t]);
}
#endif

// acc[t] += part p of block b times its group of row t.
INLINE void dot_one_part(const int panels, const int tokens, const uint8_t *panel, const uint8_t *next_panel, long b, int p,
                         const uint8_t *x, v16 *acc) {
  const uint8_t *block = panel + b * PANEL_BLOCK_BYTES;
  // a part's share: the lines of a whole block of 256 at once are more than a core can ask for
  fetch_ahead(panels, tokens, panel, next_panel, b * PANEL_BLOCK_BYTES + p * SHARE, SHARE);
  const struct x_group *group = (const struct x_group *)x + (b * BLOCK + p * PART - BEFORE) / 32;
  const int half = p * PART % 32 / 16;  // of the group, that the part begins with
  struct part_sum sum[MAX_TOKENS];
  UNROLL for (int t = 0; t < tokens; t++) sum[t] = begin_part(of_row(group, t, PREPARED), half);
  dot_part(tokens, block, p, group, PREPARED, sum);
  const v16 scale = part_scale(block, p);
  add_part(tokens, sum, group, half, scale, acc);
#if MINIMUMS
  add_minimum(tokens, part_minimum(block, p), group, half, acc);
#endif
}

INLINE void dot_tile(const int panels, const int tokens, const uint8_t *panel, long apart, const uint8_t *next_panel, const uint8_t *x,
                     float *tile, int pitch) {
  v16 acc[MAX_TOKENS], waiting[WAITING][MAX_TOKENS];
  (void)apart;
  for (int slice = 0; slice < SLICES; slice++) {
    const long start = BEFORE + slice_column(slice), end = BEFORE + slice_column(slice + 1);
    UNROLL for (int t = 0; t < tokens; t++) acc[t] = v16_set(0.0f);
    // two loops: one over parts alone would look up a block's scales again and again (Q6_K, one token: a quarter slower)
    for (long b = start / BLOCK; b * BLOCK < end; b++) {
      const int from = UNIT < BLOCK && b * BLOCK < start ? (int)(start % BLOCK) / PART : 0;
      const int to = UNIT < BLOCK && end - b * BLOCK < BLOCK ? (int)(end % BLOCK) / PART : PARTS;
      if (tokens <= UNROLLED && from == 0 && to == PARTS) {
        UNROLL for (int p = 0; p < PARTS; p++) dot_one_part(panels, tokens, panel, next_panel, b, p, x, acc);
      } else
        for (int p = from; p < to; p++) dot_one_part(panels, tokens, panel, next_panel, b, p, x, acc);
    }
    add_slice(tokens, slice, acc, waiting);
  }
  UNROLL for (int t = 0; t < tokens; t++) v16_store(tile + t * pitch, acc[t]);
}

#elif GROUPS
// A group's columns are CHAINS runs, each with a sum of its own: float32 within a run, then acc += sum * scale, run by run.
#define CHAIN_STEPS (BLOCK / STEP_COLUMNS / CHAINS)
#define FETCHES (PANEL_BLOCK_BYTES > 1024 ? 4 : 1)  // shares of a block that are prefetched together; divides CHAINS and CHAIN_STEPS
#define SHARE (PANEL_BLOCK_BYTES / FETCHES)

// sum[t] += step k of run c. `block` and x: those of the group.
INLINE void dot_run_step(const int tokens, const uint8_t *block, const uint8_t *x, int c, int k, v16 *sum) {
  const int step = c * CHAIN_STEPS + k;
  dot_step(tokens, block + QUANTS + step * 64, x + step * STEP_X_BYTES, PREPARED, sum);
}

// acc[t] += group b times its numbers of row t, which x begins with.
// Few tokens: all runs at once, which hides the latency of additions. Many tokens are as many chains: one run after the other.
INLINE void dot_group(const int panels, const int tokens, const uint8_t *panel, const uint8_t *next_panel, long b, const uint8_t *x,
                      v16 *acc) {
  const int together = tokens <= 2 ? CHAINS : 1, shares = tokens <= 2 ? FETCHES : 1;
  const uint8_t *block = panel + b * PANEL_BLOCK_BYTES;
  for (int first = 0; first < CHAINS; first += together) {
    v16 sum[CHAINS][MAX_TOKENS];
    UNROLL for (int c = 0; c < together; c++) UNROLL for (int t = 0; t < tokens; t++) sum[c][t] = v16_set(0.0f);
    for (int share = 0; share < shares; share++) {
      const int fetch = first + share;
      if (fetch < FETCHES) fetch_ahead(panels, tokens, panel, next_panel, b * PANEL_BLOCK_BYTES + fetch * SHARE, SHARE);
      UNROLL for (int k = 0; k < CHAIN_STEPS / shares; k++) UNROLL for (int c = 0; c < together; c++)
          dot_run_step(tokens, block, x, first + c, share * (CHAIN_STEPS / shares) + k, sum[c]);
    }
    const v16 scale = group_scale(block);
    UNROLL for (int c = 0; c < together; c++) UNROLL for (int t = 0; t < tokens; t++) acc[t] = v16_fma(sum[c][t], scale, acc[t]);
  }
}

INLINE void dot_tile(const int panels, const int tokens, const uint8_t *panel, long apart, const uint8_t *next_panel, const uint8_t *x,
                     float *tile, int pitch) {
  v16 acc[MAX_TOKENS], waiting[WAITING][MAX_TOKENS];
  (void)apart;
  for (int slice = 0; slice < SLICES; slice++) {
    UNROLL for (int t = 0; t < tokens; t++) acc[t] = v16_set(0.0f);
    for (long b = slice_column(slice) / BLOCK; b < slice_column(slice + 1) / BLOCK; b++)
      dot_group(panels, tokens, panel, next_panel, b, x + b * (BLOCK / STEP_COLUMNS * STEP_X_BYTES), acc);
    add_slice(tokens, slice, acc, waiting);
  }
  UNROLL for (int t = 0; t < tokens; t++) v16_store(tile + t * pitch, acc[t]);
}

#else
#define STEP_BYTES (PANEL_BLOCK_BYTES / BLOCK * STEP_COLUMNS)

// One step of k: acc[p][t] += the weights of panel p, which is `apart` bytes after the one before, times row t's numbers.
INLINE void dot_step(const int panels, const int tokens, const uint8_t *panel, long apart, const uint8_t *x, long k,
                     v16 acc[2][MAX_TOKENS]) {
  UNROLL for (int half = 0; half < HALVES; half++) {
    StepWeights w[2];
    // weights are loaded again: kept, they would cost an accumulator its register (half the speed); few rows have registers enough
    if (half > 0 && panels * tokens > 4) __asm__ volatile("" ::: "memory");
    UNROLL for (int p = 0; p < panels; p++) w[p] = load_weights(panel + p * apart + k * STEP_BYTES, half);
    UNROLL for (int t = 0; t < tokens; t++) {
      const StepX one = load_x(x + t * PREPARED + STEP_X_BYTES * k, half);
      UNROLL for (int p = 0; p < panels; p++) acc[p][t] = multiply(acc[p][t], w[p], one);
    }
  }
}

INLINE void dot_tile(const int panels, const int tokens, const uint8_t *panel, long apart, const uint8_t *next_panel, const uint8_t *x,
                     float *tile, int pitch) {
  v16 acc[2][MAX_TOKENS], waiting[2][WAITING][MAX_TOKENS];
  for (int slice = 0; slice < SLICES; slice++) {
    const long end = slice_column(slice + 1) / STEP_COLUMNS;
    UNROLL for (int p = 0; p < panels; p++) UNROLL for (int t = 0; t < tokens; t++) acc[p][t] = v16_set(0.0f);
    for (long k = slice_column(slice) / STEP_COLUMNS; k < end; k += 4) {
      UNROLL for (int p = 0; p < panels; p++) fetch_ahead(panels, tokens, panel + p * apart, next_panel, k * STEP_BYTES, 4 * STEP_BYTES);
      UNROLL for (int i = 0; i < 4; i++) dot_step(panels, tokens, panel, apart, x, k + i, acc);
    }
    UNROLL for (int p = 0; p < panels; p++) add_slice(tokens, slice, acc[p], waiting[p]);
  }
  UNROLL for (int t = 0; t < tokens; t++) UNROLL for (int p = 0; p < panels; p++) v16_store(tile + t * pitch + p * 16, acc[p][t]);
}
#endif

#define DOT(panels, tokens)                                                                                                         \
  NOINLINE void dot_##panels##_##tokens(const uint8_t *panel, long apart, const uint8_t *next_panel, const uint8_t *x, float *tile, \
                                        int pitch) {                                                                                \
    dot_tile(panels, tokens, panel, apart, next_panel, x, tile, pitch);                                                             \
  }
TILES(DOT)
#undef DOT

// The sums of a tile, and where the caller will write its results.
struct results {
  float *tile;
  int pitch;
  const float *out;
  long out_pitch;
};
enum { ALL_PASSES = -1 };

#include "unpacked.h"

#include "tiles.h"  // after what it takes its parts from

// How many of `left` rows the next tile takes.
static inline int tile_tokens(int left) { return left <= MAX_TOKENS ? left : WIDE; }

// tile[t * pitch + r] = row t of x . row r of panel `a` for r < 16, row r - 16 of panel `b` above; t < tokens <= MAX_TOKENS. x: prepared
// rows. The tile has room for MAX_TOKENS rows; rows from `tokens` on are undefined. `next_panel`: the panel that will be read next.
// `to.out`: where the caller will write what it makes of these columns, row t at out + t * out_pitch; null where that is not in one place.
static inline void panel_dot(const uint8_t *a, const uint8_t *b, const uint8_t *next_panel, const uint8_t *x, int tokens,
                             struct results to) {
#define DOT(panels, most)                                                                \
  if (tokens <= most) {                                                                  \
    dot_##panels##_##most(a, b - a, panels == 1 ? b : next_panel, x, to.tile, to.pitch); \
    if (panels == 1) dot_##panels##_##most(b, 0, next_panel, x, to.tile + 16, to.pitch); \
    return;                                                                              \
  }
  TILES(DOT)
#undef DOT
#if BY_TILES
  dot_by_tiles(ALL_PASSES, a, b, next_panel, x, tokens, to);
#elif UNPACKS
  dot_unpacked(a, b, x, tokens, to.tile, to.pitch);
  dot_unpacked(b, next_panel, x, tokens, to.tile + 16, to.pitch);
#endif
}

// panel_dot of one of PASSES runs of slices, whose sums the caller adds, or of ALL_PASSES.
static inline void pass_dot(int pass, const uint8_t *a, const uint8_t *b, const uint8_t *next_panel, const uint8_t *x, int tokens,
                            struct results to) {
#if BY_TILES
  if (pass != ALL_PASSES) {
    dot_by_tiles(pass, a, b, next_panel, x, tokens, to);
    return;
  }
#endif
  panel_dot(a, b, next_panel, x, tokens, to);
}

// --- units of work

#define PIECE_ROWS 96  // a multiple of twelve and of 32

// How many of `count` rows meet panels before the next rows, where `runs` of panels are to become `least` units. By tiles: pieces of about the
// same size, whose prepared rows stay in a core's L2 (from the L3 a core was fed at a third of that). By lanes: all rows, or PIECE_ROWS.
static inline int rows_in_piece(int count, int runs, int least) {
#if BY_TILES
  int pieces = (count + MAX_TOKENS - 1) / MAX_TOKENS;
  const int most = (count + 31) / 32, wanted = (least + runs - 1) / runs;
  if (pieces < wanted) pieces = wanted < most ? wanted : most;
  return pieces > 1 ? ((count + pieces - 1) / pieces + 31) / 32 * 32 : count > 0 ? count : 1;
#else
  return runs < least ? PIECE_ROWS : count > 0 ? count : 1;
#endif
}

// The piece of a unit, and its run of panels. By tiles all runs meet a piece before the next one; by lanes pieces share a run's weights.
static inline int piece_of(int unit, int runs, int pieces) { return BY_TILES ? unit / runs : unit % pieces; }
static inline int run_of(int unit, int runs, int pieces) { return BY_TILES ? unit % runs : unit / pieces; }

// How many of all `pairs` of panels make a unit of work: some 128 KB of memory in one run, but at least eight units a thread.
static inline int pairs_in_unit(int pairs, int threads) {
  const int max = 163840 / (2 * PANEL), share = pairs / (8 * threads);
  return share < 2 || max < 2 ? 1 : share < max ? share : max;
}

// A thread takes its next unit before it works on this one, so that panel_dot can prefetch it; not near the end, where the other threads
// would wait for a unit that is queued after this one. -1: it has not taken one; `unit_after` then does.
static inline int unit_ahead(const struct thread_team *team, int unit, int units) {
  return unit + 2 * team->threads < units ? next_unit(team) : -1;
}
static inline int unit_after(const struct thread_team *team, int ahead) { return ahead < 0 ? next_unit(team) : ahead; }
// Which unit's panels to prefetch: the one ahead, or a guess.
static inline int likely_unit(const struct thread_team *team, int unit, int ahead, int units) {
  int likely = ahead < 0 ? unit + team->threads : ahead;
  return likely < units ? likely : units - 1;
}
