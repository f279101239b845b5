// lanes.h in plain C: what every word means. Any processor and any compiler; slow.
#pragma once
#include "numbers.h"

typedef struct {
  float at[16];
} v16;
typedef struct {
  uint32_t at[16];
} w16;
typedef struct {
  int32_t at[16];
} i16;

#define EACH for (int i = 0; i < 16; i++)

// One function a line, as a table.
// clang-format off
static inline v16 v16_load(const float *p) { v16 r; EACH r.at[i] = p[i]; return r; }
static inline void v16_store(float *p, v16 a) { EACH p[i] = a.at[i]; }
static inline v16 v16_set(float x) { v16 r; EACH r.at[i] = x; return r; }
static inline v16 v16_add(v16 a, v16 b) { EACH a.at[i] += b.at[i]; return a; }
static inline v16 v16_sub(v16 a, v16 b) { EACH a.at[i] -= b.at[i]; return a; }
static inline v16 v16_mul(v16 a, v16 b) { EACH a.at[i] *= b.at[i]; return a; }
static inline v16 v16_div(v16 a, v16 b) { EACH a.at[i] /= b.at[i]; return a; }
// Of two zeros, and where one is NaN, `min` and `max` give b.
static inline v16 v16_min(v16 a, v16 b) { EACH a.at[i] = a.at[i] < b.at[i] ? a.at[i] : b.at[i]; return a; }
static inline v16 v16_max(v16 a, v16 b) { EACH a.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i]; return a; }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { EACH c.at[i] = a.at[i] * b.at[i] + c.at[i]; return c; }

static inline float round_even(float x) {  // to whole numbers, ties to even; from 2^23 on all float32 are whole
  const uint32_t sign = bits_of_float(x) & 0x80000000u;
  const float size = float_from_bits(bits_of_float(x) ^ sign);
  return size < 0x1p23f ? float_from_bits(bits_of_float(size + 0x1p23f - 0x1p23f) | sign) : x;
}
static inline v16 v16_round(v16 a) { EACH a.at[i] = round_even(a.at[i]); return a; }
static inline v16 v16_fraction(v16 a) { EACH a.at[i] -= round_even(a.at[i]) - (round_even(a.at[i]) > a.at[i] ? 1.0f : 0.0f); return a; }  // a - floor(a)
// a * 2^n, n whole and from -126 to 127.
static inline v16 v16_scale2(v16 a, v16 n) {
  EACH {
    const float power = n.at[i] > -126.0f ? n.at[i] < 127.0f ? n.at[i] : 127.0f : -126.0f;  // a cast of NaN is undefined
    a.at[i] *= float_from_bits((uint32_t)((int32_t)power + 127) << 23);
  }
  return a;
}
static inline v16 v16_zero_below(v16 a, v16 x, v16 low) { EACH a.at[i] = x.at[i] < low.at[i] ? 0.0f : a.at[i]; return a; }
static inline v16 v16_abs(v16 a) { EACH a.at[i] = float_from_bits(bits_of_float(a.at[i]) & 0x7FFFFFFF); return a; }

static inline float v16_sum(v16 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a.at[i] += a.at[i + half];
  return a.at[0];
}
// Undefined where one is NaN.
static inline float v16_max_of(v16 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a.at[i] = a.at[i] > a.at[i + half] ? a.at[i] : a.at[i + half];
  return a.at[0];
}

static inline v16 v16_load_bf16(const uint16_t *p) { v16 r; EACH r.at[i] = float_from_bf16(p[i]); return r; }
static inline v16 v16_load_f16(const uint16_t *p) { v16 r; EACH r.at[i] = float_from_f16(p[i]); return r; }

