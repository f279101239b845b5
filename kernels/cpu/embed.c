// x[t] = table[tokens[t]] as float32: the exact value of every weight, times ROW_SCALE if it is defined.
//
//   x       [T, E] float32   rows from rows[0] on are not touched
//   table   [V, E] WEIGHT    PANELS 0: rows as in files. PANELS 1: panels, as the products read them (format.h)
//   tokens  [T] int32        a number outside 0..V-1 gives a row of NaN, which `norm_head` reports: never memory outside the table
//   rows    [1] int32        rows that count, at most T
//
// One row is one unit of work. E is a multiple of 32 and of the format's blocks.
#include "format.h"
#include "lanes.h"
#include "thread_team.h"

static void embed_row(float *x, const uint8_t *table, int token);

static void embed(float *x, const uint8_t *table, const int32_t *tokens, const int32_t *rows, const struct thread_team *team) {
  for (int t = next_unit(team); t < rows[0]; t = next_unit(team)) {
    const int token = tokens[t];
    if (token >= 0 && token < V) embed_row(x + (long)t * E, table, token);
    else
      for (int i = 0; i < E; i += 16) v16_store(x + (long)t * E + i, v16_set(float_from_bits(0x7FC00000)));
  }
}

// Row r of one field of a block in a panel, as a file has it.
INLINE void field_of_panel(uint8_t *to, const uint8_t *panel, int r, const int bytes, const int word, const uint32_t flip) {
  for (int i = 0; i < bytes / word; i++) {
    if (word == 1) to[i] = panel[16 * i + r];
    else if (word == 2) ((uint16_t *)to)[i] = ((const uint16_t *)panel)[16 * i + r];
    else ((struct any_word *)to)[i].word = ((const uint32_t *)panel)[16 * i + r] ^ flip;
  }
}

INLINE void block_of_panel(uint8_t *block, const uint8_t *panel, int r) {
  uint8_t *to = block;
#define FIELD(bytes, word, flip) field_of_panel(to, panel, r, bytes, word, flip), to += (bytes), panel += 16 * (bytes);
  FIELDS(FIELD)
#undef FIELD
}

static void embed_row(float *x, const uint8_t *table, int token) {
  for (int b = 0; b < E / BLOCK; b++) {
#if PANELS
    _Alignas(64) uint8_t block[FILE_BLOCK_BYTES];
    block_of_panel(block, table + token / 16 * PANEL_BYTES(E) + (long)b * PANEL_BLOCK_BYTES, token % 16);
#else
    const uint8_t *block = table + token * FILE_ROW_BYTES(E) + b * FILE_BLOCK_BYTES;
#endif
    unpack_block(x + b * BLOCK, block);
  }
#ifdef ROW_SCALE
  for (int i = 0; i < E; i += 16) v16_store(x + i, v16_mul(v16_load(x + i), v16_set(ROW_SCALE)));
#endif
}
