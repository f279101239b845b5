// NF4: weight = scale * one of sixteen quantiles of the normal distribution (arXiv:2305.14314), by bitsandbytes' constants.
static const float VALUES[16] = NF4_VALUES;
#define FLOAT_TABLE 1  // nibble_table.h
