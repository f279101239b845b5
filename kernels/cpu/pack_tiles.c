// tiles = rows in the layout of a GPU's matrix instructions, 16 rows at a time (tinyvllm/quant/layouts/tiles.py defines it).
//
//   tiles   [.., BYTES]   the matrix in tiles, FORMAT (one with TILE_BYTES, format.h); rows of sixteen from span[0] to span[1] are written
//   rows    [N, ...]      the source as a file has it, FORMAT, at any address
//   span    [4] int32     first sixteen rows, end of the sixteens, N (zeros complete the last sixteen), and how many sixteens the matrix has
//
// I % BLOCK == 0. Sixteen rows are one unit of work. Bytes are moved and not interpreted. Tiles hold the last field of each block; after all
// tiles of the matrix follow its other fields, one field after the other.
#define WEIGHT FORMAT
#include "format.h"
#include "thread_team.h"

#define BLOCKS (I / BLOCK)
#define TILED_BYTES (TILE_BYTES * TILES_PER_BLOCK)  // of a block of one row: its last field
#define OTHER_BYTES (FILE_BLOCK_BYTES - TILED_BYTES)

static inline void pack_tile(uint32_t *to, const uint8_t *rows, int present);
static inline void pack_other_fields(uint8_t *to, const uint8_t *rows, long block, long blocks, int present);

static void pack_tiles(uint8_t *tiles, const uint8_t *rows, const int32_t *span, const struct thread_team *team) {
  const long blocks = (long)span[3] * BLOCKS;  // of sixteen rows each, in the whole matrix
  for (int unit = next_unit(team); unit < span[1] - span[0]; unit = next_unit(team)) {
    const int left = span[2] - unit * 16, present = left < 16 ? left : 16;
    for (int b = 0; b < BLOCKS; b++) {
      const long block = (long)(span[0] + unit) * BLOCKS + b;
      const uint8_t *from = rows + unit * 16 * FILE_ROW_BYTES(I) + (long)b * FILE_BLOCK_BYTES;
      for (int i = 0; i < TILES_PER_BLOCK; i++)
        pack_tile((uint32_t *)(tiles + (block * TILES_PER_BLOCK + i) * 16 * TILE_BYTES), from + OTHER_BYTES + i * TILE_BYTES, present);
      pack_other_fields(tiles + blocks * 16 * TILED_BYTES, from, block, blocks, present);
    }
  }
}

// Lane 4 g + t of 32 has the words t of rows g and g + 8, then the words t + 4 of both, and so on.
static inline void pack_tile(uint32_t *to, const uint8_t *rows, int present) {
  for (int r = 0; r < 16; r++) {
    const uint8_t *from = rows + r * FILE_ROW_BYTES(I);
    for (int w = 0; w < TILE_BYTES / 4; w++) {
      const int lane = r % 8 * 4 + w % 4, place = w / 4 * 2 + r / 8;
      to[lane * (TILE_BYTES / 8) + place] = r < present ? ((const struct any_word *)(from + 4 * w))->word : 0;
    }
  }
}

// Of every other field its bytes in row 0, row 8, row 1, row 9 and so on; a field of all blocks before the next field.
static inline void pack_other_fields(uint8_t *to, const uint8_t *rows, long block, long blocks, int present) {
  int start = 0;
#define FIELD(bytes, word, flip)                                                                                        \
  if (start < OTHER_BYTES) {                                                                                            \
    for (int r = 0; r < 16; r++)                                                                                        \
      for (int i = 0; i < (bytes); i++)                                                                                 \
        to[(block * 16 + r % 8 * 2 + r / 8) * (bytes) + i] = r < present ? rows[r * FILE_ROW_BYTES(I) + start + i] : 0; \
    to += blocks * 16 * (bytes);                                                                                        \
    start += (bytes);                                                                                                   \
  }
  FIELDS(FIELD)
#undef FIELD
}
