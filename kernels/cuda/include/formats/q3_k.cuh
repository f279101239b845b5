// Q3_K: weight = d * (scale - 32) * (q - 4), scales of 16 weights each. File: { uint8 high[32], low[64], scales[12]; half d }: weights 128 h
// to 128 h + 127 have two bits in low[32 h .. 32 h + 31], 32 for each shift 0, 2, 4, 6; bit i / 32 of high[i % 32] is the third bit of weight
// i. Scale s has its low nibble in byte s % 8, low nibbles first, and two high bits in byte 8 + s % 4 at shift 2 (s / 4). The first chunk is
// `high`.
#pragma once
#define QUANTIZED 1
#define PART 16

constexpr int BLOCK = 256, FILE_BLOCK_BYTES = 110, CHUNKS = 3, WORDS = 7, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 16;  // 3 KiB a warp
typedef uint4 Chunk;
typedef u32 RecordWord;
DEVICE constexpr int last_step(int chunk) { return chunk == 1 ? 3 : 7; }
DEVICE constexpr int file_chunk(int i) { return 32 * i; }
DEVICE constexpr int file_word(int i) { return i < 6 ? 96 + i / 2 * 4 : 108; }
DEVICE constexpr int file_word_bytes(int i) { return i < 6 ? 4 : 2; }

// Four scales, of parts 4 (s / 2) to 4 (s / 2) + 3, of a row: a byte each.
DEVICE u32 four_scales(u32 nibbles, u32 high, int step) {
  return (nibbles >> step / 4 * 4 & 0x0F0F0F0Fu) | (moved_bits(high, step / 2 * 2, 4) & 0x30303030u);
}
template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int step, int) {
  set_bits(w.a, chunk[1 + step / 4], step % 4 * 2, 0x03030303u);
  add_bits(w.a, chunk[0], step, 2, 0x04040404u);
  subtract_zero(w.a, 4);
  const int word = step % 4 / 2 * 2;
  const u32 first = four_scales(record[word], record[4], step), second = four_scales(record[word + 1], record[5], step);
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const int i = step % 2 * 2 + part;
    w.scale[part] = times(unpack_f16(record[6]), byte_float(first, i, 32), byte_float(second, i, 32));
  }
}
