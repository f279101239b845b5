// What a format's header makes of its packed weights: a lane's numbers of a step, sixteen rows by 32 columns, and how headers take them out of
// words. Rows are g and g + 8 of the lane, x and y of a pair.
#pragma once
#include "formats.cuh"

struct StepWeights {
  u32 a[4];         // A operand of an int8 mma: the integers; a[0], a[1] columns 0 to 15 of both rows, a[2], a[3] columns 16 to 31
  float2 scale[2];  // weight = scale * (integer - ZERO_POINT) - minimum; scale[1]: of columns 16 to 31, where PART is 16
  float2 minimum;   // if MINIMUMS
  u32 minimums[2];  // if SCALED_QUANTS: what `minimum` is multiplied by, a byte for each half of the columns, of row g and of row g + 8
};

struct FloatStep {
  u32 a[2][4];   // A operands of two mma of k16: bfloat16
  float2 scale;  // weight = scale * number
};
struct TableStep {
  uint2 words;   // eight indices of each row
  u32 entry;     // the lane's of the table
  float2 scale;  // weight = scale * number
};

// The bytes of a word turned right, so that bit `from` of each byte becomes bit `to`; other bits of the result are masked by the caller.
DEVICE u32 moved_bits(u32 word, int from, int to) { return __funnelshift_r(word, word, from - to); }

// Integers of `mask` (in each byte) from bit `from` of the bytes of a chunk on, whose words are in the order of the operand.
DEVICE void set_bits(u32 (&a)[4], uint4 chunk, int from, u32 mask) {
  a[0] = chunk.x >> from & mask, a[1] = chunk.y >> from & mask, a[2] = chunk.z >> from & mask, a[3] = chunk.w >> from & mask;
}
// Adds the bits of `mask`, which begin at bit `to`, taken from bit `from` on.
DEVICE void add_bits(u32 (&a)[4], uint4 chunk, int from, int to, u32 mask) {
  a[0] |= moved_bits(chunk.x, from, to) & mask, a[1] |= moved_bits(chunk.y, from, to) & mask;
  a[2] |= moved_bits(chunk.z, from, to) & mask, a[3] |= moved_bits(chunk.w, from, to) & mask;
}

// Subtracts `zero` from every integer, so that no zero point is left: for formats with dots of 16 columns, of which x has no sums.
DEVICE void subtract_zero(u32 (&a)[4], int zero) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = ((a[i] | 0x80808080u) - zero * 0x01010101u) ^ 0x80808080u;
}

// A chunk is two slices of 16 bytes of a row, or one.
template <bool WHOLE> struct ChunkOf {
  typedef uint4 type;
};
template <> struct ChunkOf<false> {
  typedef uint2 type;
};
DEVICE uint2 slice_of(uint4 chunk, int i) { return i % 2 ? make_uint2(chunk.z, chunk.w) : make_uint2(chunk.x, chunk.y); }
DEVICE uint2 slice_of(uint2 chunk, int) { return chunk; }

// Four bits each, of bytes 4t..4t+3 of a slice of both rows: low nibbles are columns 0 to 15, high nibbles 16 to 31.
DEVICE void set_nibbles(u32 (&a)[4], uint2 slice) {
  const u32 low = 0x0F0F0F0Fu;
  a[0] = slice.x & low, a[1] = slice.y & low, a[2] = slice.x >> 4 & low, a[3] = slice.y >> 4 & low;
}

// Adds bit i of `first` (row g) and `second` (row g + 8) as bit 4 of column i.
DEVICE u32 fifth_bits(u32 bits, int from) { return ((bits >> from & 15) * 0x00204081u & 0x01010101u) << 4; }
DEVICE void add_fifth_bits(u32 (&a)[4], u32 first, u32 second, int t) {
  a[0] |= fifth_bits(first, 4 * t), a[1] |= fifth_bits(second, 4 * t);
  a[2] |= fifth_bits(first, 4 * t + 16), a[3] |= fifth_bits(second, 4 * t + 16);
}

struct SignedValues {  // sixteen signed bytes
  u32 words[4];
};
DEVICE constexpr SignedValues signed_values(const u8 (&bytes)[16], int zero) {  // of unsigned bytes with a zero point
  SignedValues values = {};
  for (int i = 0; i < 16; i++) values.words[i / 4] |= (u32)((bytes[i] - zero) & 255) << i % 4 * 8;
  return values;
}
// The values of the eight nibbles of a word: of the low nibbles, of the high nibbles.
DEVICE uint2 looked_up(u32 word, const SignedValues &values) {
  const u32 index = word & 0x77777777u, upper = (word & 0x88888888u) >> 1 | 0x32103210u;  // within half of the values; which half
  u32 found[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 first = __byte_perm(values.words[0], values.words[1], index >> 16 * i);
    const u32 second = __byte_perm(values.words[2], values.words[3], index >> 16 * i);
    found[i] = __byte_perm(first, second, upper >> 16 * i);
  }
  return make_uint2(__byte_perm(found[0], found[1], 0x6420), __byte_perm(found[0], found[1], 0x7531));
}
DEVICE void look_up_nibbles(u32 (&a)[4], uint2 slice, const SignedValues &values) {
  const uint2 first = looked_up(slice.x, values), second = looked_up(slice.y, values);
  a[0] = first.x, a[1] = second.x, a[2] = first.y, a[3] = second.y;
}

// Byte `i` of a word minus `zero`, as float32 without a conversion, of which a GPU does fewer per cycle than additions.
DEVICE float byte_float(u32 word, int i, int zero) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7650 + i)) - (8388608.0f + (float)zero);
}
// Words `i` and i + 1 of the record, which are a float32 of each row.
template <class Record> DEVICE float2 record_floats(const Record &record, int i) {
  return make_float2(__uint_as_float(record[i]), __uint_as_float(record[i + 1]));
}
DEVICE float2 times(float2 pair, float x, float y) { return make_float2(pair.x * x, pair.y * y); }
DEVICE float2 negated(float2 pair) { return make_float2(-pair.x, -pair.y); }

// Scales and minimums of Q4_K and Q5_K, eight of six bits each in twelve bytes. The record: half d, dmin of both rows; of the bytes the words
// of both rows. Bytes 0 to 3: scales 0 to 3; bytes 4 to 7: minimums 0 to 3; bytes 8 to 11: low nibbles of scales 4 to 7 and of minimums 4 to
// 7, whose other two bits are the highest of bytes 0 to 7.
DEVICE u32 six_bits(u32 low, u32 nibbles, int step) {
  return step < 4 ? low & 0x3F3F3F3Fu : (nibbles & 0x0F0F0F0Fu) | (low >> 2 & 0x30303030u);
}
template <class Record> DEVICE void set_six_bit_pairs(StepWeights &w, const Record &record, int step) {
  const u32 scales[2] = {six_bits(record[2], record[6], step), six_bits(record[3], record[7], step)};
  const u32 minimums[2] = {six_bits(record[4], record[6] >> 4, step), six_bits(record[5], record[7] >> 4, step)};
  const int i = step % 4;
  w.scale[0] = times(unpack_f16(record[0]), byte_float(scales[0], i, 0), byte_float(scales[1], i, 0));
  w.minimum = times(unpack_f16(record[1]), byte_float(minimums[0], i, 0), byte_float(minimums[1], i, 0));
}
