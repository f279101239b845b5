// lanes.h in AVX-512: one register each. BF16 and VNNI instructions where the processor has them; without them, products as in lanes_avx2.h.
#pragma once
#include <immintrin.h>

#ifdef __AVX512BF16__
#define BF16_PAIRS 1  // v16_dot_bf16 multiplies at twice the rate of floats (Zen 4 and later)
#else
#define BF16_AS_FLOATS 1
#endif
#ifndef __AVX512VNNI__
#define SHORT_DOTS 1
#endif

typedef __m512 v16;
typedef __m512i w16;
typedef __m512i i16;

static inline v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
static inline v16 v16_set(float x) { return _mm512_set1_ps(x); }
static inline v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
static inline v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
static inline v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
static inline v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
static inline v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
static inline v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
static inline v16 v16_round(v16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline v16 v16_fraction(v16 a) { return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }  // a - floor(a)
static inline v16 v16_scale2(v16 a, v16 n) { return _mm512_scalef_ps(a, n); }                                     // a * 2^n, n whole
static inline v16 v16_zero_below(v16 a, v16 x, v16 low) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), a); }
static inline v16 v16_abs(v16 a) { return _mm512_abs_ps(a); }

// Sums and maxima of all sixteen, in a fixed order: halves, quarters, eighths, pairs.
static inline float v16_sum(v16 a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float v16_max_of(v16 a) { return _mm512_reduce_max_ps(a); }

// v16_sum and v16_max_of of each of four, to to[4]: the steps of two or four at a time.
#define V16_OF_FOUR(name, op)                                                                                             \
  static inline void name(float *to, const v16 *a) {                                                                      \
    __m256 h[4];                                                                                                          \
    for (int i = 0; i < 4; i++) h[i] = op(_mm512_castps512_ps256(a[i]), _mm512_extractf32x8_ps(a[i], 1));                 \
    const __m256 x = op(_mm256_permute2f128_ps(h[0], h[1], 0x20), _mm256_permute2f128_ps(h[0], h[1], 0x31));              \
    const __m256 y = op(_mm256_permute2f128_ps(h[2], h[3], 0x20), _mm256_permute2f128_ps(h[2], h[3], 0x31));              \
    const __m256 z = op(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xEE));                                    \
    const __m256 sums = op(z, _mm256_movehdup_ps(z)); /* 0: a[0], 2: a[2], 4: a[1], 6: a[3] */                            \
    _mm_storeu_ps(to, _mm256_castps256_ps128(_mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 2, 6, 0, 0, 0, 0)))); \
  }
V16_OF_FOUR(v16_sum_four, _mm256_add_ps)
V16_OF_FOUR(v16_max_four, _mm256_max_ps)
#define HAS_FOUR

// Sixteen half-width numbers to and from memory; to bfloat16 and float16 with rounding to nearest, ties to even.
static inline v16 v16_load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
static inline v16 v16_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline void v16_store_bf16(uint16_t *p, v16 a) {
  __m512i bits = _mm512_castps_si512(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16);
  __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
}
static inline void v16_store_f16(uint16_t *p, v16 a) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Packed weights: sixteen words, one of each row of a panel.
static inline w16 w16_load(const void *p) { return _mm512_loadu_si512(p); }

static inline w16 w16_load_u16(const uint16_t *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }

// acc + w[r].low * x.low + w[r].high * x.high for the bfloat16 pairs of every row r and one pair x.
static inline v16 v16_dot_bf16(v16 acc, w16 w, uint32_t x) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
  __m512i high = _mm512_set1_epi32((int)0xFFFF0000);
  // the high product first, as the instruction does it
  acc =
      _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, high)), _mm512_castsi512_ps(_mm512_set1_epi32((int)(x & 0xFFFF0000u))), acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_set1_epi32((int)(x << 16))), acc);
#endif
}

// acc + the four products of unsigned bytes w[r] and signed bytes x, exact.
static inline i16 i16_dot_u8s8(i16 acc, w16 w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32((int)x));
#else
  __m512i xs = _mm512_set1_epi32((int)x), bytes = _mm512_set1_epi16(0xFF);
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, bytes), _mm512_srai_epi16(_mm512_slli_epi16(xs, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(xs, 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#endif
}
static inline i16 i16_set(int32_t x) { return _mm512_set1_epi32(x); }
static inline v16 v16_from_i16(i16 a) { return _mm512_cvtepi32_ps(a); }
static inline w16 w16_low_nibbles(w16 w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
static inline w16 w16_high_nibbles(w16 w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15)); }
static inline w16 w16_bits(w16 w, int right, int mask) {
  return _mm512_and_si512(right < 0 ? _mm512_slli_epi32(w, (unsigned)-right) : _mm512_srli_epi32(w, (unsigned)right),
                          _mm512_set1_epi8((char)mask));
}
static inline w16 w16_lookup(w16 w, const uint8_t *table) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), w);
}
static inline v16 v16_from_bits(w16 w, int first, int count) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(w, (unsigned)first), _mm512_set1_epi32((1 << count) - 1)));
}
static inline v16 v16_from_s8(w16 w, int j) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w, (unsigned)(24 - 8 * j)), 24));
}
static inline v16 v16_lookup(w16 w, int first, const float *table) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(w, (unsigned)first), _mm512_loadu_ps(table));
}
static inline w16 w16_fifth_bits(w16 w, int first) {
  const __m512i bits = _mm512_and_si512(_mm512_srli_epi32(w, (unsigned)first), _mm512_set1_epi32(15));
  return _mm512_and_si512(_mm512_mullo_epi32(bits, _mm512_set1_epi32(0x02040810)), _mm512_set1_epi32(0x10101010));
}
static inline w16 w16_or(w16 a, w16 b) { return _mm512_or_si512(a, b); }

