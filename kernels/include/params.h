// Arguments and switches that kernels of all backends take in the same form.
//
// A plain C subset for C, CUDA C++ and Metal. It includes the backend's own portable.h for the names of integer types.
#pragma once
#include "portable.h"

// NORM
#define RMS 0
#define LAYER 1
#define NO_NORM 2

// ACTIVATION
#define NO_ACTIVATION 0
#define GELU 1

// From the bias of a row to that of the next: 0 where all rows have one.
#ifndef BIAS_PITCH
#define BIAS_PITCH 0
#endif

// What one row of a batch asks of the sampler: 12 words, written by tinyvllm/sampling/sampler.py.
typedef struct {
  int seen_row, bias_row;  // rows of the tables `seen`, `prompted` and `bias`; NEUTRAL_ROW: none
  u32 seed_low, seed_high, position;
  float inverse_temperature;  // 0: greedy, no noise and no filters
  int top_k, top_p;           // V: off; in units of 1 / TOP_P_ONE, TOP_P_ONE: off
  float min_p;                // temperature * ln(min_p): how far below the largest logit; -inf: off
  float repetition, presence, frequency;
} SampleParams;

#define TOP_P_ONE (1 << 30)
