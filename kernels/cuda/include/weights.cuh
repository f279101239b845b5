// The weights' format, chosen by WEIGHT: one header a format holds everything that kernels know of it. To add a format, add its number to
// kernels/include/formats.h, its header to formats/, and a line below.
//
// A header of a packed format defines
//
//   QUANTIZED 1        packed_weights.cuh has the rest; of integers, with x rounded to int8 in groups of 32, quantized_weights.cuh
//   PART               weights that share a scale within a step: 32 where it is not defined, or 16
//   MINIMUMS 1         where it has minimums: weight = scale * (integer - ZERO_POINT) - minimum
//   SCALED_QUANTS 1    PART is 16, but integers are multiplied by their part's scale before the dot, so that scale[0] is the block's
//   BLOCK, FILE_BLOCK_BYTES   columns of a block, 32 to 256, and its bytes in a file
//   ZERO_POINT         what is subtracted from every integer, by the sums of x
//   STEPS_AHEAD        steps that stream.cuh keeps in flight, in registers: 8 or 16
//   CHUNKS, Chunk      of a block, what a lane holds of the quants, if they are no part of the record: uint4, a run of 32 bytes of a row's
//                      block, or uint2, one of 16 bytes. Words are of row g, g + 8, g, g + 8, of bytes 4t..4t+3 of the run, then from its
//                      byte 16 on
//   last_step(i)       the last step of a block that reads chunk i: its registers are then loaded with the next block's
//   WORDS, RecordWord  of a block, for one g, everything else: a word of two halves, of rows g and g + 8, for each field of two bytes; a word
//                      of each row for every four bytes of the others. RecordWord is u32, or u16 for pairs of bytes
//   unpack_step(w, chunk, record, step, t)   StepWeights (step_weights.cuh) of a step of a block, for a lane with this t. chunk[i] and
//                      record[i] may be registers, shared or global memory; stream.cuh calls it with constant steps
//   file_chunk(i), file_word(i), file_word_bytes(i)   where a row's block in a file has the run of chunk i, and its bytes of record word i
//   NIBBLES_AT         in place of the constants of a block of 32 weights of four bits (nibble_blocks.cuh)
//   RUNS_AT            in place of Chunk, last_step and file_chunk, where the quants are runs of 32 bytes from this byte of a block on, of which
//                      each serves the same number of steps, one after the other
//   RECORD_HALVES      in place of RecordWord and of the two functions of words, where a block begins with that number of fields of two
//                      bytes, and the record has words of four bytes after them
//   HEAD_BYTES         in place of these and of WORDS, where the record is the first field of a block: 4, a float32 scale, which
//                      row_scales(record) gives, or 1, an exponent
//
// One of floats of a few bits defines HEAD_BYTES, and E4M3_QUANTS 1 and what e4m3_weights.cuh lacks, or FLOAT_TABLE (nibble_table.cuh). Products with them are in
// small_float_weights.cuh and table_weights.cuh.
//
// Tiles [O/16][I/BLOCK][CHUNKS][32 lanes] of Chunk, then records [O/16][I/BLOCK][WORDS][8 g] of RecordWord.
//
// A header of 16-bit numbers defines QUANTIZED 0, MMA and WARPGROUP_MMA; float_weights.cuh has the rest. For embed.cu, these headers, F32's
// and quantized_weights.cuh define four consecutive numbers of a matrix of `width` columns, `column` a multiple of 4:
//
//   read_row(table, width, row, column) -> float4            the matrix in rows, as in files
//   read_tile(table, rows, width, row, column) -> float4     the matrix in tiles (product.cuh); not F32
//
// A header of a format includes nothing: the sources are joined with each header at its first mention, be it in an #if that is off.
#pragma once
#include "cells.cuh"
#include "formats.cuh"
#include "step_weights.cuh"

#if WEIGHT == F32
#include "formats/f32.cuh"
#elif WEIGHT == F16
#include "formats/f16.cuh"
#elif WEIGHT == BF16
#include "formats/bf16.cuh"
#elif WEIGHT == Q8_0
#include "formats/q8_0.cuh"
#elif WEIGHT == Q4_0
#include "formats/q4_0.cuh"
#elif WEIGHT == Q4_1
#include "formats/q4_1.cuh"
#elif WEIGHT == Q5_0
#include "formats/q5_0.cuh"
#elif WEIGHT == Q5_1
#include "formats/q5_1.cuh"
#elif WEIGHT == Q2_K
#include "formats/q2_k.cuh"
#elif WEIGHT == Q3_K
#include "formats/q3_k.cuh"
#elif WEIGHT == Q4_K
#include "formats/q4_k.cuh"
#elif WEIGHT == Q5_K
#include "formats/q5_k.cuh"
#elif WEIGHT == Q6_K
#include "formats/q6_k.cuh"
#elif WEIGHT == IQ4_NL
#include "formats/iq4_nl.cuh"
#elif WEIGHT == IQ4_XS
#include "formats/iq4_xs.cuh"
#elif WEIGHT == MXFP4
#include "formats/mxfp4.cuh"
#elif WEIGHT == FP8_G128
#include "formats/fp8_g128.cuh"
#elif WEIGHT == MXFP8
#include "formats/mxfp8.cuh"
#elif WEIGHT == NVFP4_G128
#include "formats/nvfp4_g128.cuh"
#elif WEIGHT == NF4
#include "formats/nf4.cuh"
#elif WEIGHT == BNB_FP4
#include "formats/bnb_fp4.cuh"
#elif WEIGHT >= 2000
#include "formats/grouped.cuh"
#else
#error "weights: WEIGHT has no header in formats/"
#endif

#include "block_fields.cuh"
#include "nibble_blocks.cuh"
#include "e4m3_weights.cuh"
#include "nibble_table.cuh"
#include "runs.cuh"

#ifndef PART
#define PART 32
#endif
#ifndef MINIMUMS
#define MINIMUMS 0
#endif
#ifndef SCALED_QUANTS
#define SCALED_QUANTS 0
#endif

#ifndef FLOAT_QUANTS
#define FLOAT_QUANTS 0
#endif
#define INTEGERS (QUANTIZED && !FLOAT_QUANTS)
#ifdef FLOAT_TABLE
#define SCALED_X 1  // x has scales, by groups of 32 columns
#else
#define SCALED_X INTEGERS
#endif

#include "packed_weights.cuh"
#ifdef QUANTIZED
#if INTEGERS
#include "quantized_weights.cuh"
#elif SCALED_X
#include "table_weights.cuh"
#elif FLOAT_QUANTS
#include "small_float_weights.cuh"
#else
#include "float_weights.cuh"
#endif
#endif
