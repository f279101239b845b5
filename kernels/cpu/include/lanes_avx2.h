// lanes.h in AVX2, FMA and F16C: two registers each. Also of the variant avxvnni, whose processors have dot products of bytes.
#pragma once
#include <immintrin.h>

// A broadcast of a float32 in memory is part of a load, one of a half word takes three instructions: x is stored for that (formats/bf16.h).
#define BF16_AS_FLOATS 1
#ifndef __AVXVNNI__
#define SHORT_DOTS 1  // without dot products of bytes, products of two bytes are added in 16 bits, as many as fit (x_group.h)
#endif

typedef struct {
  __m256 a, b;
} v16;
typedef struct {
  __m256i a, b;
} w16;
typedef struct {
  __m256i a, b;
} i16;

static inline v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void v16_store(float *p, v16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
static inline v16 v16_set(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline v16 v16_add(v16 x, v16 y) { return (v16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline v16 v16_sub(v16 x, v16 y) { return (v16){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline v16 v16_mul(v16 x, v16 y) { return (v16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline v16 v16_div(v16 x, v16 y) { return (v16){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline v16 v16_min(v16 x, v16 y) { return (v16){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline v16 v16_max(v16 x, v16 y) { return (v16){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline v16 v16_fma(v16 x, v16 y, v16 z) { return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }

#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
static inline v16 v16_round(v16 x) { return (v16){_mm256_round_ps(x.a, NEAREST), _mm256_round_ps(x.b, NEAREST)}; }
static inline v16 v16_fraction(v16 x) { return (v16){_mm256_sub_ps(x.a, _mm256_floor_ps(x.a)), _mm256_sub_ps(x.b, _mm256_floor_ps(x.b))}; }
static inline __m256 power_of_2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline v16 v16_scale2(v16 x, v16 n) { return (v16){_mm256_mul_ps(x.a, power_of_2(n.a)), _mm256_mul_ps(x.b, power_of_2(n.b))}; }
static inline v16 v16_zero_below(v16 y, v16 x, v16 low) {
  return (v16){_mm256_andnot_ps(_mm256_cmp_ps(x.a, low.a, _CMP_LT_OQ), y.a), _mm256_andnot_ps(_mm256_cmp_ps(x.b, low.b, _CMP_LT_OQ), y.b)};
}
static inline v16 v16_abs(v16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return (v16){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}

static inline float v16_sum(v16 x) {
  __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float v16_max_of(v16 x) {
  __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

static inline __m256 load8_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline v16 v16_load_bf16(const uint16_t *p) { return (v16){load8_bf16(p), load8_bf16(p + 8)}; }
static inline v16 v16_load_f16(const uint16_t *p) {
  return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
static inline __m256i bf16_bits(__m256 x) {  // in the low halves of eight words
  __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), _mm256_and_si256(high, _mm256_set1_epi32(1)));
  __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
static inline void v16_store_bf16(uint16_t *p, v16 x) {
  __m256i packed = _mm256_packus_epi32(bf16_bits(x.a), bf16_bits(x.b));  // within halves of the registers: put in order
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
static inline void v16_store_f16(uint16_t *p, v16 x) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, NEAREST));
  _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, NEAREST));
}

static inline w16 w16_load(const void *p) {
  return (w16){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}

static inline w16 w16_load_u16(const uint16_t *p) {
  return (w16){_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p + 1))};
}

static inline __m256 dot8_bf16(__m256 acc, __m256i w, __m256 low, __m256 high) {
  acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xFFFF0000))), high, acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), low, acc);
}
static inline v16 v16_dot_bf16(v16 acc, w16 w, uint32_t x) {
  __m256 low = _mm256_castsi256_ps(_mm256_set1_epi32((int)(x << 16)));
  __m256 high = _mm256_castsi256_ps(_mm256_set1_epi32((int)(x & 0xFFFF0000u)));
  return (v16){dot8_bf16(acc.a, w.a, low, high), dot8_bf16(acc.b, w.b, low, high)};
}

// `maddubs` would be half the work, but it saturates at 16 bits: 2 * 255 * 127 does not fit.
static inline __m256i dot8_u8s8(__m256i acc, __m256i w, __m256i even, __m256i odd) {
  __m256i evens = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xFF)), even);
  return _mm256_add_epi32(_mm256_add_epi32(acc, evens), _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd));
}
static inline i16 i16_dot_u8s8(i16 acc, w16 w, uint32_t x) {
#ifdef __AVXVNNI__
  const __m256i all = _mm256_set1_epi32((int)x);
  return (i16){_mm256_dpbusd_avx_epi32(acc.a, w.a, all), _mm256_dpbusd_avx_epi32(acc.b, w.b, all)};
#endif
  __m256i xs = _mm256_set1_epi32((int)x), even = _mm256_srai_epi16(_mm256_slli_epi16(xs, 8), 8), odd = _mm256_srai_epi16(xs, 8);
  return (i16){dot8_u8s8(acc.a, w.a, even, odd), dot8_u8s8(acc.b, w.b, even, odd)};
}
static inline i16 i16_set(int32_t x) { return (i16){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline v16 v16_from_i16(i16 x) { return (v16){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline w16 w16_low_nibbles(w16 w) {
  return (w16){_mm256_and_si256(w.a, _mm256_set1_epi8(15)), _mm256_and_si256(w.b, _mm256_set1_epi8(15))};
}
static inline w16 w16_high_nibbles(w16 w) { return w16_low_nibbles((w16){_mm256_srli_epi16(w.a, 4), _mm256_srli_epi16(w.b, 4)}); }
static inline __m256i bits8(__m256i w, int right, int mask) {
  return _mm256_and_si256(right < 0 ? _mm256_slli_epi32(w, -right) : _mm256_srli_epi32(w, right), _mm256_set1_epi8((char)mask));
}
static inline w16 w16_bits(w16 w, int right, int mask) { return (w16){bits8(w.a, right, mask), bits8(w.b, right, mask)}; }
static inline w16 w16_lookup(w16 w, const uint8_t *table) {
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  return (w16){_mm256_shuffle_epi8(entries, w.a), _mm256_shuffle_epi8(entries, w.b)};
}
static inline __m256 from_bits8(__m256i w, int first, int count) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w, first), _mm256_set1_epi32((1 << count) - 1)));
}
static inline v16 v16_from_bits(w16 w, int first, int count) { return (v16){from_bits8(w.a, first, count), from_bits8(w.b, first, count)}; }
static inline __m256 from_s8(__m256i w, int j) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * j), 24)); }
static inline v16 v16_from_s8(w16 w, int j) { return (v16){from_s8(w.a, j), from_s8(w.b, j)}; }
static inline __m256 lookup8(__m256i w, int first, const float *table) {
  const __m256i at = _mm256_srli_epi32(w, first);  // a permutation looks at three bits, the choice at the sign
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at), high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(w, 28 - first)));
}
static inline v16 v16_lookup(w16 w, int first, const float *table) { return (v16){lookup8(w.a, first, table), lookup8(w.b, first, table)}; }
static inline __m256i fifth_bits8(__m256i w, int first) {
  const __m256i bits = _mm256_and_si256(_mm256_srli_epi32(w, first), _mm256_set1_epi32(15));
  return _mm256_and_si256(_mm256_mullo_epi32(bits, _mm256_set1_epi32(0x02040810)), _mm256_set1_epi32(0x10101010));
}
static inline w16 w16_fifth_bits(w16 w, int first) { return (w16){fifth_bits8(w.a, first), fifth_bits8(w.b, first)}; }
static inline w16 w16_or(w16 a, w16 b) { return (w16){_mm256_or_si256(a.a, b.a), _mm256_or_si256(a.b, b.b)}; }

