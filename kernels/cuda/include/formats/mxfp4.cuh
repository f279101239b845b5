// MXFP4 (OCP Microscaling, 2023): weight = 2^(exponent - 128) * value[q], values twice those of e2m1. File: { uint8 exponent, q[16] }, q as
// for Q4_0. The record is two bytes: the exponents of both rows.
#pragma once
#define QUANTIZED 1
#define NIBBLES_AT 1
#define HEAD_BYTES 1

constexpr int ZERO_POINT = 0;

DEVICE float power(u32 exponent) { return __uint_as_float(exponent < 2 ? exponent + 1 << 21 : exponent - 1 << 23); }  // below 2: subnormal

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int) {
  constexpr u8 bytes[16] = FP4_VALUES;
  constexpr SignedValues values = signed_values(bytes, 12);
  look_up_nibbles(w.a, chunk[0], values);
  w.scale[0] = make_float2(power(record[0] & 255), power(record[0] >> 8));
}
