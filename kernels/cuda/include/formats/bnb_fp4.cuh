// BNB_FP4: weight = scale * a float of four bits, by bitsandbytes' constants (nibble_table.cuh).
#pragma once
#define FLOAT_TABLE BNB_FP4_VALUES
#define HEAD_BYTES 4
