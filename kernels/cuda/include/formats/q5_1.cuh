// Q5_1: weight = scale * q + offset. File: { half scale, offset; uint32 high; uint8 q[16] } (nibble_blocks.cuh), `high` as for Q5_0.
#pragma once
#define QUANTIZED 1
#define MINIMUMS 1
#define NIBBLES_AT 8
#define RECORD_HALVES 2

constexpr int WORDS = 4, ZERO_POINT = 0;

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int t) {
  set_nibbles(w.a, chunk[0]);
  add_fifth_bits(w.a, record[2], record[3], t);
  w.scale[0] = unpack_f16(record[0]);
  w.minimum = negated(unpack_f16(record[1]));
}
