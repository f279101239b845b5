// Rows of a unit of work that have the same low-rank adapter: they share what is read of its matrices (lora_shrink.metal, lora_bias.metal).
#pragma once
#include "gpu.h"

// Rows first to end - 1; rank 0 if they have no adapter, or one that does not change the product.
struct Run {
  int adapter, rank, first, end;
};
// The run that begins at row `first`, of rows up to `last` - 1.
INLINE Run run_at(device const int *adapters, device const int *ranks, int first, int last) {
  Run run;
  const int adapter = adapters[first];
  run.adapter = adapter - 1, run.first = first, run.end = first + 1;
  run.rank = adapter > 0 ? ranks[adapter - 1] : 0;
  while (run.end < last && adapters[run.end] == adapter) run.end++;
  return run;
}
INLINE bool contains(Run run, int row) { return row >= run.first && row < run.end; }
