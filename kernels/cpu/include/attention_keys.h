// Sixteen keys of a cache of floats, eight from each of two places, as words of sixteen keys. store_key_words of attention_floats.h or attention_tiles.h
// stores word j of each of them.
#pragma once
#include "attention.h"

#if BY_TILES || BY_PAIRS
typedef uint32_t key_word;
#else
typedef float key_word;
#endif

#if !PACKED_CACHE
INLINE void store_key_words(key_word *kt, int j, w16 words);

// `lines` of the next tile are requested at each of QUARTERS steps.
INLINE void transpose_keys(const int lines, struct prefetch *prefetch, key_word *kt, const cached *low, const cached *high) {
  const int words = D * (int)sizeof(cached) / 4;
  for (int j = 0; j < words; j += 16) {
    const int at = min(j, words - 16);  // words % 16 may be 8: the last sixteen once more rather than reading beyond the row
    w16 r[16];
    fetch(prefetch, lines);
    UNROLL for (int i = 0; i < 8; i++) r[i] = w16_load((const uint32_t *)(low + i * D) + at);
    fetch(prefetch, lines);
    UNROLL for (int i = 0; i < 8; i++) r[8 + i] = w16_load((const uint32_t *)(high + i * D) + at);
    w16_transpose(r);
    fetch(prefetch, lines);
    UNROLL for (int i = 0; i < 16; i++) {
      if (i == 8) fetch(prefetch, lines);
      store_key_words(kt, at + i, r[i]);
    }
  }
}
#endif
