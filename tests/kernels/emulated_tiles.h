// AMX's tiles in plain C, for processors without them. It comes before the text of a kernel, which is compiled unchanged: the intrinsics of
// <immintrin.h> are replaced by functions that do what Intel's manual says of each instruction.
//
// What a processor refuses (a tile without a shape, shapes that do not fit each other, a shape that does not exist) makes all of a result 0xFF.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

struct emulated_tile {
  int rows, bytes;
  uint8_t at[16][64];
};
static _Thread_local struct emulated_tile emulated[8];

static int emulated_shape_is_bad(int tile) { return emulated[tile].rows == 0 || emulated[tile].bytes == 0; }

static void emulated_config(const void *shapes) {
  const uint8_t *bytes = (const uint8_t *)shapes;
  memset(emulated, 0, sizeof emulated);
  for (int i = 1; i < 16; i++)
    if (bytes[0] != 1 || bytes[i] != 0) return;  // palette 1, from the first row on; reserved bytes are 0
  for (int i = 0; i < 8; i++) {
    const int rows = bytes[48 + i], width = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
    if (rows > 16 || width > 64 || (rows == 0) != (width == 0)) return;
    emulated[i].rows = rows, emulated[i].bytes = width;
  }
}

static void emulated_release(void) { memset(emulated, 0, sizeof emulated); }

// A thread calls it before a kernel. The first use of its tiles allocates them, by code that may change the registers zmm16 to zmm31, in which clang
// keeps numbers over that (it takes the call for one that spares them).
void begin_thread(void) { emulated_release(); }

static void emulated_zero(int tile) { memset(emulated[tile].at, emulated_shape_is_bad(tile) ? 0xFF : 0, sizeof emulated[tile].at); }

static void emulated_load(int tile, const void *from, long pitch) {
  emulated_zero(tile);
  for (int i = 0; i < emulated[tile].rows; i++)
    memcpy(emulated[tile].at[i], (const uint8_t *)from + i * pitch, (unsigned long)emulated[tile].bytes);
}

static void emulated_store(int tile, void *to, long pitch) {
  if (emulated_shape_is_bad(tile)) memset(to, 0xFF, 64);
  for (int i = 0; i < emulated[tile].rows; i++)
    memcpy((uint8_t *)to + i * pitch, emulated[tile].at[i], (unsigned long)emulated[tile].bytes);
}

// Whether [rows of x, k] times [k, columns] fits the sums.
static int emulated_misfit(int sums, int x, int weights) {
  const struct emulated_tile *s = &emulated[sums], *a = &emulated[x], *b = &emulated[weights];
  const int bad = emulated_shape_is_bad(sums) || s->rows != a->rows || s->bytes != b->bytes || a->bytes != 4 * b->rows;
  if (bad) memset(emulated[sums].at, 0xFF, sizeof emulated[sums].at);
  return bad;
}

static float emulated_flush(float x) { return x > -0x1p-126f && x < 0x1p-126f ? x * 0.0f : x; }  // keeps the sign
static float emulated_number(const uint8_t *at) {
  const uint32_t bits = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;
  float x;
  memcpy(&x, &bits, 4);
  return emulated_flush(x);
}

static void emulated_floats(int sums, int x, int weights) {
  if (emulated_misfit(sums, x, weights)) return;
  for (int m = 0; m < emulated[sums].rows; m++)
    for (int n = 0; n < emulated[sums].bytes / 4; n++) {
      float part[2] = {0, 0}, sum, both;
      for (int k = 0; k < emulated[weights].rows; k++)
        for (int i = 0; i < 2; i++) {
          const float a = emulated_number(emulated[x].at[m] + 4 * k + 2 * i), b = emulated_number(emulated[weights].at[k] + 4 * n + 2 * i);
          part[i] = emulated_flush(__builtin_fmaf(a, b, part[i]));
        }
      memcpy(&sum, emulated[sums].at[m] + 4 * n, 4);
      both = emulated_flush(part[0] + part[1]);
      sum = emulated_flush(emulated_flush(sum) + both);
      memcpy(emulated[sums].at[m] + 4 * n, &sum, 4);
    }
}

static void emulated_integers(int sums, int x, int weights, int sign) {  // signed bytes of x, signed or unsigned bytes of weights
  if (emulated_misfit(sums, x, weights)) return;
  for (int m = 0; m < emulated[sums].rows; m++)
    for (int n = 0; n < emulated[sums].bytes / 4; n++) {
      int32_t sum;
      memcpy(&sum, emulated[sums].at[m] + 4 * n, 4);
      for (int k = 0; k < emulated[weights].rows; k++)
        for (int i = 0; i < 4; i++) {
          const uint8_t w = emulated[weights].at[k][4 * n + i];
          sum += (int8_t)emulated[x].at[m][4 * k + i] * (sign ? (int8_t)w : w);
        }
      memcpy(emulated[sums].at[m] + 4 * n, &sum, 4);
    }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_dpbssd
#define _tile_loadconfig emulated_config
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_floats
#define _tile_dpbsud(sums, x, weights) emulated_integers(sums, x, weights, 0)
#define _tile_dpbssd(sums, x, weights) emulated_integers(sums, x, weights, 1)
