// What the headers of formats of sixteen float32 numbers share: bitsandbytes' (FLOAT_TABLE, if a format is one: the numbers). File: { float
// scale; uint8 q[32] }, the low nibble of a byte first. A lane's word is eight columns, 8t to 8t + 7.
//
// A weight is high + low, two float16 in a word (table_weights.cuh). Lane i holds those of number i % 16, so that a look-up is a shuffle, of which a
// multiprocessor does one a cycle: shared memory would have conflicts of banks, and bytes by prmt take three times the instructions.
#pragma once
#include "step_weights.cuh"

#ifdef FLOAT_TABLE
#define QUANTIZED 1
#define FLOAT_QUANTS 1
#define TABLE_EXPONENT 8  // numbers are multiplied by 2^8 before they are split, so that what is low is no subnormal float16

constexpr int BLOCK = 64, FILE_BLOCK_BYTES = 36, CHUNKS = 1;
constexpr int STEPS_AHEAD = 4;  // 1.1 KiB a warp; more would spill
typedef uint4 Chunk;
DEVICE constexpr int last_step(int) { return 1; }
DEVICE constexpr int file_chunk(int) { return HEAD_BYTES; }

DEVICE float table_number(u32 i) {  // by choices, bit by bit: an array would be in memory
  float choices[16] = FLOAT_TABLE;
#pragma unroll
  for (int bit = 0; bit < 4; bit++) {
#pragma unroll
    for (int n = 0; n < 8; n++) choices[n] = i >> bit & 1 ? choices[2 * n + 1 & 15] : choices[2 * n & 15];
  }
  return choices[0];
}
DEVICE u32 high_and_low(float number) {
  const u32 high = pack_f16(number, 0.0f);
  return high | pack_f16(0.0f, number - unpack_f16(high).x);
}

// The operands of 16 columns: four numbers of each row.
DEVICE void look_up_half(u32 (&high)[4], u32 (&low)[4], const TableStep &w, int half) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 four = (i % 2 ? w.words.y : w.words.x) >> 16 * half + 8 * (i / 2);
    const u32 first = __shfl_sync(ALL_LANES, w.entry, four, 16), second = __shfl_sync(ALL_LANES, w.entry, four >> 4, 16);
    high[i] = __byte_perm(first, second, 0x5410), low[i] = __byte_perm(first, second, 0x7632);
  }
}
template <class Chunks, class Record> DEVICE void unpack_step(TableStep &w, const Chunks &chunk, const Record &record, int step, int) {
  w.entry = high_and_low(table_number(threadIdx.x) * (float)(1 << TABLE_EXPONENT));
  w.words = slice_of(chunk[0], step);
  w.scale = row_scales(record);
}

template <class Chunks> DEVICE float4 four_values(const Chunks &chunk, bool upper, int column) {
  const uint2 slice = slice_of(chunk[0], column % BLOCK / 32);
  const u32 word = (upper ? slice.y : slice.x) >> column % 8 * 4;
  return make_float4(table_number(word), table_number(word >> 4), table_number(word >> 8), table_number(word >> 12));
}
#endif