static inline w16 w16_load_halves(const void *low, const void *high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)low)), _mm256_loadu_si256((const __m256i *)high), 1);
}

static inline i16 i16_dot_u4s8(i16 acc, w16 w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32((int)x));
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w, _mm512_set1_epi32((int)x)), _mm512_set1_epi16(1)));
#endif
}
static inline v16 v16_from_e4m3(w16 w, int j) {
  const __m512i top = _mm512_srai_epi32(_mm512_slli_epi32(w, (unsigned)(24 - 8 * j)), 4);
  return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(top, _mm512_set1_epi32((int)0x87F00000))), _mm512_set1_ps(0x1p120f));
}

// Of part_sum (x_group.h), as in lanes_avx2.h.
static inline w16 dot_pairs(w16 w, uint32_t x) { return _mm512_maddubs_epi16(w, _mm512_set1_epi32((int)x)); }
static inline i16 dot_shorts(w16 w, uint32_t x) { return _mm512_madd_epi16(w, _mm512_set1_epi32((int)x)); }
static inline w16 add_shorts(w16 a, w16 b) { return _mm512_add_epi16(a, b); }
static inline i16 add_ints(i16 a, i16 b) { return _mm512_add_epi32(a, b); }
static inline w16 even_bytes(w16 w) { return _mm512_and_si512(w, _mm512_set1_epi16(0xFF)); }
static inline w16 odd_bytes(w16 w) { return _mm512_srli_epi16(w, 8); }
#define KEEP_ORDER(x) __asm__ volatile("" : "+v"(x))
static inline void store_wide(int16_t *p, v16 a) {
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a));
  _mm256_storeu_si256((__m256i *)p, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xD8), 0xD8));
}

// Sixteen int8 from float32 (whole numbers from -127 to 127), and their sum.
static inline void v16_store_i8(int8_t *p, v16 a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }

// Lanes below n from a, the others from b; n from 0 to 16.
static inline v16 v16_first(int n, v16 a, v16 b) { return _mm512_mask_mov_ps(b, (__mmask16)((1u << n) - 1), a); }

// Sixteen rows of sixteen words: r[i].at[j] becomes r[j].at[i].
static inline void w16_transpose(w16 *r) {
  w16 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
    }
  for (int j = 0; j < 4; j++) {  // b[4 * i + j]: of rows 4i to 4i + 3 the words j, j + 4, j + 8, j + 12
    w16 even_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), odd_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xDD);
    w16 even_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88), odd_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xDD);
    r[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    r[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
    r[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
  }
}

// Words as the float32 they are; their low and high halves as bfloat16 or float16.
static inline v16 v16_from_w16(w16 w) { return _mm512_castsi512_ps(w); }
static inline v16 v16_from_low_bf16(w16 w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
static inline v16 v16_from_high_bf16(w16 w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xFFFF0000))); }
static inline v16 v16_from_low_f16(w16 w) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w)); }
static inline v16 v16_from_high_f16(w16 w) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16))); }

// Four e4m3 numbers a word as two pairs of bfloat16, which hold them exactly: bytes 0 and 2, bytes 1 and 3. Of the 128 magnitudes both bytes
// are looked up. (A magnitude shifted into the place of a bfloat16 is that times 2^-120, but DPBF16PS takes subnormals for 0.)
#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define E4M3_PAIRS 1
#define OR_MASKED 0xF8  // a | b & c
#define TIMES_8(x) x, x, x, x, x, x, x, x
#define EXPONENTS(x) TIMES_8(x), TIMES_8(x), TIMES_8(x + 1), TIMES_8(x + 1)
#define MANTISSAS 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0
#define SUBNORMAL_EXPONENTS 0, 0x3B, 0x3B, 0x3B, 0x3C, 0x3C, 0x3C, 0x3C
#define SUBNORMAL_MANTISSAS 0, 0, 0x80, 0xC0, 0, 0x20, 0x40, 0x60
static const uint8_t E4M3_HIGH[128] = {SUBNORMAL_EXPONENTS, TIMES_8(0x3C),   TIMES_8(0x3D),  TIMES_8(0x3D),
                                       EXPONENTS(0x3E),     EXPONENTS(0x40), EXPONENTS(0x42)};
static const uint8_t E4M3_LOW[128] = {SUBNORMAL_MANTISSAS, 0x80,      0x90,      0xA0,      0xB0,      0xC0,      0xD0,     0xE0, 0xF0,
                                      MANTISSAS,           MANTISSAS, MANTISSAS, MANTISSAS, MANTISSAS, MANTISSAS, MANTISSAS};
static inline void e4m3_pairs(w16 w, w16 *even, w16 *odd) {
  const __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(E4M3_LOW), w, _mm512_loadu_si512(E4M3_LOW + 64));
  __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(E4M3_HIGH), w, _mm512_loadu_si512(E4M3_HIGH + 64));
  high = _mm512_ternarylogic_epi32(high, w, _mm512_set1_epi8((char)0x80), OR_MASKED);
  *even = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, _mm512_set1_epi16(0xFF), OR_MASKED);
  *odd = _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, _mm512_set1_epi16((short)0xFF00), OR_MASKED);
}
#endif
