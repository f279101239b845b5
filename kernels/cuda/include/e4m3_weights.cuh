// What the headers of formats whose quants are e4m3 share. E4M3_QUANTS 1, if a format's are: they are the last bytes of a block,
// after its HEAD_BYTES.
#pragma once
#include "step_weights.cuh"

#ifdef E4M3_QUANTS
#define QUANTIZED 1
#define FLOAT_QUANTS 1
#define RUNS_AT HEAD_BYTES

constexpr int CHUNKS = BLOCK / 32, FILE_BLOCK_BYTES = BLOCK + HEAD_BYTES;
constexpr int STEPS_AHEAD = 4;  // 2 KiB a warp; more would spill

template <class Chunks, class Record> DEVICE void unpack_step(FloatStep &w, const Chunks &chunk, const Record &record, int step, int) {
  const uint4 words = chunk[step];
  e4m3_pairs(w.a[0][0], w.a[0][2], words.x), e4m3_pairs(w.a[0][1], w.a[0][3], words.y);
  e4m3_pairs(w.a[1][0], w.a[1][2], words.z), e4m3_pairs(w.a[1][1], w.a[1][3], words.w);
  w.scale = row_scales(record);
}

template <class Chunks> DEVICE float4 four_values(const Chunks &chunk, bool upper, int column) {
  const uint4 words = chunk[column % BLOCK / 32];
  const u32 first = upper ? words.y : words.x, second = upper ? words.w : words.z, word = column % 32 / 16 ? second : first;
  return make_float4(e4m3_to_float(word), e4m3_to_float(word >> 8), e4m3_to_float(word >> 16), e4m3_to_float(word >> 24));
}
#endif
