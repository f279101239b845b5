// Q4_1: weight = scale * q + offset. File: { half scale, offset; uint8 q[16] }, q as for Q4_0.
#pragma once
#define QUANTIZED 1
#define MINIMUMS 1

constexpr int BLOCK = 32, FILE_BLOCK_BYTES = 20, CHUNKS = 1, WORDS = 2, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 16;  // 4 KiB a warp
typedef uint2 Chunk;
typedef u32 RecordWord;
DEVICE constexpr int last_step(int) { return 0; }
DEVICE constexpr int file_chunk(int) { return 4; }
DEVICE constexpr int file_word(int i) { return 2 * i; }
DEVICE constexpr int file_word_bytes(int) { return 2; }

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int) {
  set_nibbles(w.a, chunk[0]);
  w.scale[0] = unpack_f16(record[0]);
  w.minimum = negated(unpack_f16(record[1]));
}
