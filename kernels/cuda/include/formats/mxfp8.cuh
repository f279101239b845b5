// MXFP8 (OCP Microscaling Formats 1.0): weight = 2^(e - 127) * e4m3, NaN where e is 255. File: { uint8 e, q[32] }. The record is two bytes: the
// exponents of both rows.
#pragma once
#define E4M3_QUANTS 1
#define HEAD_BYTES 1

constexpr int BLOCK = 32;

DEVICE float e8m0_to_float(u32 e) { return __uint_as_float(e == 255 ? 0x7FC00000u : e == 0 ? 0x400000u : e << 23); }

template <class Record> DEVICE float2 row_scales(const Record &record) {
  return make_float2(e8m0_to_float(record[0] & 255), e8m0_to_float(record[0] >> 8));
}
