// Q4_0: weight = scale * (q - 8). File: { half scale; uint8 q[16] } (nibble_blocks.cuh).
#pragma once
#define QUANTIZED 1
#define NIBBLES_AT 2
#define RECORD_HALVES 1

constexpr int WORDS = 1, ZERO_POINT = 8;

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int) {
  set_nibbles(w.a, chunk[0]);  // 0 to 15 are the same numbers with and without a sign
  w.scale[0] = unpack_f16(record[0]);
}
