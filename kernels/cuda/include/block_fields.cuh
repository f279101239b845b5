// Where a block has the fields of formats whose blocks are of one of these kinds (weights.cuh): HEAD_BYTES, RUNS_AT, RECORD_HALVES.
#pragma once
#include "step_weights.cuh"

#ifdef HEAD_BYTES
#if HEAD_BYTES == 4
constexpr int WORDS = 2;
typedef u32 RecordWord;
template <class Record> DEVICE float2 row_scales(const Record &record) { return record_floats(record, 0); }
#else
constexpr int WORDS = 1;  // a byte of each row
typedef u16 RecordWord;
#endif
DEVICE constexpr int file_word(int) { return 0; }
DEVICE constexpr int file_word_bytes(int) { return HEAD_BYTES; }
#endif

#ifdef RECORD_HALVES
typedef u32 RecordWord;
DEVICE constexpr int file_word(int i) { return i < RECORD_HALVES ? 2 * i : 2 * RECORD_HALVES + (i - RECORD_HALVES) / 2 * 4; }
DEVICE constexpr int file_word_bytes(int i) { return i < RECORD_HALVES ? 2 : 4; }
#endif
