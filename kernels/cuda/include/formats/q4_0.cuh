// Q4_0: weight = scale * (q - 8). File: { half scale; uint8 q[16] }, low nibbles are elements 0 to 15, high nibbles 16 to 31.
#pragma once
#define QUANTIZED 1

constexpr int BLOCK = 32, FILE_BLOCK_BYTES = 18, CHUNKS = 1, WORDS = 1, ZERO_POINT = 8;
constexpr int STEPS_AHEAD = 16;  // 4 KiB a warp
typedef uint2 Chunk;
typedef u32 RecordWord;
DEVICE constexpr int last_step(int) { return 0; }
DEVICE constexpr int file_chunk(int) { return 2; }
DEVICE constexpr int file_word(int) { return 0; }
DEVICE constexpr int file_word_bytes(int) { return 2; }

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int) {
  set_nibbles(w.a, chunk[0]);  // 0 to 15 are the same numbers with and without a sign
  w.scale[0] = unpack_f16(record[0]);
}
