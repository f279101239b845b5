// Q6_K: weight = d * scale * (q - 32), scales of 16 weights each. File: { uint8 low[128], high[64]; int8 scales[16]; half d }. Weights 128 h
// to 128 h + 127 have their low nibbles in low[64 h .. 64 h + 63], 64 low nibbles first, and their two high bits in high[32 h .. 32 h + 31],
// 32 for each shift 0, 2, 4, 6. Chunks: four of `low`, two of `high`.
#pragma once
#define QUANTIZED 1
#define PART 16

constexpr int BLOCK = 256, FILE_BLOCK_BYTES = 210, CHUNKS = 6, WORDS = 9, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 8;  // 3 KiB a warp
typedef uint4 Chunk;
typedef u32 RecordWord;
DEVICE constexpr int last_step(int chunk) { return chunk < 4 ? chunk / 2 * 4 + chunk % 2 + 2 : (chunk - 4) * 4 + 3; }
DEVICE constexpr int file_chunk(int i) { return 32 * i; }
DEVICE constexpr int file_word(int i) { return i < 8 ? 192 + i / 2 * 4 : 208; }
DEVICE constexpr int file_word_bytes(int i) { return i < 8 ? 4 : 2; }

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int step, int) {
  const int half = step / 4, at = step % 4, word = step / 2 * 2;
  set_bits(w.a, chunk[2 * half + at % 2], at / 2 * 4, 0x0F0F0F0Fu);
  add_bits(w.a, chunk[4 + half], 2 * at, 4, 0x30303030u);
  subtract_zero(w.a, 32);
  const u32 first = record[word] ^ 0x80808080u, second = record[word + 1] ^ 0x80808080u;  // int8 plus 128
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const int i = step % 2 * 2 + part;
    w.scale[part] = times(unpack_f16(record[8]), byte_float(first, i, 128), byte_float(second, i, 128));
  }
}