static inline w16 w16_load_halves(const void *low, const void *high) {
  return (w16){_mm256_loadu_si256((const __m256i *)low), _mm256_loadu_si256((const __m256i *)high)};
}

static inline __m256i dot8_u4s8(__m256i acc, __m256i w, __m256i x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));  // at most 2 * 15 * 128 in 16 bits
}
static inline i16 i16_dot_u4s8(i16 acc, w16 w, uint32_t x) {
#ifdef __AVXVNNI__
  return i16_dot_u8s8(acc, w, x);
#endif
  return (i16){dot8_u4s8(acc.a, w.a, _mm256_set1_epi32((int)x)), dot8_u4s8(acc.b, w.b, _mm256_set1_epi32((int)x))};
}
static inline __m256 from_e4m3(__m256i w, int j) {
  const __m256i top = _mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * j), 4);
  return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(top, _mm256_set1_epi32((int)0x87F00000))), _mm256_set1_ps(0x1p120f));
}
static inline v16 v16_from_e4m3(w16 w, int j) { return (v16){from_e4m3(w.a, j), from_e4m3(w.b, j)}; }

// Of part_sum (x_group.h): products of bytes, two added in 16 bits; of 16-bit numbers, two added in 32; their sums.
static inline w16 dot_pairs(w16 w, uint32_t x) {
  const __m256i xs = _mm256_set1_epi32((int)x);
  return (w16){_mm256_maddubs_epi16(w.a, xs), _mm256_maddubs_epi16(w.b, xs)};
}
static inline i16 dot_shorts(w16 w, uint32_t x) {
  const __m256i xs = _mm256_set1_epi32((int)x);
  return (i16){_mm256_madd_epi16(w.a, xs), _mm256_madd_epi16(w.b, xs)};
}
static inline w16 add_shorts(w16 x, w16 y) { return (w16){_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
static inline i16 add_ints(i16 x, i16 y) { return (i16){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
// Additions stay in the order they are written in: regrouped by the compiler, they take more registers than there are.
#define KEEP_ORDER(x) __asm__ volatile("" : "+x"((x).a), "+x"((x).b))
static inline w16 even_bytes(w16 w) {
  return (w16){_mm256_and_si256(w.a, _mm256_set1_epi16(0xFF)), _mm256_and_si256(w.b, _mm256_set1_epi16(0xFF))};
}
static inline w16 odd_bytes(w16 w) { return (w16){_mm256_srli_epi16(w.a, 8), _mm256_srli_epi16(w.b, 8)}; }

static inline void v16_store_i8(int8_t *p, v16 x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));  // 0-3 8-11 4-7 12-15
  words = _mm256_permute4x64_epi64(words, 0xD8);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// Sixteen whole numbers in 16 bits: of each four, numbers 0, 2, 1, 3.
static inline void store_wide(int16_t *p, v16 x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));  // 0-3 8-11 4-7 12-15
  words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(_mm256_permute4x64_epi64(words, 0xD8), 0xD8), 0xD8);
  _mm256_storeu_si256((__m256i *)p, words);
}

