// Products of float32 x with weights as they lie in files: what a lane holds of a row of weights, and the one order of arithmetic of the
// kernels for up to sixteen rows.
//
// Constants from outside: WEIGHT, the format, and I, the columns. A row of weights lies as in a file (tinyvllm/quant/formats.py), O rows
// behind each other, ROW_BYTES each; nothing is packed, so they are mapped without a copy. Base addresses: F32, F16, BF16 and Q4_K on a
// border of 4 bytes, Q8_0 and Q4_0 of 2. I % 32 == 0; Q4_K: I % 256 == 0.
//
// A SIMD group takes a row of weights in STEPs of 32 lanes, in SUBS rounds each; in a round a lane meets eight columns, its CELL, twice four
// in a row (column_of). A lane's share of a row does not depend on how many rows of x or of weights are computed together.
//
// The order, for one output: a lane goes through its cells ascending, a.x a.y a.z a.w b.x b.y b.z b.w, in float32 with fma,
//     F32, F16, BF16, Q4_K  sum = fma(w, x, sum), w the weight's exact value, Q4_K's as fma(nibble, scale, -minimum), which is what a file's
//                           reader makes of it
//     Q8_0, Q4_0            part = fma(q, x, part) over the cell, then sum = fma(scale, part, sum)
// then lanes are added in pairs 16, 8, 4, 2 and 1 apart. x is not rounded.
//
// Nibbles are masked where they lie and never converted: or-ed into the mantissa of half 1024.0 they are 1024 + q, or 1024 + 16 q, exactly.
// Sixteen times too large, they meet an x sixteen times smaller (Q4_0) or a smaller scale (Q4_K). Bytes of Q8_0 likewise. The trick with
// pre-scaled x is that of llama.cpp's and MLX's Metal kernels, that with the mantissa is of FasterTransformer (Kim et al. 2022).
#pragma once
#include "gpu.h"

struct Eight { // numbers of a cell
  float4 a, b;
};

// --- two 16-bit numbers out of the bits under `mask`, as halves: what or-ing 1024.0 adds comes off again, and `zero` with it

static inline half2 low_halves(uint bits, uint mask, half zero) { return as_type<half2>((bits & mask) | 0x64006400u) - half2(1024.0h + zero); }

// Bytes 0 .. 3 of a word, under a mask for bytes 0 and 2.
static inline half4 four_halves(uint word, uint mask, half zero) {
  const half2 even = low_halves(word, mask, zero), odd = low_halves(word >> 8, mask, zero);
  return half4(even.x, odd.x, even.y, odd.y);
}
#define LOW_NIBBLES 0x000F000Fu
#define HIGH_NIBBLES 0x00F000F0u

static inline uint word_of(ushort low, ushort high) { return as_type<uint>(ushort2(low, high)); }

// --- eight weights on their way to the sum

struct Floats {
  float4 a, b;
};
struct Halves {
  half4 a, b;
};
struct Scaled {
  half4 a, b;
  float scale;
};

static inline float add_four(float sum, float4 w, float4 x) { return fma(w.w, x.w, fma(w.z, x.z, fma(w.y, x.y, fma(w.x, x.x, sum)))); }
static inline float add_four(float sum, half4 w, float4 x) {
  return fma((float)w.w, x.w, fma((float)w.z, x.z, fma((float)w.y, x.y, fma((float)w.x, x.x, sum))));
}
static inline float add_cell(float sum, Floats w, Eight x) { return add_four(add_four(sum, w.a, x.a), w.b, x.b); }
static inline float add_cell(float sum, Halves w, Eight x) { return add_four(add_four(sum, w.a, x.a), w.b, x.b); }
static inline float add_cell(float sum, Scaled w, Eight x) { return fma(w.scale, add_four(add_four(0.0f, w.a, x.a), w.b, x.b), sum); }

// --- a lane's share of a STEP of a row as it comes from memory (Raw), and its cell in round `sub`

