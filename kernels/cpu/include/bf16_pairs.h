// Pairs of bfloat16 for attention_pairs.h and attention_tiles.h, in AVX-512's instructions.
#pragma once
#include "lanes.h"

#ifdef BF16_PAIRS

// 32 numbers in two halves, rounded.
INLINE w16 rounded_pairs(v16 a, v16 b) { return (w16)_mm512_cvtne2ps_pbh(b, a); }

// Numbers of `a` and of `b`, 32 each, as words with one of each. to[0] has 0 to 3, 8 to 11, 16 to 19 and 24 to 27, which saves a step for each;
// unpair puts sums of such words in order.
INLINE void pair(w16 *to, w16 a, w16 b) { to[0] = _mm512_unpacklo_epi16(a, b), to[1] = _mm512_unpackhi_epi16(a, b); }

INLINE void unpair(float *to, const float *sums) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const __m512d a = (__m512d)v16_load(sums), b = (__m512d)v16_load(sums + 16);
  v16_store(to, (v16)_mm512_permutex2var_pd(a, low, b));
  v16_store(to + 16, (v16)_mm512_permutex2var_pd(a, high, b));
}

// The same of sixteen numbers, in order.
INLINE w16 pair_half(const uint16_t *a, const uint16_t *b) {
  return _mm512_or_si512(w16_load_u16(a), _mm512_slli_epi32(w16_load_u16(b), 16));
}

// The sums of `width` features, paired by `pair` and pair_half, in order.
INLINE void unpair_all(const int width, float *out, const float *sums) {
  int d = 0;
  for (; d + 32 <= width; d += 32) unpair(out + d, sums + d);
  if (d < width) v16_store(out + d, v16_load(sums + d));
}

#ifdef E4M3_PAIRS
// Of four e4m3 numbers a word, the first and third, and the second and fourth, as words of bfloat16, which holds them exactly: to `to` and
// `apart` words after it.
INLINE void store_e4m3(uint32_t *to, const long apart, w16 words) {
  w16 even, odd;
  e4m3_pairs(words, &even, &odd);
  _mm512_store_si512(to, even);
  _mm512_store_si512(to + apart, odd);
}

// Pairs of neighbours in the order that store_e4m3 gives: of each two words the first and third number, then the second and fourth.
INLINE w16 order_of_e4m3(w16 words) {
  return _mm512_shuffle_epi8(words, _mm512_set4_epi32(0x0F0E0B0A, 0x0D0C0908, 0x07060302, 0x05040100));
}
#endif
#endif
