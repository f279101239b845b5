// tiles = rows in the layout of a GPU's matrix instructions, 16 rows at a time (tinyvllm/quant/tiles.py says it format by format).
//
//   tiles   [.., BYTES]   the matrix in tiles, FORMAT (F16, BF16, Q8_0 or Q4_0); rows of sixteen from span[0] up to span[1] are written
//   rows    [N, ...]      the source as a file has it, FORMAT, at any address
//   span    [4] int32     first sixteen rows, one past the last, N (zeros complete the last sixteen), and how many the matrix has
//
// I % 32 == 0. Sixteen rows are one unit of work. Bytes are moved in words of four and never looked into.
#include "numbers.h"
#include "thread_team.h"

#define QUANTS (FORMAT == Q8_0 || FORMAT == Q4_0)
#define HALVES (FORMAT == Q4_0 ? 1 : 2)                             // of a tile's columns: the second half stands in words of its own
#define TILES (FORMAT == F16 || FORMAT == BF16 ? I / 16 : I / 32)   // of sixteen rows
#define TILE_WORDS (16 * 4 * HALVES)
#define STEP (QUANTS ? 2 + 16 * HALVES : 32)                        // bytes of a row from one tile to the next: a block begins with its scale

typedef struct { uint32_t word; } __attribute__((packed, aligned(1), may_alias)) any_word;
typedef struct { uint16_t half; } __attribute__((packed, aligned(1), may_alias)) any_half;

static inline void tile(uint32_t *to, uint16_t *scales, const uint8_t *rows, int there) {
  for (int r = 0; r < 16; r++) {
    const uint8_t *from = rows + (long)r * TILES * STEP;
    for (int w = 0; w < 4 * HALVES; w++) {  // words 4 and on are the second half
      const int lane = r % 8 * 4 + w % 4, place = w / 4 * 2 + r / 8;
      to[lane * 2 * HALVES + place] = r < there ? ((const any_word *)(from + (QUANTS ? 2 : 0) + 4 * w))->word : 0;
    }
    if (QUANTS) scales[r % 8 * 2 + r / 8] = r < there ? ((const any_half *)from)->half : 0;
  }
}

static void pack_tiles(uint8_t *tiles, const uint8_t *rows, const int32_t *span, const struct team *team) {
  uint16_t *scales = (uint16_t *)(tiles + (long)span[3] * TILES * TILE_WORDS * 4);
  for (int unit = next(team); unit < span[1] - span[0]; unit = next(team)) {
    const int left = span[2] - unit * 16, there = left < 16 ? left : 16;
    const long first = (long)(span[0] + unit) * TILES;
    for (int i = 0; i < TILES; i++)
      tile((uint32_t *)tiles + (first + i) * TILE_WORDS, scales + (first + i) * 16, rows + (long)unit * 16 * TILES * STEP + (long)i * STEP, there);
  }
}
