// NF4: weight = scale * one of sixteen quantiles of the normal distribution (arXiv:2305.14314), by bitsandbytes' constants (nibble_table.cuh).
#pragma once
#define FLOAT_TABLE NF4_VALUES
#define HEAD_BYTES 4
