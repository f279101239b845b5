// Q5_0: weight = scale * (q - 16). File: { half scale; uint32 high; uint8 q[16] }, q as for Q4_0, bit i of `high` is the fifth bit of element
// i. `high` is part of the record: scale of both rows, high of row g, of row g + 8.
#pragma once
#define QUANTIZED 1

constexpr int BLOCK = 32, FILE_BLOCK_BYTES = 22, CHUNKS = 1, WORDS = 3, ZERO_POINT = 16;
constexpr int STEPS_AHEAD = 16;  // 4 KiB a warp
typedef uint2 Chunk;
typedef u32 RecordWord;
DEVICE constexpr int last_step(int) { return 0; }
DEVICE constexpr int file_chunk(int) { return 6; }
DEVICE constexpr int file_word(int i) { return i == 0 ? 0 : 2; }
DEVICE constexpr int file_word_bytes(int i) { return i == 0 ? 2 : 4; }

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int t) {
  set_nibbles(w.a, chunk[0]);
  add_fifth_bits(w.a, record[1], record[2], t);
  w.scale[0] = unpack_f16(record[0]);
}
