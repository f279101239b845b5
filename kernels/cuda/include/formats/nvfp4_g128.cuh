// NVFP4_G128: weight = scale * e4m3 scale of 16 weights * value[q], values twice those of e2m1. File: { float scale; uint8 scales[8], q[64] }: of
// each 16 bytes of q the low nibbles are 16 weights and the high nibbles the next.
#pragma once
#define QUANTIZED 1
#define PART 16
#define RUNS_AT 12

constexpr int BLOCK = 128, FILE_BLOCK_BYTES = 76, CHUNKS = 2, WORDS = 6, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 16;  // 4 KiB a warp
typedef u32 RecordWord;
DEVICE constexpr int file_word(int i) { return i / 2 * 4; }
DEVICE constexpr int file_word_bytes(int) { return 4; }

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int step, int) {
  constexpr u8 bytes[16] = FP4_VALUES;
  constexpr SignedValues values = signed_values(bytes, 12);
  look_up_nibbles(w.a, slice_of(chunk[step / 2], step), values);
  const float2 scales = record_floats(record, 0);
  const int word = 2 + step / 2 * 2, at = step % 2 * 16;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const int from = at + 8 * part;
    w.scale[part] = times(scales, e4m3_to_float(record[word] >> from), e4m3_to_float(record[word + 1] >> from));
  }
}
