// Q4_1: weight = scale * q + offset. File: { half scale, offset; uint8 q[16] } (nibble_blocks.cuh).
#pragma once
#define QUANTIZED 1
#define MINIMUMS 1
#define NIBBLES_AT 4
#define RECORD_HALVES 2

constexpr int WORDS = 2, ZERO_POINT = 0;

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int) {
  set_nibbles(w.a, chunk[0]);
  w.scale[0] = unpack_f16(record[0]);
  w.minimum = negated(unpack_f16(record[1]));
}
