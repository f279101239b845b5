// Q8_0: weight = scale * q. File: { half scale; int8 q[32] }.
#pragma once
#define QUANTIZED 1
#define RECORD_HALVES 1
#define RUNS_AT 2

constexpr int BLOCK = 32, FILE_BLOCK_BYTES = 34, CHUNKS = 1, WORDS = 1, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 8;  // 4 KiB a warp. Sixteen left the dots too few registers (spills).

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int, int) {
  const uint4 words = chunk[0];
  w.a[0] = words.x, w.a[1] = words.y, w.a[2] = words.z, w.a[3] = words.w;
  w.scale[0] = unpack_f16(record[0]);
}