#if WEIGHT == F32
#define STEP 256
#define SUBS 1
#define ROW_BYTES (4 * (I))
struct Raw {
  float4 a, b;
};
static inline Raw load_raw(device const uchar *row, int step, int lane) {
  device const packed_float4 *at = (device const packed_float4 *)(row + (step * STEP + lane * 8) * 4);
  Raw raw;
  raw.a = float4(at[0]), raw.b = float4(at[1]);
  return raw;
}
static inline Floats cell_of(Raw raw, int) {
  Floats w;
  w.a = raw.a, w.b = raw.b;
  return w;
}

#elif WEIGHT == F16 || WEIGHT == BF16
#define STEP 256
#define SUBS 1
#define ROW_BYTES (2 * (I))
struct Raw {
  uint4 words;
};
static inline Raw load_raw(device const uchar *row, int step, int lane) {
  Raw raw;
  raw.words = uint4(*(device const packed_uint4 *)(row + (step * STEP + lane * 8) * 2));
  return raw;
}
#if WEIGHT == F16
static inline Halves cell_of(Raw raw, int) {
  Halves w;
  w.a = half4(as_type<half2>(raw.words.x), as_type<half2>(raw.words.y));
  w.b = half4(as_type<half2>(raw.words.z), as_type<half2>(raw.words.w));
  return w;
}
#else
static inline float4 four_of(uint low, uint high) {
  return float4(as_type<float>(low << 16), as_type<float>(low & 0xFFFF0000u), as_type<float>(high << 16), as_type<float>(high & 0xFFFF0000u));
}
static inline Floats cell_of(Raw raw, int) {
  Floats w;
  w.a = four_of(raw.words.x, raw.words.y), w.b = four_of(raw.words.z, raw.words.w);
  return w;
}
#endif

#elif WEIGHT == Q8_0 // a lane has a quarter of a block
#define STEP 256
#define SUBS 1
#define ROW_BYTES ((I) / 32 * 34)
struct Raw {
  uint a, b;
  half scale;
};
static inline Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = row + (step * 8 + lane / 4) * 34;
  const ushort4 quants = ushort4(*(device const packed_ushort4 *)(block + 2 + lane % 4 * 8));
  Raw raw;
  raw.a = word_of(quants.x, quants.y), raw.b = word_of(quants.z, quants.w);
  raw.scale = *(device const half *)block;
  return raw;
}
static inline half4 four_bytes(uint word) { return four_halves(word ^ 0x80808080u, 0x00FF00FFu, 128.0h); }
static inline Scaled cell_of(Raw raw, int) {
  Scaled w;
  w.a = four_bytes(raw.a), w.b = four_bytes(raw.b), w.scale = (float)raw.scale;
  return w;
}

#elif WEIGHT == Q4_0 // a lane has half the bytes of a block; a cell is four of them, low halves in a, high ones in b
#define STEP 512
#define SUBS 2
#define ROW_BYTES ((I) / 32 * 18)
#define B_SMALLER 0.0625f
struct Raw {
  uint words[2];
  half scale;
};
static inline Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = row + (step * 16 + lane / 2) * 18;
  const ushort4 quants = ushort4(*(device const packed_ushort4 *)(block + 2 + lane % 2 * 8));
  Raw raw;
  raw.words[0] = word_of(quants.x, quants.y), raw.words[1] = word_of(quants.z, quants.w);
  raw.scale = *(device const half *)block;
  return raw;
}
static inline Scaled cell_of(Raw raw, int sub) {
  Scaled w;
  w.a = four_halves(raw.words[sub], LOW_NIBBLES, 8.0h), w.b = four_halves(raw.words[sub], HIGH_NIBBLES, 128.0h);
  w.scale = (float)raw.scale;
  return w;
}

