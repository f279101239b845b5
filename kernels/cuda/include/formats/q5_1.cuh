// Q5_1: weight = scale * q + offset. File: { half scale, offset; uint32 high; uint8 q[16] }, q and `high` as for Q5_0.
#pragma once
#define QUANTIZED 1
#define MINIMUMS 1

constexpr int BLOCK = 32, FILE_BLOCK_BYTES = 24, CHUNKS = 1, WORDS = 4, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 16;  // 4 KiB a warp
typedef uint2 Chunk;
typedef u32 RecordWord;
DEVICE constexpr int last_step(int) { return 0; }
DEVICE constexpr int file_chunk(int) { return 8; }
DEVICE constexpr int file_word(int i) { return i < 2 ? 2 * i : 4; }
DEVICE constexpr int file_word_bytes(int i) { return i < 2 ? 2 : 4; }

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int t) {
  set_nibbles(w.a, chunk[0]);
  add_fifth_bits(w.a, record[2], record[3], t);
  w.scale[0] = unpack_f16(record[0]);
  w.minimum = negated(unpack_f16(record[1]));
}