static inline uint16_t bf16_of_float(float x) {
  const uint32_t bits = bits_of_float(x);
  if (x != x) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static inline uint16_t f16_of_float(float x) {
  const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (size >> 13 & 0x1FF));
  if (size >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // from 65520 on: infinity
  if (size < 0x38800000)                                     // below 2^-14: the sum's last bit is worth 2^-24, as a subnormal's is
    return (uint16_t)(sign | (bits_of_float(float_from_bits(size) + 0.5f) - 0x3F000000));
  return (uint16_t)(sign | ((size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13));
}
static inline void v16_store_bf16(uint16_t *p, v16 a) { EACH p[i] = bf16_of_float(a.at[i]); }
static inline void v16_store_f16(uint16_t *p, v16 a) { EACH p[i] = f16_of_float(a.at[i]); }

static inline w16 w16_load(const void *p) {
  const uint8_t *bytes = p;
  w16 r;
  EACH r.at[i] = bytes[4 * i] | (uint32_t)bytes[4 * i + 1] << 8 | (uint32_t)bytes[4 * i + 2] << 16 | (uint32_t)bytes[4 * i + 3] << 24;
  return r;
}

// Sixteen halves of words, zeros above them.
static inline w16 w16_load_u16(const uint16_t *p) { w16 r; EACH r.at[i] = p[i]; return r; }

// Two additions, each rounded, the high halves' product first, as AVX512_BF16 does it. The product of two bfloat16 is exact in float32.
static inline v16 v16_dot_bf16(v16 acc, w16 w, uint32_t x) {
  const float low = float_from_bits(x << 16), high = float_from_bits(x & 0xFFFF0000u);
  EACH acc.at[i] = float_from_bits(w.at[i] << 16) * low + (float_from_bits(w.at[i] & 0xFFFF0000u) * high + acc.at[i]);
  return acc;
}

static inline i16 i16_dot_u8s8(i16 acc, w16 w, uint32_t x) {
  EACH for (int k = 0; k < 32; k += 8) acc.at[i] += (int32_t)(w.at[i] >> k & 0xFF) * (int8_t)(x >> k);
  return acc;
}
static inline i16 i16_set(int32_t x) { i16 r; EACH r.at[i] = x; return r; }
static inline v16 v16_from_i16(i16 a) { v16 r; EACH r.at[i] = (float)a.at[i]; return r; }
static inline w16 w16_low_nibbles(w16 w) { EACH w.at[i] &= 0x0F0F0F0F; return w; }
static inline w16 w16_high_nibbles(w16 w) { EACH w.at[i] = w.at[i] >> 4 & 0x0F0F0F0F; return w; }
// Every byte shifted right by `right` bits (left where it is negative), of which `mask`, a byte, keeps bits that came from the same byte.
static inline w16 w16_bits(w16 w, int right, int mask) {
  EACH w.at[i] = (right < 0 ? w.at[i] << -right : w.at[i] >> right) & 0x01010101u * (uint32_t)mask;
  return w;
}
// The entry of a table of sixteen for every byte, 0 to 15.
static inline w16 w16_lookup(w16 w, const uint8_t *table) {
  EACH {
    uint32_t word = 0;
    for (int k = 0; k < 32; k += 8) word |= (uint32_t)table[w.at[i] >> k & 15] << k;
    w.at[i] = word;
  }
  return w;
}
// The entry of a table of sixteen numbers for the four bits of every word from bit `first` on.
static inline v16 v16_lookup(w16 w, int first, const float *table) { v16 r; EACH r.at[i] = table[w.at[i] >> first & 15]; return r; }
// Of every word the `count` bits from bit `first` on; its byte `j` as a signed number.
static inline v16 v16_from_bits(w16 w, int first, int count) { v16 r; EACH r.at[i] = (float)(w.at[i] >> first & ((1u << count) - 1)); return r; }
static inline v16 v16_from_s8(w16 w, int j) { v16 r; EACH r.at[i] = (float)(int8_t)(w.at[i] >> 8 * j); return r; }
// Bits `first` to first + 3 of every word, each as bit 4 of one of its four bytes. A product spreads them: bit i moves to 8 i + 4.
static inline w16 w16_fifth_bits(w16 w, int first) { EACH w.at[i] = (w.at[i] >> first & 15) * 0x02040810u & 0x10101010u; return w; }
static inline w16 w16_or(w16 a, w16 b) { EACH a.at[i] |= b.at[i]; return a; }

// Sixteen words, eight contiguous ones from each of two places.
static inline w16 w16_load_halves(const void *low, const void *high) {
  const uint8_t *bytes[2] = {low, high};
  w16 r;
  EACH {
    const uint8_t *word = bytes[i / 8] + i % 8 * 4;
    r.at[i] = word[0] | (uint32_t)word[1] << 8 | (uint32_t)word[2] << 16 | (uint32_t)word[3] << 24;
  }
  return r;
}
// As i16_dot_u8s8, of bytes from 0 to 15.
static inline i16 i16_dot_u4s8(i16 acc, w16 w, uint32_t x) { return i16_dot_u8s8(acc, w, x); }
// Byte `j` of every word as a float8 e4m3: sign, four bits of exponent, three of fraction. What others read as NaN is +-480.
static inline v16 v16_from_e4m3(w16 w, int j) { v16 r; EACH r.at[i] = float_from_e4m3((uint8_t)(w.at[i] >> 8 * j)); return r; }

static inline void v16_store_i8(int8_t *p, v16 a) { EACH p[i] = a.at[i] >= -128.0f && a.at[i] <= 127.0f ? (int8_t)round_even(a.at[i]) : 0; }  // a cast of NaN is undefined

// Sixteen numbers of which the first n come from a, the others from b; n from 0 to 16.
static inline v16 v16_first(int n, v16 a, v16 b) { EACH a.at[i] = i < n ? a.at[i] : b.at[i]; return a; }

static inline void w16_transpose(w16 *r) {
  EACH for (int j = 0; j < i; j++) {
    uint32_t word = r[i].at[j];
    r[i].at[j] = r[j].at[i];
    r[j].at[i] = word;
  }
}
static inline v16 v16_from_w16(w16 w) { v16 r; EACH r.at[i] = float_from_bits(w.at[i]); return r; }
static inline v16 v16_from_low_bf16(w16 w) { v16 r; EACH r.at[i] = float_from_bf16((uint16_t)w.at[i]); return r; }
static inline v16 v16_from_high_bf16(w16 w) { v16 r; EACH r.at[i] = float_from_bf16((uint16_t)(w.at[i] >> 16)); return r; }
static inline v16 v16_from_low_f16(w16 w) { v16 r; EACH r.at[i] = float_from_f16((uint16_t)w.at[i]); return r; }
static inline v16 v16_from_high_f16(w16 w) { v16 r; EACH r.at[i] = float_from_f16((uint16_t)(w.at[i] >> 16)); return r; }

// clang-format on
#undef EACH
