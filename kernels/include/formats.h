// Numbers of the formats of weights and KV caches, as `#define WEIGHT Q8_0` names them, and the blocks of the packed ones (GGUF).
//
// A plain C subset for C, CUDA C++ and Metal: macros only. tinyvllm/quant/formats.py has the same table for Python.
#pragma once

#define F32 0
#define F16 1
#define BF16 2
#define Q8_0 3
#define Q4_0 4
#define Q4_K 5
#define Q5_0 6

// Weights of a block, and bytes of a block in a file.
#define Q8_0_BLOCK 32
#define Q8_0_BLOCK_BYTES 34  // half scale; int8 q[32]
#define Q4_0_BLOCK 32
#define Q4_0_BLOCK_BYTES 18  // half scale; uint8 q[16]: low nibbles are elements 0 to 15, each plus 8
#define Q4_K_BLOCK 256
#define Q4_K_BLOCK_BYTES 144  // half d, dmin; 12 bytes of eight 6-bit scales and minimums; uint8 q[128]
