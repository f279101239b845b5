// panels = rows in the layout of the products: sixteen rows' 32-bit words side by side (tinyvllm/quant/layouts.py says it format by format).
//
//   panels  [.., PANEL_BYTES]   the matrix in panels of 16 rows, FORMAT, on a 64-byte border; those from span[0] up to span[1] are written
//   rows    [N, ROW_BYTES]      the source as a file has it, SOURCE, at any address
//   span    [3] int32           first panel, one past the last, N; N rows fill them but for the last panel, which zeros complete
//
// Panel p takes rows (p - span[0]) * 16 onwards, so that several sources become one matrix by a call each. I % 32 == 0. SOURCE == FORMAT,
// or both are among F32, F16 and BF16: then numbers are rounded to nearest, ties to even, and beyond float16's range become infinite.
// Scales and nibbles pass as they are; Q8_0's quants turn from int8 into uint8 by adding 128.
//
// One panel is one unit of work. Sixteen rows of four words are transposed at a time, in the four quarters of four registers.
//
// Stores that go past the cache are left out because a model is packed into fresh pages: there floats gained nothing by them and blocks,
// which do not begin on a line's border, lost a fifth to a quarter. In pages already in use floats would gain a seventh to a third.
#include "numbers.h"
#include "lanes.h"
#include "thread_team.h"

#define ROWS 16
#if SOURCE == F32
#define ROW_BYTES (I * 4L)
#elif SOURCE == F16 || SOURCE == BF16
#define ROW_BYTES (I * 2L)
#elif SOURCE == Q8_0
#define ROW_BYTES (I / 32 * 34L)
#else
#define ROW_BYTES (I / 32 * 18L)
#endif
#if FORMAT == F32
#define PANEL_BYTES (I * 64L)
#elif FORMAT == F16 || FORMAT == BF16
#define PANEL_BYTES (I * 32L)
#elif FORMAT == Q8_0
#define PANEL_BYTES (I / 32 * 544L)
#else
#define PANEL_BYTES (I / 32 * 288L)
#endif

// The compiler's own vectors: these moves are the same for every instruction set.
typedef uint32_t words4 __attribute__((vector_size(16)));
typedef uint32_t words16 __attribute__((vector_size(64)));
typedef uint16_t halves16 __attribute__((vector_size(32)));
typedef uint16_t halves32 __attribute__((vector_size(64)));
struct any4 { words4 v; } __attribute__((packed, aligned(1), may_alias));
struct any16 { words16 v; } __attribute__((packed, aligned(32), may_alias));
struct any_half { uint16_t v; } __attribute__((packed, aligned(1), may_alias));

struct source {              // sixteen rows; those that are missing lie where the last one lies, and their bits are masked out
  const uint8_t *row[ROWS];
  words16 there;
};

static inline void store(uint8_t *to, words16 words) { ((struct any16 *)to)->v = words; }

// Four words of rows r, r + 4, r + 8 and r + 12.
static inline words16 gather(const struct source *from, int r, long at) {
  words4 a = ((const struct any4 *)(from->row[r] + at))->v, b = ((const struct any4 *)(from->row[r + 4] + at))->v;
  words4 c = ((const struct any4 *)(from->row[r + 8] + at))->v, d = ((const struct any4 *)(from->row[r + 12] + at))->v;
  return (words16){a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]};
}

// words[j] = word j, of the four from byte `at` on, of all sixteen rows.
static inline void transpose(const struct source *from, long at, words16 *words) {
  words16 a = gather(from, 0, at), b = gather(from, 1, at), c = gather(from, 2, at), d = gather(from, 3, at);
  words16 ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  words16 ab2 = __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  words16 cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  words16 cd2 = __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  words[0] = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) & from->there;
  words[1] = __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31) & from->there;
  words[2] = __builtin_shufflevector(ab2, cd2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) & from->there;
  words[3] = __builtin_shufflevector(ab2, cd2, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31) & from->there;
}

