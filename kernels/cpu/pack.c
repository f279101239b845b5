// panels = rows in the layout of the products: sixteen rows' words interleaved (format.h; tinyvllm/quant/layouts/panels.py defines it).
//
//   panels  [.., PANEL_BYTES]     the matrix in panels of 16 rows, FORMAT, on a 64-byte boundary; those from span[0] to span[1] are written
//   rows    [N, FILE_ROW_BYTES]   the source as a file has it, SOURCE, at any address
//   span    [4] int32             first panel, end of the panels, N, I; N rows fill them but for the last panel, which zeros complete
//
// Panel p takes rows (p - span[0]) * 16 onwards, so that several sources become one matrix with one call each. I % BLOCK == 0. SOURCE ==
// FORMAT, or both are among F32, F16 and BF16: then numbers are rounded to nearest, ties to even, and beyond float16's range become
// infinite. Blocks are moved part by part (FIELDS of format.h), and none of their bits change but those that a field flips. The width is an
// argument: moving bytes is as fast, and one compilation serves all matrices of a model.
//
// One panel is one unit of work. Sixteen rows of four words are transposed at a time, in the four quarters of four registers.
//
// There are no non-temporal stores because a model is packed into fresh pages: there floats gained nothing by them and blocks, which do
// not begin on a cache line, lost a fifth to a quarter. In pages already in use floats would gain a seventh to a third.
#define WEIGHT FORMAT
#include "format.h"
#include "lanes.h"
#include "thread_team.h"

#define ROWS 16

struct source {  // sixteen rows; those beyond the matrix point to the last one, and their bits are masked out
  const uint8_t *row[ROWS];
  __attribute__((vector_size(64))) uint32_t mask;
};

static inline struct source sixteen_rows(const uint8_t *rows, long stride, int present);
static inline void pack_panel(uint8_t *to, const struct source *from, int I);
static inline void convert_panel(uint8_t *to, const struct source *from, int present, int I);

#define NUMBER_BYTES(kind) ((kind) == F32 ? 4 : 2)
#if SOURCE == FORMAT
#define SOURCE_ROW_BYTES(I) FILE_ROW_BYTES(I)
#else
#define SOURCE_ROW_BYTES(I) ((I) * (long)NUMBER_BYTES(SOURCE))
#endif

static void pack(uint8_t *panels, const uint8_t *rows, const int32_t *span, const struct thread_team *team) {
  const int first = span[0], count = span[1] - span[0], I = span[3];
  for (int unit = next_unit(team); unit < count; unit = next_unit(team)) {
    const int left = span[2] - unit * ROWS, present = left < ROWS ? left : ROWS;
    const struct source from = sixteen_rows(rows + (long)unit * ROWS * SOURCE_ROW_BYTES(I), SOURCE_ROW_BYTES(I), present);
    uint8_t *to = panels + (first + unit) * PANEL_BYTES(I);
#if SOURCE == FORMAT
    pack_panel(to, &from, I);
#else
    convert_panel(to, &from, present, I);
#endif
  }
}

static inline struct source sixteen_rows(const uint8_t *rows, long stride, int present) {
  struct source from;
  for (int r = 0; r < ROWS; r++) {
    from.row[r] = rows + (r < present ? r : present - 1) * stride;
    from.mask[r] = r < present ? ~0u : 0;
  }
  return from;
}

// --- sixteen rows, word by word

// The compiler's own vectors: these moves are the same for every instruction set.
typedef uint32_t words4 __attribute__((vector_size(16)));
typedef uint32_t words16 __attribute__((vector_size(64)));
typedef uint16_t halves32 __attribute__((vector_size(64)));
struct any4 {
  words4 v;
} __attribute__((packed, aligned(1), may_alias));
struct any16 {
  words16 v;
} __attribute__((packed, aligned(16), may_alias));

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
  words[0] = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) & from->mask;
  words[1] = __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31) & from->mask;
  words[2] = __builtin_shufflevector(ab2, cd2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) & from->mask;
  words[3] = __builtin_shufflevector(ab2, cd2, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31) & from->mask;
}

// Sixteen pairs of halves -> the sixteen first ones, then the sixteen second ones.
static inline words16 split_pairs(words16 pairs) {
  halves32 h = (halves32)pairs;
  return (words16)__builtin_shufflevector(h, h, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,  // first
                                          1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// --- blocks, field by field

// One field, `bytes` from byte `at` of every row on, in words of `word` bytes.
INLINE void pack_field(uint8_t *to, const struct source *from, long at, const int bytes, const int word, const uint32_t flip) {
  const words16 flips = flip - (words16){0};
  for (int i = 0; i + 16 <= bytes; i += 16) {
    words16 words[4];
    transpose(from, at + i, words);
    for (int j = 0; j < 4; j++) store(to + (i + 4 * j) * ROWS, (word == 2 ? split_pairs(words[j]) : words[j]) ^ flips);
  }
  for (int i = bytes & -16; i < bytes; i += word)  // scales and other short fields
    for (int r = 0; r < ROWS; r++) {
      uint8_t *place = to + i * ROWS + r * word;
      if (word == 1) *place = (from->row[r][at + i] & (uint8_t)from->mask[r]) ^ (uint8_t)flip;
      else if (word == 2)
        ((struct any_half *)place)->half = (((const struct any_half *)(from->row[r] + at + i))->half & from->mask[r]) ^ flip;
      else ((struct any_word *)place)->word = (((const struct any_word *)(from->row[r] + at + i))->word & from->mask[r]) ^ flip;
    }
}

static inline void pack_block(uint8_t *to, const struct source *from, long at) {
#define FIELD(bytes, word, flip) pack_field(to, from, at, bytes, word, flip), to += (bytes) * ROWS, at += (bytes);
  FIELDS(FIELD)
#undef FIELD
}

static inline void pack_panel(uint8_t *to, const struct source *from, const int I) {
  for (int b = 0; b < I / BLOCK; b++) pack_block(to + (long)b * PANEL_BLOCK_BYTES, from, (long)b * FILE_BLOCK_BYTES);
}

// --- other float formats

#if SOURCE != FORMAT
#define PIECE 128  // columns converted at a time: sixteen rows of them stay in the first-level cache

// Sixteen numbers. A float must not be read from an odd address, at which the source may be: they are copied to `same` first.
static inline void convert(uint8_t *to, const uint8_t *from) {
  _Alignas(64) uint8_t same[64];
  for (int i = 0; i < 16 * NUMBER_BYTES(SOURCE); i += 16) ((struct any4 *)(same + i))->v = ((const struct any4 *)(from + i))->v;
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

static inline void convert_panel(uint8_t *to, const struct source *from, int present, const int I) {
  _Alignas(64) uint8_t piece[ROWS][PIECE * NUMBER_BYTES(FORMAT)];
  const struct source converted = sixteen_rows(piece[0], sizeof piece[0], present);
  for (int start = 0; start < I; start += PIECE) {
    const int count = I - start < PIECE ? I - start : PIECE;
    for (int r = 0; r < present; r++)
      for (int i = 0; i < count; i += 16) convert(piece[r] + i * NUMBER_BYTES(FORMAT), from->row[r] + (start + i) * NUMBER_BYTES(SOURCE));
    for (int i = 0; i < count; i += BLOCK)
      pack_block(to + (long)(start + i) / BLOCK * PANEL_BLOCK_BYTES, &converted, i / BLOCK * FILE_BLOCK_BYTES);
  }
}
#endif
