// Q2_K: weight = d * scale * q - dmin * minimum, scales and minimums of 16 weights each. File: { uint8 scales[16], q[64]; half d, dmin }:
// scales are low nibbles, minimums high ones; weights 128 h to 128 h + 127 are two bits each of q[32 h .. 32 h + 31], 32 for each shift
// 0, 2, 4, 6.
//
// scale * q is at most 45: it is multiplied before the dot, four weights at a time, so that a step needs one dot and one conversion.
#pragma once
#define QUANTIZED 1
#define PART 16
#define SCALED_QUANTS 1
#define MINIMUMS 1
#define RUNS_AT 16

constexpr int BLOCK = 256, FILE_BLOCK_BYTES = 84, CHUNKS = 2, WORDS = 10, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 16;  // 2 KiB a warp
typedef u32 RecordWord;
DEVICE constexpr int file_word(int i) { return i < 8 ? i / 2 * 4 : 80 + (i - 8) * 2; }
DEVICE constexpr int file_word_bytes(int i) { return i < 8 ? 4 : 2; }

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int step, int) {
  set_bits(w.a, chunk[step / 4], step % 4 * 2, 0x03030303u);
#pragma unroll
  for (int row = 0; row < 2; row++) {
    const u32 bytes = record[step / 2 * 2 + row] >> step % 2 * 16;
    w.a[row] *= bytes & 15, w.a[row + 2] *= bytes >> 8 & 15;
    w.minimums[row] = bytes >> 4 & 0x0F0Fu;
  }
  w.scale[0] = unpack_f16(record[8]);
  w.minimum = unpack_f16(record[9]);
}
