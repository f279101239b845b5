// Rows of a unit of work that have the same low-rank adapter: they share what is read of its matrices (lora_shrink.cu, lora_bias.cu).
#pragma once
#include "gpu.cuh"

// Rows first to end - 1; rank 0 if they have no adapter, or one that does not change the product.
struct Run {
  int adapter, rank, first, end;
};
// The run that begins at row `first`, of rows up to `last` - 1.
DEVICE Run run_at(const int *adapters, const int *ranks, int first, int last) {
  const int adapter = adapters[first];
  int end = first + 1;
  while (end < last && adapters[end] == adapter) end++;
  return {adapter - 1, adapter > 0 ? ranks[adapter - 1] : 0, first, end};
}
DEVICE bool contains(const Run &run, int row) { return row >= run.first && row < run.end; }
