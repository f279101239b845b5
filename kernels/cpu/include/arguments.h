// Arguments that a kernel takes only if BIAS or RESIDUAL is set: what its list of parameters says, and a null pointer under their names
// where it takes none. The last header of a kernel, since `bias` and `residual` are macros after it.
#pragma once
#if BIAS
#define BIAS_ARGUMENT const float *bias,
#else
#define BIAS_ARGUMENT
#define bias ((const float *)0)
#endif
#if RESIDUAL
#define RESIDUAL_ARGUMENT const float *residual,
#else
#define RESIDUAL_ARGUMENT
#define residual ((const float *)0)
#endif
