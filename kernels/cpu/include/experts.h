// Which rows each expert of a mixture multiplies: what norm_route writes, and products by expert read.
//
// A pair is a row t with its c-th chosen expert, number t C + c.
//
//   order   [T C] int32        the pairs sorted by their experts, those of one expert by their numbers
//   tasks   [1 + 3 N] int32    how many tasks there are, then of each the expert and the first and the end of its places in `order`:
//                              PIECE places at most, of one expert. N is at most min(X, T C) + T C / PIECE
//
// The work of a product is units of a task and a run of pairs of panels of its expert: only chosen experts are read, and one row with
// several experts is shared by all threads. Nothing of this changes a pair's bits.
#pragma once

#define PIECE 96      // places; a multiple of twelve and of 32
#define TILE_ROWS 32  // prepared rows in the area that each of up to 64 threads has in the scratch of a product
#include "product.h"
#include "thread_team.h"
_Static_assert(MAX_TOKENS <= TILE_ROWS, "a tile has its place");

struct task {
  int32_t expert, first, end;
};

static inline struct task task_of(const int32_t *tasks, int i) {
  return (struct task){tasks[1 + 3 * i], tasks[2 + 3 * i], tasks[3 + 3 * i]};
}

// The prepared rows of `tokens` places one after the other: where they are if that is one row, else copied to `area`. Of pair p it is row
// p / share of `prepared`.
static inline const uint8_t *gathered(const uint8_t *prepared, const int32_t *places, int tokens, int share, uint8_t *area) {
  if (tokens == 1) return prepared + places[0] / share * PREPARED;
  for (int r = 0; r < tokens; r++) {
    const uint8_t *row = prepared + places[r] / share * PREPARED;
    for (long i = 0; i < PREPARED; i += 64) v16_store((float *)(area + r * PREPARED + i), v16_load((const float *)(row + i)));
  }
  return area;
}
