// BNB_FP4: weight = scale * bitsandbytes' float of four bits: twelfths, the smallest a subnormal of its own.
static const float VALUES[16] = BNB_FP4_VALUES;
#define FLOAT_TABLE 1  // nibble_table.h
