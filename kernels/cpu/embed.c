// x[t] = table[tokens[t]] as float32: the exact value of every weight.
//
//   x       [T, E] float32   rows from rows[0] on are not touched
//   table   [V, E] WEIGHT    PANELS 0: rows as in files. Q8_0: blocks of 32 as {half scale; int8 q[32]}, Q4_0: {half scale;
//                            uint8 q[16]}, the low nibbles are elements 0 to 15
//                            PANELS 1: sixteen rows' 32-bit words side by side, as the products read them (tinyvllm/quant/layouts.py)
//   tokens  [T] int32        a number outside 0..V-1 gives a row of NaN, which `norm_head` reports: never memory outside the table
//   rows    [1] int32        rows that are meant, at most T
//
// One row is one unit of work. E is a multiple of 32. Block formats are those of GGUF.
#include "numbers.h"
#include "lanes.h"
#include "thread_team.h"

#if WEIGHT == Q8_0
#define BLOCK 34        // bytes of a block of 32 in a file
#define PANEL_BLOCK 544 // and of the sixteen blocks side by side in a panel
#elif WEIGHT == Q4_0
#define BLOCK 18
#define PANEL_BLOCK 288
#endif

#if PANELS
static inline void read_row(float *x, const uint8_t *table, int token) {
  const int r = token % 16;
#if WEIGHT == F32
  const float *panel = (const float *)table + (long)(token / 16) * E * 16;
  for (int i = 0; i < E; i++) x[i] = panel[i * 16 + r];
#elif WEIGHT == F16
  const uint16_t *panel = (const uint16_t *)table + (long)(token / 16) * E * 16;
  for (int i = 0; i < E; i++) x[i] = float_from_f16(panel[i * 16 + r]);
#elif WEIGHT == BF16
  const uint16_t *panel = (const uint16_t *)table + (long)(token / 16) * E * 16;
  for (int i = 0; i < E; i++) x[i] = float_from_bf16(panel[i / 2 * 32 + r * 2 + i % 2]);
#else
  const uint8_t *block = table + (long)(token / 16) * (E / 32) * PANEL_BLOCK;
  for (int b = 0; b < E / 32; b++, block += PANEL_BLOCK, x += 32) {
    const float scale = float_from_f16(half_at(block + 2 * r));
    const uint8_t *q = block + 32 + 4 * r;
#if WEIGHT == Q8_0
    for (int i = 0; i < 32; i++) x[i] = scale * (float)(q[i / 4 * 64 + i % 4] - 128);
#else
    for (int i = 0; i < 16; i++) x[i] = scale * (float)((q[i / 4 * 64 + i % 4] & 15) - 8);
    for (int i = 0; i < 16; i++) x[16 + i] = scale * (float)((q[i / 4 * 64 + i % 4] >> 4) - 8);
#endif
  }
#endif
}
#else
static inline void read_row(float *x, const uint8_t *table, int token) {
#if WEIGHT == F32
  const float *row = (const float *)table + (long)token * E;
  for (int i = 0; i < E; i += 16) v16_store(x + i, v16_load(row + i));
#elif WEIGHT == F16
  const uint16_t *row = (const uint16_t *)table + (long)token * E;
  for (int i = 0; i < E; i += 16) v16_store(x + i, v16_load_f16(row + i));
#elif WEIGHT == BF16
  const uint16_t *row = (const uint16_t *)table + (long)token * E;
  for (int i = 0; i < E; i += 16) v16_store(x + i, v16_load_bf16(row + i));
#else
  const uint8_t *block = table + (long)token * (E / 32) * BLOCK;
  for (int b = 0; b < E / 32; b++, block += BLOCK, x += 32) {
    const float scale = float_from_f16(half_at(block));
#if WEIGHT == Q8_0
    const int8_t *q = (const int8_t *)block + 2;
    for (int i = 0; i < 32; i++) x[i] = scale * (float)q[i];
#else
    const uint8_t *q = block + 2;
    for (int i = 0; i < 16; i++) x[i] = scale * (float)((q[i] & 15) - 8);
    for (int i = 0; i < 16; i++) x[16 + i] = scale * (float)((q[i] >> 4) - 8);
#endif
  }
#endif
}
#endif

static void embed(float *x, const uint8_t *table, const int32_t *tokens, const int32_t *rows, const struct team *team) {
  for (int t = next(team); t < rows[0]; t = next(team)) {
    const int token = tokens[t];
    if (token >= 0 && token < V)
      read_row(x + (long)t * E, table, token);
    else
      for (int i = 0; i < E; i += 16) v16_store(x + (long)t * E + i, v16_set(float_from_bits(0x7FC00000)));
  }
}
