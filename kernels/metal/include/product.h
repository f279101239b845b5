// Products of float32 x with weights as they lie in files: what a lane holds of a row of weights, and the one order of arithmetic of the
// kernels for up to sixteen rows.
//
// Constants from outside: WEIGHT, the format, and I, the columns. A row of weights lies as in a file (tinyvllm/quant/formats.py), O rows
// behind each other, ROW_BYTES each; nothing is packed, so they are mapped without a copy. Base addresses: F32, F16, BF16 and Q4_K on a
// border of 4 bytes, Q8_0 and Q4_0 of 2; x on one of 16. I % 32 == 0; Q4_K: I % 256 == 0.
//
// A SIMD group takes a row of weights in STEPs of 32 lanes, in SUBS rounds each; in a round a lane meets eight columns, twice four in a row
// (column_of). A lane's share of a row does not depend on how many rows of x or of weights are computed together.
//
// The order, for one output: a lane goes through its columns, rounds ascending, and adds each with sum = fma(w, x, sum) in float32; then
// lanes are added in pairs 16, 8, 4, 2 and 1 apart. w is the weight's exact value (Q4_K: what a file's reader makes of it, scale * q exact
// and the minimum taken off with one rounding), and x is not rounded.
//
// Quants are masked where they lie, and neither shifted down nor converted: or-ed into the mantissa of half 1024.0, a nibble is 1024 + q
// or 1024 + 16 q, exactly, and a fma with the block's scale (or a sixteenth of it) takes the rest off, exactly, too: all of it has less
// than 24 bits. Bytes of Q8_0 likewise. Factors that undo where a nibble lies are those of llama.cpp's and MLX's Metal kernels, which
// have them on x; the trick with the mantissa is of FasterTransformer (Kim et al. 2022).
#pragma once
#include "gpu.h"

// --- quants as halves: the bits under `mask`, for numbers 0 and 2 of a word, above 1024.0

INLINE half2 raised(uint bits, uint mask) { return as_type<half2>((bits & mask) | 0x64006400u); }

// Bytes 0 .. 3 of a word, under a mask for bytes 0 and 2.
INLINE half4 four_raised(uint word, uint mask) {
  const half2 even = raised(word, mask), odd = raised(word >> 8, mask);
  return half4(even.x, odd.x, even.y, odd.y);
}
#define LOW_NIBBLES 0x000F000Fu
#define HIGH_NIBBLES 0x00F000F0u
#define BYTES 0x00FF00FFu

INLINE uint word_of(ushort low, ushort high) { return as_type<uint>(ushort2(low, high)); }

// (q - 8) * scale of the low or high nibbles of a word: fma(1024 + q, scale, -1032 scale), fma(1024 + 16 q, scale / 16, -72 scale).
INLINE float4 four_nibbles(uint word, bool high, float scale) {
  const half4 q = four_raised(word, high ? HIGH_NIBBLES : LOW_NIBBLES);
  return fma(float4(q), float4(high ? scale * 0.0625f : scale), float4(scale * (high ? -72.0f : -1032.0f)));
}
// q * scale - least of the low or high nibbles of a word.
INLINE float4 four_nibbles_above(uint word, bool high, float scale, float least) {
  const half4 q = four_raised(word, high ? HIGH_NIBBLES : LOW_NIBBLES) - half4(1024.0h);
  return fma(float4(q), float4(high ? scale * 0.0625f : scale), float4(-least));
}

// --- a lane's share of a STEP of a row as it comes from memory (Raw), and the first or second four weights of round `sub`

#if WEIGHT == F32
#define STEP 256
#define SUBS 1
#define ROW_BYTES (4 * (I))
struct Raw {
  float4 fours[2];
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const packed_float4 *at = (device const packed_float4 *)(row + (step * STEP + lane * 8) * 4);
  Raw raw;
  raw.fours[0] = float4(at[0]), raw.fours[1] = float4(at[1]);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int second) { return raw.fours[second]; }

#elif WEIGHT == F16 || WEIGHT == BF16
#define STEP 256
#define SUBS 1
#define ROW_BYTES (2 * (I))
struct Raw {
  uint4 words;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  Raw raw;
  raw.words = uint4(*(device const packed_uint4 *)(row + (step * STEP + lane * 8) * 2));
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int second) {
  const uint low = second ? raw.words.z : raw.words.x, high = second ? raw.words.w : raw.words.y;
#if WEIGHT == F16
  return float4(half4(as_type<half2>(low), as_type<half2>(high)));
#else
  return float4(bf16_pair_to_float(low), bf16_pair_to_float(high));
#endif
}

#elif WEIGHT == Q8_0 // a lane has a quarter of a block
#define STEP 256
#define SUBS 1
#define ROW_BYTES ((I) / 32 * 34)
struct Raw {
  uint words[2];
  half scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = row + (step * 8 + lane / 4) * 34;
  const ushort4 quants = ushort4(*(device const packed_ushort4 *)(block + 2 + lane % 4 * 8));
  Raw raw;
  raw.words[0] = word_of(quants.x, quants.y), raw.words[1] = word_of(quants.z, quants.w);
  raw.scale = *(device const half *)block;
  return raw;
}
// With its sign's bit turned, a byte is q + 128: fma(1152 + q, scale, -1152 scale).
INLINE float4 four_weights(thread const Raw &raw, int, int second) {
  const float scale = (float)raw.scale;
  return fma(float4(four_raised(raw.words[second] ^ 0x80808080u, BYTES)), float4(scale), float4(scale * -1152.0f));
}

