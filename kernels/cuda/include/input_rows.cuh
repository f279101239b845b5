// The arguments of entries that norm or gather rows of x, if NORM and GATHER say so.
#pragma once

#if NORM
#define NORM_ARGUMENT const float *norm,
#else
#define NORM_ARGUMENT
#endif
#if GATHER
#define INDEX_ARGUMENT const int *row_index,
#else
#define INDEX_ARGUMENT
#endif