// Sixteen pairs of halves -> the sixteen first ones, then the sixteen second ones.
static inline words16 pairs_apart(words16 pairs) {
  halves32 h = (halves32)pairs;
  return (words16)__builtin_shufflevector(h, h, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                          1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// `bytes` of each row, floats of FORMAT, from byte `at` of the rows to the same place of the panel.
static inline void pack_floats(uint8_t *to, const struct source *from, long at, long bytes) {
  for (long i = 0; i < bytes; i += 16) {
    words16 words[4];
    transpose(from, at + i, words);
    for (int j = 0; j < 4; j++) store(to + (i + 4 * j) * ROWS, FORMAT == F16 ? pairs_apart(words[j]) : words[j]);
  }
}

// Blocks of a half-precision scale and `quads` words of quants.
static inline void pack_blocks(uint8_t *to, const struct source *from, int quads, uint32_t flip) {
  words16 flips = flip - (words16){0};
  for (int block = 0; block < I / 32; block++, to += 32 + 64 * quads) {
    long at = block * (2L + 4 * quads);
    for (int r = 0; r < ROWS; r++) ((uint16_t *)to)[r] = ((const struct any_half *)(from->row[r] + at))->v & (uint16_t)from->there[r];
    for (int j = 0; j < quads; j += 4) {
      words16 words[4];
      transpose(from, at + 2 + 4 * j, words);
      for (int k = 0; k < 4; k++) store(to + 32 + 64 * (j + k), words[k] ^ flips);
    }
  }
}

static inline struct source sixteen(const uint8_t *rows, long stride, int there) {
  struct source from;
  for (int r = 0; r < ROWS; r++) {
    from.row[r] = rows + (r < there ? r : there - 1) * stride;
    from.there[r] = r < there ? ~0u : 0;
  }
  return from;
}

#if SOURCE != FORMAT
#define WIDE(kind) ((kind) == F32 ? 4 : 2)
#define PIECE 128  // columns converted at a time: sixteen rows of them stay in the first-level cache

// Sixteen numbers. The source may lie at an odd address, where a float must not be read from: they go by way of `same`.
static inline void convert(uint8_t *to, const uint8_t *from) {
  _Alignas(64) uint8_t same[64];
  for (int i = 0; i < 16 * WIDE(SOURCE); i += 16) ((struct any4 *)(same + i))->v = ((const struct any4 *)(from + i))->v;
#if SOURCE == F32
  v16 numbers = v16_load((const float *)same);
#elif SOURCE == F16
  v16 numbers = v16_load_f16((const uint16_t *)same);
#else
  v16 numbers = v16_load_bf16((const uint16_t *)same);
#endif
  if (FORMAT == F32) v16_store((float *)to, numbers);
  else if (FORMAT == F16) v16_store_f16((uint16_t *)to, numbers);
  else v16_store_bf16((uint16_t *)to, numbers);
}

static inline void pack_converted(uint8_t *to, const struct source *from, int there) {
  _Alignas(64) uint8_t piece[ROWS][PIECE * WIDE(FORMAT)];
  struct source converted = sixteen(piece[0], sizeof piece[0], there);
  for (int start = 0; start < I; start += PIECE) {
    int count = I - start < PIECE ? I - start : PIECE;
    for (int r = 0; r < there; r++)
      for (int i = 0; i < count; i += 16) convert(piece[r] + i * WIDE(FORMAT), from->row[r] + (start + i) * WIDE(SOURCE));
    pack_floats(to + (long)start * WIDE(FORMAT) * ROWS, &converted, 0, count * WIDE(FORMAT));
  }
}
#endif

static void pack(uint8_t *panels, const uint8_t *rows, const int32_t *span, const struct team *team) {
  int first = span[0], count = span[1] - span[0];
  for (int unit = next(team); unit < count; unit = next(team)) {
    int left = span[2] - unit * ROWS, there = left < ROWS ? left : ROWS;
    struct source from = sixteen(rows + (long)unit * ROWS * ROW_BYTES, ROW_BYTES, there);
    uint8_t *to = panels + (long)(first + unit) * PANEL_BYTES;
#if SOURCE != FORMAT
    pack_converted(to, &from, there);
#elif FORMAT == Q8_0
    pack_blocks(to, &from, 8, 0x80808080u);
#elif FORMAT == Q4_0
    pack_blocks(to, &from, 4, 0);
#else
    pack_floats(to, &from, 0, ROW_BYTES);
#endif
  }
}
