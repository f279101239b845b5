// Q5_0: weight = scale * (q - 16). File: { half scale; uint32 high; uint8 q[16] } (nibble_blocks.cuh), bit i of `high` is the fifth bit of
// element i. `high` is part of the record: scale of both rows, high of row g, of row g + 8.
#pragma once
#define QUANTIZED 1
#define NIBBLES_AT 6
#define RECORD_HALVES 1

constexpr int WORDS = 3, ZERO_POINT = 16;

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int t) {
  set_nibbles(w.a, chunk[0]);
  add_fifth_bits(w.a, record[1], record[2], t);
  w.scale[0] = unpack_f16(record[0]);
}
