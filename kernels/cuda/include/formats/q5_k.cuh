// Q5_K: Q4_K with a fifth bit: bit p of byte i of `high` belongs to element i of part p. File: { half d, dmin; uint8 scales[12], high[32],
// q[128] }. The first chunk is `high`.
#pragma once
#define QUANTIZED 1
#define MINIMUMS 1
#define RECORD_HALVES 2

constexpr int BLOCK = 256, FILE_BLOCK_BYTES = 176, CHUNKS = 5, WORDS = 8, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 8;  // 2.5 KiB a warp
typedef uint4 Chunk;
DEVICE constexpr int last_step(int chunk) { return chunk == 0 ? 7 : 2 * chunk - 1; }
DEVICE constexpr int file_chunk(int i) { return 16 + 32 * i; }

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int step, int) {
  set_bits(w.a, chunk[1 + step / 2], step % 2 * 4, 0x0F0F0F0Fu);
  add_bits(w.a, chunk[0], step, 4, 0x10101010u);
  set_six_bit_pairs(w, record, step);
}
