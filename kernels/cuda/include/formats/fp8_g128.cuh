// FP8_G128: weight = scale * e4m3. File: { float scale; uint8 q[128] }.
#pragma once
#define E4M3_QUANTS 1

constexpr int BLOCK = 128, HEAD_BYTES = 4, WORDS = 2;
typedef u32 RecordWord;
DEVICE constexpr int file_word(int) { return 0; }
DEVICE constexpr int file_word_bytes(int) { return 4; }

template <class Record> DEVICE float2 row_scales(const Record &record) {
  return make_float2(__uint_as_float(record[0]), __uint_as_float(record[1]));
}
