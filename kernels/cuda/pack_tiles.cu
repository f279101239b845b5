// tiles = rows of a file in the layout of matrix instructions, sixteen rows at a time (tinyvllm/quant/layouts/tiles.py defines it).
//
//   tiles  uint8                     the whole matrix; `count` sixteens of rows from `first` on are written
//   beyond [1] int32                 only with CONVERTS: becomes 1 if a finite number is beyond TARGET, else is not written
//   rows   uint8                     bytes that hold these rows; each row begins at an even one, but see below
//   table  [4 + 16 * count] int32    first; count; sixteens of the whole matrix; units of a row; then of each row the byte of `rows` at which
//                                    it begins, negative for a row of zeros
//
// A row is units of UNIT bytes: a block of a packed format, or a tile's 32 bytes of floats. Of a unit the fields that QUANTS lists,
// QUANT(first byte, bytes), QUANT_BYTES in all, go into the tiles; those that FIELDS lists, FIELD(first byte, bytes, bytes of a word),
// RECORD_BYTES in all, become the record. Bytes are moved and not interpreted: the constants are the format, and tinyvllm/quant/layouts
// derives them. Rows and fields begin at even bytes, unless UNIT is odd: then words are read byte by byte.
//
// With CONVERTS, numbers are converted from SOURCE, a float format, to TARGET, F16 or BF16: to nearest, ties to even, a NaN to some NaN. A
// unit is then sixteen numbers of SOURCE, which has no other fields.
//
// Launch: any grid, 256 threads. A warp writes sixteen rows of one unit; the warps of a block take units that follow each other, so that a
// row is read in runs of 8 * UNIT bytes. Nothing is staged in shared memory: the kernel need only be faster than the bus that brings the rows.
#include "formats.cuh"

#if CONVERTS
#define BEYOND_ARGUMENT int *beyond,
#else
#define BEYOND_ARGUMENT
#endif

constexpr int WARPS = 8;

struct Row {
  const u8 *bytes;  // the unit's
  bool present;
};

DEVICE u32 word_of(Row row, int start, bool &too_large);
template <int FIRST, int BYTES> DEVICE bool write_quants(u8 *tile, Row low, Row high, int lane);
template <int FIRST, int BYTES, int WORD> DEVICE void write_field(u8 *record, const u8 *rows, const int *places, int lane);

extern "C" __global__ void __launch_bounds__(32 * WARPS) pack_tiles(u8 *tiles, BEYOND_ARGUMENT const u8 *rows, const int *table) {
  await_previous();
  const u32 first = table[0], count = table[1], sixteens = table[2], units = table[3], lane = threadIdx.x % 32;
  for (u32 work = blockIdx.x * WARPS + threadIdx.x / 32; work < count * units; work += gridDim.x * WARPS) {
    const u32 sixteen = work / units, unit = work % units;
    const int *places = table + 4 + 16 * sixteen;
    const s64 start = (s64)unit * UNIT, block = (s64)(first + sixteen) * units + unit;
    const int low = places[lane / 4], high = places[lane / 4 + 8];
    const Row first_row = {rows + low + start, low >= 0}, second_row = {rows + high + start, high >= 0};
    u8 *tile = tiles + block * (16 * QUANT_BYTES),
       *record = tiles + (s64)sixteens * units * (16 * QUANT_BYTES) + block * (16 * RECORD_BYTES);
    bool too_large = false;
#define QUANT(at, bytes)                                                       \
  too_large |= write_quants<(at), (bytes)>(tile, first_row, second_row, lane); \
  tile += 16 * (bytes);
#define FIELD(at, bytes, word)                                            \
  write_field<(at), (bytes), (word)>(record, rows + start, places, lane); \
  record += 16 * (bytes);
    QUANTS FIELDS
#undef QUANT
#undef FIELD
#if CONVERTS
        if (too_large) atomicOr(beyond, 1);
#endif
    (void)too_large, (void)record;
  }
}

// A lane holds of each slice of 16 bytes the word lane % 4 of row lane / 4 (low), then of the row eight further (high); two slices together
// if there are more than one. Whether a number is too large.
template <int FIRST, int BYTES> DEVICE bool write_quants(u8 *tile, Row low, Row high, int lane) {
  constexpr int SLICES = BYTES / 16;
  bool too_large = false;
#pragma unroll
  for (int slice = 0; slice < SLICES; slice += 2) {
    const int start = FIRST + 16 * slice + 4 * (lane % 4);
    const uint2 words = make_uint2(word_of(low, start, too_large), word_of(high, start, too_large));
    if constexpr (SLICES == 1) ((uint2 *)tile)[lane] = words;
    else
      ((uint4 *)tile)[slice * 16 + lane] =
          make_uint4(words.x, words.y, word_of(low, start + 16, too_large), word_of(high, start + 16, too_large));
  }
  return too_large;
}

#if UNIT % 2
DEVICE u32 word_at(const u8 *p) { return p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24; }
#else
// Rows of blocks begin at any even byte: a word there is two loads.
DEVICE u32 word_at(const u8 *p) { return (u64)p % 4 == 0 ? *(const u32 *)p : ((const u16 *)p)[0] | (u32)((const u16 *)p)[1] << 16; }
#endif

#if CONVERTS
DEVICE bool becomes_infinite(float number, u32 half) { return fabsf(number) <= 3.4028235e38f && (half & 0x7FFF) == 0x7C00; }

// Two numbers, from byte `start` of the tile's row on.
DEVICE u32 word_of(Row row, int start, bool &too_large) {
  if (!row.present) return 0;
  float2 pair;
  if constexpr (SOURCE == F32)
    pair = make_float2(__uint_as_float(word_at(row.bytes + 2 * start)), __uint_as_float(word_at(row.bytes + 2 * start + 4)));
  else pair = unpack_pair<SOURCE>(word_at(row.bytes + start));
  const u32 word = pack_pair<TARGET>(pair.x, pair.y);
  if (TARGET == F16) too_large |= becomes_infinite(pair.x, word) || becomes_infinite(pair.y, word >> 16);
  return word;
}
#else
DEVICE u32 word_of(Row row, int start, bool &) { return row.present ? word_at(row.bytes + start) : 0; }
#endif

// A field of the sixteen rows: [words][row half][8 g] of its words of 4 bytes, or [8 g][row half] of its 1 or 2 bytes. `rows` points to the
// unit in a row that begins at 0.
template <int FIRST, int BYTES, int WORD> DEVICE void write_field(u8 *record, const u8 *rows, const int *places, int lane) {
  for (int i = lane; i < 16 * BYTES / WORD; i += 32) {
    const int row = WORD == 4 ? i % 16 : i / 2 + i % 2 * 8, place = places[row];
    const u8 *from = rows + place + FIRST + (WORD == 4 ? i / 16 * 4 : 0);
    if constexpr (WORD == 4) ((u32 *)record)[i] = place < 0 ? 0 : word_at(from);
    else if constexpr (WORD == 2) ((u16 *)record)[i] = place < 0 ? 0 : *(const u16 *)from;
    else record[i] = place < 0 ? 0 : *from;
  }
}