#elif WEIGHT == Q4_0 // a lane has half the bytes of a block; in a round four of them, low halves first
#define STEP 512
#define SUBS 2
#define ROW_BYTES ((I) / 32 * 18)
struct Raw {
  uint words[2];
  half scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = row + (step * 16 + lane / 2) * 18;
  const ushort4 quants = ushort4(*(device const packed_ushort4 *)(block + 2 + lane % 2 * 8));
  Raw raw;
  raw.words[0] = word_of(quants.x, quants.y), raw.words[1] = word_of(quants.z, quants.w);
  raw.scale = *(device const half *)block;
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int sub, int second) { return four_nibbles(raw.words[sub], second, (float)raw.scale); }

#elif WEIGHT == Q4_K // a lane has eight bytes of a block's 128; their low halves are one round's, their high halves the next's, 32 apart
#define STEP 512
#define SUBS 2
#define ROW_BYTES ((I) / 256 * 144)
static_assert((I) % 256 == 0, "Q4_K: I must be a multiple of 256");
struct Runs { // scales and minimums of two runs of 32 columns
  float scale[2], least[2];
};
// Runs 2 g and 2 g + 1 of a block: its first 16 bytes are d, dmin and eight pairs of 6 bits.
INLINE Runs runs_of(uint4 head, int g) {
  const int down = 16 * (g & 1);
  const uint first = head.y >> down, second = head.z >> down, rest = head.w >> down;
  const uint scales = g < 2 ? first & 0x3F3Fu : (rest & 0x0F0Fu) | (first & 0xC0C0u) >> 2;
  const uint leasts = g < 2 ? second & 0x3F3Fu : (rest >> 4 & 0x0F0Fu) | (second & 0xC0C0u) >> 2;
  const float2 d = f16_pair_to_float(head.x);
  Runs runs;
  runs.scale[0] = d.x * (float)(scales & 0xFFu), runs.scale[1] = d.x * (float)(scales >> 8 & 0xFFu);
  runs.least[0] = d.y * (float)(leasts & 0xFFu), runs.least[1] = d.y * (float)(leasts >> 8 & 0xFFu);
  return runs;
}
struct Raw {
  uint words[2];
  Runs runs;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = row + (step * 2 + lane / 16) * 144;
  const uint2 words = uint2(*(device const packed_uint2 *)(block + 16 + lane % 16 * 8));
  Raw raw;
  raw.words[0] = words.x, raw.words[1] = words.y;
  raw.runs = runs_of(uint4(*(device const packed_uint4 *)block), lane % 16 / 4);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int sub, int second) {
  return four_nibbles_above(raw.words[second], sub, raw.runs.scale[sub], raw.runs.least[sub]);
}
#else
#error "product.h: WEIGHT must be F32, F16, BF16, Q8_0, Q4_0 or Q4_K"
#endif

#define STEPS (((I) + STEP - 1) / STEP)
static_assert((I) % 32 == 0, "products: I must be a multiple of 32");

// Where a lane's first (`second` 0) or second four columns of a step's round begin, counted from the step's first.
INLINE int column_of(int lane, int sub, int second) {
#if WEIGHT == Q4_0
  return lane / 2 * 32 + lane % 2 * 8 + sub * 4 + second * 16;
#elif WEIGHT == Q4_K
  return lane / 4 * 64 + sub * 32 + lane % 4 * 8 + second * 4;
#else
  return lane * 8 + second * 4;
#endif
}

// Whether a lane has a share in a step: the last one may be short.
INLINE bool has_share(int step, int lane) { return (I) % STEP == 0 ? step < STEPS : step * STEP + column_of(lane, 0, 0) < (I); }

INLINE float add_four(float sum, float4 w, float4 x) { return fma(w.w, x.w, fma(w.z, x.z, fma(w.y, x.y, fma(w.x, x.x, sum)))); }

// --- sums of lanes

// The lowest power of two that is n or more, up to 128.
static constexpr int power_above(int n) {
  return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : n <= 8 ? 8 : n <= 16 ? 16 : n <= 32 ? 32 : n <= 64 ? 64 : 128;
}

INLINE float sum_lanes(float value) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2) value += simd_shuffle_xor(value, (ushort)apart);
  return value;
}

// Sums COUNT (a power of two) values over all lanes, and shares the sums out: afterwards a lane holds numbers spread(...) + i in values[i],
// i < COUNT / 32, or one. Each sum has the bits of sum_lanes: in each round a lane hands over the half that it does not keep.
template <int COUNT> INLINE int spread(thread float *values, int lane) {
  int first = 0, left = COUNT;
#pragma unroll
  for (int apart = 16; apart; apart /= 2) {
    if (left == 1) {
      values[0] += simd_shuffle_xor(values[0], (ushort)apart);
      continue;
    }
    left /= 2;
    const bool upper = (lane & apart) != 0;
#pragma unroll
    for (int i = 0; i < left; i++) {
      const float kept = upper ? values[i + left] : values[i], given = upper ? values[i] : values[i + left];
      values[i] = kept + simd_shuffle_xor(given, (ushort)apart);
    }
    first += upper ? left : 0;
  }
  return first;
}
// Whether this lane is the one that writes its sums, where several hold the same.
template <int COUNT> INLINE bool speaks(int lane) { return COUNT >= 32 || (lane & (32 / COUNT - 1)) == 0; }

// --- behind the sum

#define NO_ACTIVATION 0
#define GELU 1

// The tanh form: x / 2 * (1 + tanh u) = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
INLINE float gelu(float x) { return x / (1.0f + precise::exp(fma(0.044715f, x * x * x, x) * -1.5957691216057308f)); }
INLINE float silu(float x) { return x / (1.0f + precise::exp(-x)); }
