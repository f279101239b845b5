// The scales and minimums of Q4_K and Q5_K: eight of 6 bits each in twelve bytes. Scales and minimums 0 to 3 are the low 6 bits of bytes 0 to
// 3 and 4 to 7; those of 4 to 7 have their low nibbles in bytes 8 to 11 (scales low, minimums high), and their two high bits in the top bits
// of bytes 0 to 3 and 4 to 7. weight = d * scale * q - dmin * minimum.
#pragma once
#include "lanes.h"
#include "numbers.h"

INLINE int six_bit_scale(const uint8_t *b, int p) { return p < 4 ? b[p] & 63 : (b[p + 4] & 15) | (b[p - 4] >> 6) << 4; }
INLINE int six_bit_minimum(const uint8_t *b, int p) { return p < 4 ? b[p + 4] & 63 : b[p + 4] >> 4 | (b[p] >> 6) << 4; }

// Of sixteen rows whose twelve bytes are three words [3][16][4] of a panel: scale p, minimum p. Four are made at a
// time, which a compiler does once where it sees several of them.
INLINE w16 four_scales(const uint8_t *words, int upper) {
  return upper ? w16_or(w16_bits(w16_load(words + 128), 0, 15), w16_bits(w16_load(words), 2, 48)) : w16_bits(w16_load(words), 0, 63);
}
INLINE w16 four_minimums(const uint8_t *words, int upper) {
  return upper ? w16_or(w16_bits(w16_load(words + 128), 4, 15), w16_bits(w16_load(words + 64), 2, 48))
               : w16_bits(w16_load(words + 64), 0, 63);
}
INLINE v16 six_bit_scales(const uint8_t *words, int p) { return v16_from_bits(four_scales(words, p >= 4), p % 4 * 8, 8); }
INLINE v16 six_bit_minimums(const uint8_t *words, int p) { return v16_from_bits(four_minimums(words, p >= 4), p % 4 * 8, 8); }
