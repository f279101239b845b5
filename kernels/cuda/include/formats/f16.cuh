// F16: IEEE half precision.
#pragma once
#define QUANTIZED 0
#define MMA mma_f16
#define WARPGROUP_MMA warpgroup_mma_f16  // hopper.cuh
