// IQ4_XS: weight = d * (scale - 32) * value[q], scales of 32 weights each. File: { half d; uint16 high; uint8 scales[4], q[128] }: scale p has
// its low four bits in nibble p of `scales`, two high bits in bits 2 p of `high`; q[16 p .. 16 p + 15] as for Q4_0.
#pragma once
#define QUANTIZED 1
#define RECORD_HALVES 2
#define RUNS_AT 8

constexpr int BLOCK = 256, FILE_BLOCK_BYTES = 136, CHUNKS = 4, WORDS = 4, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 16;  // 4 KiB a warp

DEVICE float part_scale(u32 low, u32 high, int step) { return (float)((int)((low >> 4 * step & 15) | (high >> 2 * step & 3) << 4) - 32); }

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int step, int) {
  constexpr u8 bytes[16] = IQ4_VALUES;
  constexpr SignedValues values = signed_values(bytes, 128);
  look_up_nibbles(w.a, slice_of(chunk[step / 2], step), values);
  w.scale[0] = times(unpack_f16(record[0]), part_scale(record[2], record[1], step), part_scale(record[3], record[1] >> 16, step));
}
