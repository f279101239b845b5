// The slices of a product's columns (docs/decisions/0040): the sum of an output is a tree over ALL_SLICES slices,
//
//     ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
//
// so that 1, 2, 4 or 8 ranks, each with a run of neighbouring slices, add the same numbers in the same order. Slice s begins at column
// floor(s U / 8) UNIT of all ALL_I = U UNIT columns; slices may be uneven, and of few columns some are empty (a sum of 0).
//
//     SLICES        how many of them this product adds: 8, 4, 2 or 1; without it the product has one accumulator
//     FIRST_SLICE   the first of them, 0 if not defined; a multiple of SLICES
//     ALL_I         columns of the whole product, I if not defined; I is what SLICES slices have
//     BEFORE        columns of the panels' first block that belong to an earlier slice, 0 if not defined: blocks of 256 are not cut
//
// UNIT is the format's block; where that gives fewer than 8 units, 32 columns, the group that integers round x in (a slice that begins
// within a block costs some 6% of the product). Floats in groups are never cut: their runs share a scale. A kernel that reads x as another
// product does defines UNIT as that of the other's format.
#pragma once
#ifndef UNIT
#include "format.h"
#endif

enum { ALL_SLICES = 8 };

#ifndef SLICES
#define SLICES 1
#define FIRST_SLICE 0
#define WHOLE 1  // one accumulator over all columns
#else
#define WHOLE 0
#endif
#ifndef FIRST_SLICE
#define FIRST_SLICE 0
#endif
#ifndef ALL_I
#define ALL_I I
#endif
#ifndef BEFORE
#define BEFORE 0
#endif

#define WAITING (SLICES > 4 ? 3 : SLICES > 2 ? 2 : 1)  // sums of slices that wait for their neighbours
#ifndef UNIT
#define UNIT (GROUPS || ALL_I / BLOCK >= ALL_SLICES ? BLOCK : 32)
#endif
#define PANEL_COLUMNS ((BEFORE + I + BLOCK - 1) / BLOCK * BLOCK)

// Where slice `slice` of this product begins, from its first column on.
INLINE long slice_column(int slice) {
  const long units = ALL_I / UNIT, first = FIRST_SLICE * units / ALL_SLICES;
  return WHOLE ? (long)slice * I : ((FIRST_SLICE + slice) * units / ALL_SLICES - first) * UNIT;
}
