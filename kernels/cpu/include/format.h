// All that kernels know of one weight format, chosen by WEIGHT: one header a format in formats/. A new format is such a header, its number
// in kernels/include/formats.h and one line below; tinyvllm/quant/formats.py is the table for Python.
//
// A block is BLOCK consecutive weights of a row, the unit of files and panels; BLOCK is a multiple of 32 and divides the width of the
// matrix. (Of the float formats, which have no blocks in files, it is 32 weights.) A header defines
//
//     BLOCK, FILE_BLOCK_BYTES   weights and bytes of a block in a file
//     FIELDS(FIELD)             FIELD(bytes, word, flip) for each part of a block in file order. A panel has, for each block, one part
//                               after the other, each as [bytes / word][16 rows][word]; every 32-bit word is XORed with `flip`
//     unpack_block(x, block)    x[BLOCK] = the exact weights of a block in a file
//
// and for products, which walk through a panel block by block (product.h), either
//
//     STEP_COLUMNS              columns that a step multiplies: 1, or pairs; STEP_X_BYTES, what they take in a row of x, 4 if not defined
//     StepWeights, StepX        the step's numbers of sixteen rows of weights; of one row of x
//     store_x(row, i, x)        sixteen numbers of x from column i on
//     HALVES                    parts that a step is multiplied in, one after the other; 1 where it is not defined
//     load_weights(panel, half), load_x(x, half), multiply(acc, w, x)
//
// or, for floats of a few bits whose groups have a scale, with which the sum of a group is multiplied,
//
//     GROUPS 1
//     CHAINS                    runs of columns of a group that have a sum each
//     STEP_COLUMNS              columns that a word of sixteen rows holds
//     STEP_X_BYTES              what they take in a row of x, and store_x(row, i, x)
//     QUANTS                    where in a panel's block the words begin
//     dot_step(tokens, words, x, pitch, sum)      sum[t] += one step's products with row t
//     group_scale(block)        sixteen scales; a group is a block
//
// or, for integer weights, which meet x in groups of 32 numbers (x_group.h),
//
//     INTEGERS 1
//     PART                      weights that share a scale, 32 where it is not defined, or 16
//     ZERO_POINT                what is subtracted from every weight's unsigned integer
//     MAX_QUANT                 the largest of these integers, 255 where it is not defined
//     dot_part(tokens, block, p, x, pitch, sum)   sum[t] += integer dots of part p of a panel's block with group x of every row
//     part_scale(block, p)      sixteen scales: weight = scale * (integer - ZERO_POINT) - minimum
//     MINIMUMS 1, part_minimum(block, p)          sixteen minimums of a format that has them; its ZERO_POINT is 0
#pragma once
#include "lanes.h"
#include "numbers.h"
#include "six_bits.h"

// x_group.h, which needs the format's numbers, defines them.
struct x_group;
struct part_sum;
// sum[t] += dots of the four weights of each of sixteen rows in `w`, unsigned bytes, with numbers 4 j to 4 j + 3 of the group of row t.
INLINE void dot_word(const int tokens, w16 w, const struct x_group *x, int j, const long pitch, struct part_sum *sum);

#if WEIGHT == F32
#include "formats/f32.h"
#elif WEIGHT == F16
#include "formats/f16.h"
#elif WEIGHT == BF16
#include "formats/bf16.h"
#elif WEIGHT == Q8_0
#include "formats/q8_0.h"
#elif WEIGHT == Q4_0
#include "formats/q4_0.h"
#elif WEIGHT == Q5_0
#include "formats/q5_0.h"
#elif WEIGHT == Q4_1
#include "formats/q4_1.h"
#elif WEIGHT == Q5_1
#include "formats/q5_1.h"
#elif WEIGHT == Q2_K
#include "formats/q2_k.h"
#elif WEIGHT == Q3_K
#include "formats/q3_k.h"
#elif WEIGHT == Q4_K
#include "formats/q4_k.h"
#elif WEIGHT == Q5_K
#include "formats/q5_k.h"
#elif WEIGHT == Q6_K
#include "formats/q6_k.h"
#elif WEIGHT == IQ4_NL
#include "formats/iq4_nl.h"
#elif WEIGHT == IQ4_XS
#include "formats/iq4_xs.h"
#elif WEIGHT == MXFP4
#include "formats/mxfp4.h"
#elif WEIGHT >= INT2_G32 && WEIGHT <= INT8_G128
#include "formats/grouped.h"
#elif WEIGHT == FP8_G128
#include "formats/fp8_g128.h"
#elif WEIGHT == MXFP8
#include "formats/mxfp8.h"
#elif WEIGHT == NVFP4_G128
#include "formats/nvfp4_g128.h"
#elif WEIGHT == NF4
#include "formats/nf4.h"
#elif WEIGHT == BNB_FP4
#include "formats/bnb_fp4.h"
#else
#error "format.h: no panels of this WEIGHT"
#endif

// What several formats share. A text is included once, so it cannot be included by each of their headers.
#ifdef E4M3_QUANTS
#include "e4m3.h"
#endif
#ifdef FLOAT_TABLE
#include "nibble_table.h"
#endif

#ifndef INTEGERS
#define INTEGERS 0
#endif
#ifndef GROUPS
#define GROUPS 0
#endif
#ifndef HALVES
#define HALVES 1
#endif
#ifndef STEP_X_BYTES
#define STEP_X_BYTES 4
#endif
#ifndef PART
#define PART 32
#endif
#ifndef MINIMUMS
#define MINIMUMS 0
#endif
#ifndef ZERO_POINT
#define ZERO_POINT 0
#endif
#ifndef MAX_QUANT
#define MAX_QUANT 255
#endif
#include "x_group.h"

#define FILE_ROW_BYTES(width) ((long)(width) / BLOCK * FILE_BLOCK_BYTES)
#define PANEL_BLOCK_BYTES (16 * FILE_BLOCK_BYTES)
#define PANEL_BYTES(width) ((long)(width) / BLOCK * PANEL_BLOCK_BYTES)
