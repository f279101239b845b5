// Which rows of a step each of WORLD ranks computes alone: neighbouring ones, about as many each.
#pragma once

static inline int first_row_of(int rank, int rows) { return (int)((long)rank * rows / WORLD); }
static inline int rows_of(int rank, int rows) { return first_row_of(rank + 1, rows) - first_row_of(rank, rows); }
