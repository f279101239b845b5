// INTb_Gg: weight = scale * q + offset, unsigned integers of BITS bits, GROUP of them with one scale and one offset. File: { float scale,
// offset; uint8 high[], low[] }. Of every 32 weights, `low` has the lowest 2, 4 or 8 bits and `high` the rest, one or two. What a byte holds is
// 32 / (numbers in a byte) weights apart, the lowest bit first.
//
// Fours and eights of `low` are chunks, as those of Q4_0 and Q8_0. Planes of one and two bits are part of the record: of 32 weights they have
// one and two words a row, of which four and two lanes read each. The record: scale, offset, words of `high`, words of `low`, of row g and of
// row g + 8 in turn.
#pragma once
#define QUANTIZED 1
#define MINIMUMS 1
#define BITS (WEIGHT / 1000)
#define GROUP (WEIGHT % 1000)

constexpr int LOW = BITS >= 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH = BITS - LOW;  // bits of each plane
constexpr int PARTS_OF_GROUP = GROUP / 32;                                 // of 32 weights
constexpr int PLANE_WORDS = HIGH + (LOW == 2 ? 2 : 0);                     // words of 32 weights of a row in the record
constexpr int BLOCK = GROUP, FILE_BLOCK_BYTES = 8 + GROUP / 8 * BITS;
constexpr bool WHOLE_CHUNKS = LOW == 8 || PARTS_OF_GROUP > 1;  // of 16 bytes a lane: a part of eights, or two of fours
constexpr int CHUNKS = LOW == 2 ? 0 : LOW == 8 ? PARTS_OF_GROUP : (PARTS_OF_GROUP + 1) / 2;
constexpr int WORDS = 4 + 2 * PLANE_WORDS * PARTS_OF_GROUP;
constexpr int ZERO_POINT = LOW == 8 ? -128 : 0;                                           // the bytes of mma are signed: q - 128
constexpr int STEPS_AHEAD = LOW == 8 && GROUP == 32 ? 4 : LOW == 8 || HIGH > 0 ? 8 : 16;  // 2.5 to 5 KiB a warp; more would spill
typedef ChunkOf<WHOLE_CHUNKS>::type Chunk;
typedef u32 RecordWord;
DEVICE constexpr int last_step(int chunk) { return LOW == 8 ? chunk : PARTS_OF_GROUP > 1 ? 2 * chunk + 1 : 0; }
DEVICE constexpr int file_chunk(int i) { return 8 + GROUP / 8 * HIGH + 32 * i; }
DEVICE constexpr int file_word(int i) { return i / 2 * 4; }
DEVICE constexpr int file_word_bytes(int) { return 4; }

// Two bits each of 32 weights from word `at` of the record on: the word of this lane, moved so that its first number is in bit 0 of each byte
// and the one 16 weights further in bit 4.
template <class Record> DEVICE u32 two_bits(const Record &record, int at, int t) {
  return (t % 2 ? record[at + 2] : record[at]) >> t / 2 * 2;
}

template <class Chunks, class Record> DEVICE void unpack_step(StepWeights &w, const Chunks &chunk, const Record &record, int step, int t) {
  w.scale[0] = record_floats(record, 0);
  w.minimum = negated(record_floats(record, 2));
  if constexpr (LOW == 8) {
    set_bits(w.a, chunk[step], 0, 0xFFFFFFFFu);
#pragma unroll
    for (int i = 0; i < 4; i++) w.a[i] ^= 0x80808080u;
  } else if constexpr (LOW == 4) {
    set_nibbles(w.a, slice_of(chunk[step / 2], step));
  } else {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const u32 twos = two_bits(record, 4 + 2 * (HIGH * PARTS_OF_GROUP + 2 * step) + row, t);
      w.a[row] = twos & 0x03030303u, w.a[row + 2] = twos >> 4 & 0x03030303u;
    }
  }
#pragma unroll
  for (int row = 0; row < 2; row++) {
    if constexpr (HIGH == 1) {
      const u32 ones = record[4 + 2 * step + row] >> t;
      w.a[row] |= (ones & 0x01010101u) << LOW, w.a[row + 2] |= (ones >> 4 & 0x01010101u) << LOW;
    }
    if constexpr (HIGH == 2) {
      const u32 twos = two_bits(record, 4 + 4 * step + row, t);
      w.a[row] |= (twos & 0x03030303u) << LOW, w.a[row + 2] |= (twos >> 4 & 0x03030303u) << LOW;
    }
  }
}