static inline v16 v16_first(int n, v16 x, v16 y) {
  __m256i count = _mm256_set1_epi32(n);
  __m256i a = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i b = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
  return (v16){_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(a)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(b))};
}

// Eight rows of eight words: by pairs, by fours, by halves of a register.
static inline void transpose8(__m256i *r) {
  __m256i pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      fours[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
      fours[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
    }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x20);
    r[4 + i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x31);
  }
}
static inline void w16_transpose(w16 *r) {
  __m256i quarters[2][2][8];
  for (int i = 0; i < 8; i++) {
    quarters[0][0][i] = r[i].a, quarters[0][1][i] = r[i].b;
    quarters[1][0][i] = r[8 + i].a, quarters[1][1][i] = r[8 + i].b;
  }
  for (int q = 0; q < 4; q++) transpose8(quarters[q / 2][q % 2]);
  for (int i = 0; i < 8; i++) {
    r[i] = (w16){quarters[0][0][i], quarters[1][0][i]};
    r[8 + i] = (w16){quarters[0][1][i], quarters[1][1][i]};
  }
}

static inline v16 v16_from_w16(w16 w) { return (v16){_mm256_castsi256_ps(w.a), _mm256_castsi256_ps(w.b)}; }
static inline v16 v16_from_low_bf16(w16 w) { return v16_from_w16((w16){_mm256_slli_epi32(w.a, 16), _mm256_slli_epi32(w.b, 16)}); }
static inline v16 v16_from_high_bf16(w16 w) {
  __m256i high = _mm256_set1_epi32((int)0xFFFF0000);
  return v16_from_w16((w16){_mm256_and_si256(w.a, high), _mm256_and_si256(w.b, high)});
}
static inline __m256 halves8_f16(__m256i w) {  // the low half of every word; the high half is 0
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(w, w), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
static inline v16 v16_from_low_f16(w16 w) {
  __m256i low = _mm256_set1_epi32(0xFFFF);
  return (v16){halves8_f16(_mm256_and_si256(w.a, low)), halves8_f16(_mm256_and_si256(w.b, low))};
}
static inline v16 v16_from_high_f16(w16 w) {
  return (v16){halves8_f16(_mm256_srli_epi32(w.a, 16)), halves8_f16(_mm256_srli_epi32(w.b, 16))};
}
