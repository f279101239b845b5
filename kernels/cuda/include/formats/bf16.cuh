// BF16: bfloat16.
#pragma once
#define QUANTIZED 0
#define MMA mma_bf16
#define WARPGROUP_MMA warpgroup_mma_bf16  // hopper.cuh
