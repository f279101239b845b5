// Q4_K: weight = d * scale * q - dmin * minimum, scales and minimums of 32 weights each (step_weights.cuh). File: { half d, dmin; uint8
// scales[12], q[128] }: of 32 bytes of q the low nibbles are one part of 32, the high nibbles the next.
#pragma once
#define QUANTIZED 1
#define MINIMUMS 1
#define RECORD_HALVES 2
#define RUNS_AT 16

constexpr int BLOCK = 256, FILE_BLOCK_BYTES = 144, CHUNKS = 4, WORDS = 8, ZERO_POINT = 0;
constexpr int STEPS_AHEAD = 16;  // 4 KiB a warp

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int step, int) {
  set_bits(w.a, chunk[step / 2], step % 2 * 4, 0x0F0F0F0Fu);
  set_six_bit_pairs(w, record, step);
}
