// Which rows of a step each of WORLD ranks computes alone: neighbouring ones, about as many each (kernels/cpu/include/rank_rows.h).
#pragma once
#include "each_rank.cuh"
#include "gpu.cuh"

DEVICE int first_row_of(int rank, int rows) { return (int)((s64)rank * rows / WORLD); }
DEVICE int rows_of(int rank, int rows) { return first_row_of(rank + 1, rows) - first_row_of(rank, rows); }
