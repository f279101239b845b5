// tiles = rows of a file in the layout of matrix instructions, sixteen rows at a time (tinyvllm/quant/layouts/tiles.py defines it).
//
//   tiles  uint8                     the whole matrix; `count` sixteens of rows from `first` on are written
//   beyond [1] int32                 only with CONVERTS: becomes 1 if a finite number is beyond TARGET, else is not written
//   rows   uint8                     bytes that hold these rows; each row begins at an even one
//   table  [4 + 16 * count] int32    first; count; sixteens of the whole matrix; units of a row; then of each row the byte of `rows` at which
//                                    it begins, negative for a row of zeros
//
// A row is units of UNIT bytes: a block of a packed format, or a tile's 32 bytes of floats. Of a unit the QUANT_BYTES from byte QUANTS on go
// into the tiles; FIELDS lists its other parts, FIELD(first byte, bytes), both even, in their order after the tiles. Bytes are moved and not
// interpreted: the constants are the format, and tinyvllm/quant/layouts derives them.
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
constexpr int SLICES = QUANT_BYTES / 16;  // of a row in a tile; four lanes hold a slice

struct Row {
  const u8 *bytes;  // the unit's
  bool present;
};

DEVICE u32 word_of(Row row, int start, bool &too_large);
DEVICE bool write_tile(u8 *tile, Row low, Row high, int lane);
template <int BYTES> DEVICE void write_field(u8 *to, const u8 *rows, const int *places, int lane);

extern "C" __global__ void __launch_bounds__(32 * WARPS) pack_tiles(u8 *tiles, BEYOND_ARGUMENT const u8 *rows, const int *table) {
  const u32 first = table[0], count = table[1], sixteens = table[2], units = table[3], lane = threadIdx.x % 32;
  for (u32 work = blockIdx.x * WARPS + threadIdx.x / 32; work < count * units; work += gridDim.x * WARPS) {
    const u32 sixteen = work / units, unit = work % units;
    const int *places = table + 4 + 16 * sixteen;
    const s64 start = (s64)unit * UNIT, block = (s64)(first + sixteen) * units + unit;
    const int low = places[lane / 4], high = places[lane / 4 + 8];
    const Row first_row = {rows + low + start, low >= 0}, second_row = {rows + high + start, high >= 0};
    const bool too_large = write_tile(tiles + block * (16 * QUANT_BYTES), first_row, second_row, lane);
#if CONVERTS
    if (too_large) atomicOr(beyond, 1);
#else
    (void)too_large;
#endif
    u8 *others = tiles + (s64)sixteens * units * (16 * QUANT_BYTES);
#define FIELD(at, bytes)                                                                    \
  write_field<(bytes)>(others + block * (16 * (bytes)), rows + start + (at), places, lane); \
  others += (s64)sixteens * units * (16 * (bytes));
    FIELDS
#undef FIELD
  }
}

// A lane holds of each slice the word lane % 4 of row lane / 4 (low), then of the row eight further (high). Whether a number is too large.
DEVICE bool write_tile(u8 *tile, Row low, Row high, int lane) {
  u32 words[2 * SLICES];
  bool too_large = false;
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++) {
    const int start = QUANTS + 16 * slice + 4 * (lane % 4);
    words[2 * slice] = word_of(low, start, too_large), words[2 * slice + 1] = word_of(high, start, too_large);
  }
  if constexpr (SLICES % 2 == 0) {
#pragma unroll
    for (int i = 0; i < SLICES / 2; i++)
      ((uint4 *)tile)[lane * (SLICES / 2) + i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < SLICES; i++) ((uint2 *)tile)[lane * SLICES + i] = make_uint2(words[2 * i], words[2 * i + 1]);
  }
  return too_large;
}

// Rows of blocks begin at any even byte: a word there is two loads.
DEVICE u32 word_at(const u8 *p) { return (u64)p % 4 == 0 ? *(const u32 *)p : ((const u16 *)p)[0] | (u32)((const u16 *)p)[1] << 16; }

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

// A field of row 0, row 8, row 1, row 9 and so on; `rows` points to it in a row that begins at 0.
template <int BYTES> DEVICE void write_field(u8 *to, const u8 *rows, const int *places, int lane) {
  for (int i = lane; i < 8 * BYTES; i += 32) {
    const int row = i / (BYTES / 2), place = places[row / 2 + row % 2 * 8];
    ((u16 *)to)[i] = place < 0 ? 0 : ((const u16 *)(rows + place))[i % (BYTES / 2)];
  }
}