#elif WEIGHT == Q4_K // a lane has eight bytes of a block's 128; a cell is their low halves, then their high ones: of two runs of 32
#define STEP 512
#define SUBS 2
#define ROW_BYTES ((I) / 256 * 144)
static_assert((I) % 256 == 0, "Q4_K: I must be a multiple of 256");
struct Runs { // of two runs, scales and minimums
  float scale[2], least[2];
};
// Runs 2 g and 2 g + 1 of a block: its first 16 bytes are d, dmin and eight pairs of 6 bits.
static inline Runs runs_of(uint4 head, int g) {
  const int down = 16 * (g & 1);
  const uint first = head.y >> down, second = head.z >> down, rest = head.w >> down;
  const uint scales = g < 2 ? first & 0x3F3Fu : (rest & 0x0F0Fu) | (first & 0xC0C0u) >> 2;
  const uint leasts = g < 2 ? second & 0x3F3Fu : (rest >> 4 & 0x0F0Fu) | (second & 0xC0C0u) >> 2;
  const float2 d = float2(as_type<half2>(head.x));
  Runs runs;
  runs.scale[0] = d.x * (float)(scales & 0xFFu), runs.scale[1] = d.x * (float)(scales >> 8);
  runs.least[0] = d.y * (float)(leasts & 0xFFu), runs.least[1] = d.y * (float)(leasts >> 8);
  return runs;
}
struct Raw {
  uint2 words;
  Runs runs;
};
static inline Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = row + (step * 2 + lane / 16) * 144;
  Raw raw;
  raw.words = uint2(*(device const packed_uint2 *)(block + 16 + lane % 16 * 8));
  raw.runs = runs_of(uint4(*(device const packed_uint4 *)block), lane % 16 / 4);
  return raw;
}
static inline Floats cell_of(Raw raw, int sub) {
  const uint mask = sub ? HIGH_NIBBLES : LOW_NIBBLES;
  const float4 scale = float4(raw.runs.scale[sub] * (sub ? 0.0625f : 1.0f)), least = float4(-raw.runs.least[sub]);
  Floats w;
  w.a = fma(float4(four_halves(raw.words.x, mask, 0.0h)), scale, least);
  w.b = fma(float4(four_halves(raw.words.y, mask, 0.0h)), scale, least);
  return w;
}
#else
#error "product.h: WEIGHT must be F32, F16, BF16, Q8_0, Q4_0 or Q4_K"
#endif

#ifndef B_SMALLER
#define B_SMALLER 1.0f // by what x's second four are multiplied: a power of two
#endif
#define STEPS (((I) + STEP - 1) / STEP)
static_assert((I) % 32 == 0, "products: I must be a multiple of 32");

// Where a lane's first (`second` 0) or second four columns of a step's round begin, counted from the step's first.
static inline int column_of(int lane, int sub, int second) {
#if WEIGHT == Q4_0
  return lane / 2 * 32 + lane % 2 * 8 + sub * 4 + second * 16;
#elif WEIGHT == Q4_K
  return lane / 4 * 64 + sub * 32 + lane % 4 * 8 + second * 4;
#else
  return lane * 8 + second * 4;
#endif
}

// Whether a lane has a share in a step: the last one may be short.
static inline bool has_share(int step, int lane) { return (I) % STEP == 0 ? step < STEPS : step * STEP + column_of(lane, 0, 0) < (I); }

// --- sums of lanes

static constexpr int power_above(int n) { return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : n <= 8 ? 8 : n <= 16 ? 16 : n <= 32 ? 32 : n <= 64 ? 64 : 128; }

static inline float sum_lanes(float value) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2) value += simd_shuffle_xor(value, (ushort)apart);
  return value;
}

// Sums COUNT (a power of two) values over all lanes, and shares the sums out: afterwards the lane holds number spread(...) + i in values[i],
// i < COUNT / 32 or one. Each sum has the bits of sum_lanes: in each round a lane hands over the half that it does not keep.
template <int COUNT> static inline int spread(thread float *values, int lane) {
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
template <int COUNT> static inline bool speaks(int lane) { return COUNT >= 32 || (lane & (32 / COUNT - 1)) == 0; }

// --- behind the sum

#define NO_ACTIVATION 0
#define GELU 1

// The tanh form: x / 2 * (1 + tanh u) = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline float gelu(float x) { return x / (1.0f + precise::exp(fma(0.044715f, x * x * x, x) * -1.5957691216057308f)); }
static inline float silu(float x) { return x / (1.0f + precise::exp(-x)); }
