// IQ4_NL: weight = scale * value[q]. File: { half scale; uint8 q[16] } (nibble_blocks.cuh).
#pragma once
#define QUANTIZED 1
#define NIBBLES_AT 2
#define RECORD_HALVES 1

constexpr int WORDS = 1, ZERO_POINT = 0;

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int) {
  constexpr u8 bytes[16] = IQ4_VALUES;
  constexpr SignedValues values = signed_values(bytes, 128);
  look_up_nibbles(w.a, chunk[0], values);
  w.scale[0] = unpack_f16(record[0]);
}
