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
#define Q4_1 7
#define Q5_1 8
#define Q2_K 9
#define Q3_K 10
#define Q5_K 11
#define Q6_K 12
#define IQ4_NL 13
#define IQ4_XS 14
#define MXFP4 15
#define FP8_G128 16
#define MXFP8 17
#define NVFP4_G128 18
#define NF4 19
#define BNB_FP4 20

// Integers in groups with a scale and an offset each: 1000 times the bits, plus the group's columns.
#define INT2_G32 2032
#define INT2_G64 2064
#define INT2_G128 2128
#define INT3_G32 3032
#define INT3_G64 3064
#define INT3_G128 3128
#define INT4_G32 4032
#define INT4_G64 4064
#define INT4_G128 4128
#define INT5_G32 5032
#define INT5_G64 5064
#define INT5_G128 5128
#define INT6_G32 6032
#define INT6_G64 6064
#define INT6_G128 6128
#define INT8_G32 8032
#define INT8_G64 8064
#define INT8_G128 8128

// Weights of a block, and bytes of a block in a file.
#define Q8_0_BLOCK 32
#define Q8_0_BLOCK_BYTES 34  // half scale; int8 q[32]
#define Q4_0_BLOCK 32
#define Q4_0_BLOCK_BYTES 18  // half scale; uint8 q[16]: low nibbles are elements 0 to 15, each plus 8
#define Q4_K_BLOCK 256
#define Q4_K_BLOCK_BYTES 144  // half d, dmin; 12 bytes of eight 6-bit scales and minimums; uint8 q[128]

// The numbers that four bits stand for, as unsigned bytes: of IQ4_NL and IQ4_XS with zero point 128; of MXFP4 twice 0, .5, 1, 1.5, 2, 3, 4, 6
// and their negatives, with zero point 12.
#define IQ4_VALUES {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}
#define IQ4_NUMBERS {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}
#define FP4_VALUES {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}

// bitsandbytes' numbers of four bits.
#define NF4_VALUES        \
  {-1.0f,                 \
   -0.6961928009986877f,  \
   -0.5250730514526367f,  \
   -0.39491748809814453f, \
   -0.28444138169288635f, \
   -0.18477343022823334f, \
   -0.09105003625154495f, \
   0.0f,                  \
   0.07958029955625534f,  \
   0.16093020141124725f,  \
   0.24611230194568634f,  \
   0.33791524171829224f,  \
   0.44070982933044434f,  \
   0.5626170039176941f,   \
   0.7229568362236023f,   \
   1.0f}
#define BNB_FP4_VALUES                                                                                                    \
  {0.0f,  0.0052083334885537624f,  0.6666666865348816f,  1.0f,  0.3333333432674408f,  0.5f,  0.1666666716337204f,  0.25f, \
   -0.0f, -0.0052083334885537624f, -0.6666666865348816f, -1.0f, -0.3333333432674408f, -0.5f, -0.1666666716337204f, -0.25f}
