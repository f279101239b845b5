// The weights' format, chosen by WEIGHT: one header a format holds everything that kernels know of it. To add a format, add its number to
// kernels/include/formats.h, its header to formats/, and a line below.
//
// A header defines, for embed.cu, four consecutive numbers of a matrix of `width` columns, `column` a multiple of 4:
//
//   read_row(table, width, row, column) -> float4            the matrix in rows, as in files
//   read_tile(table, rows, width, row, column) -> float4     the matrix in tiles (product.cuh); not F32
//
// For products with tiles, where a step is sixteen rows by 32 columns (product.cuh); not F32:
//
//   QUANTIZED      0: x is rounded to the weights' format; float_weights.cuh has the rest. 1: x is rounded to int8 in blocks of 32;
//                  quantized_weights.cuh has the rest, and the header also defines:
//   STEP_BYTES     of a step, without scales
//   LANE_BYTES     of a step, for one lane
//   STEPS_AHEAD    steps that stream.cuh keeps in flight, in registers
//   LaneWords, load_words(lane_bytes), shared_words(lane_bytes)
//                  a lane's words of a step, and how they are loaded from global and from shared memory
//   quants_of(a, words)
//                  the lane's A operand of an int8 mma: the quants plus ZERO_POINT
//   ZERO_POINT     what quants_of adds to the quants; the product subtracts it again by the sums of x
//   SUMS           whether the product reads the sums of x: for a zero point, or for minimums
//   Scales         a lane's scales of a step, with load_scales, scales_of_lane, unpack_scales and add_dots: BlockScales (block_scales.cuh)
//                  for one scale a row and block. A format with minimums has a type of its own that also holds those, and an add_dots
//                  that subtracts them times the sums of x; scales of super-blocks are expanded to blocks of 32 when tiles are packed.
//                  The scales of all steps are stored after the steps of the whole matrix.
//
// A header of a format includes nothing: the sources are joined with each header at its first mention, be it in an #if that is off.
#pragma once
#include "formats.cuh"
#include "block_scales.cuh"

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
#else
#error "weights: WEIGHT has no header in formats/"
#endif

#ifdef QUANTIZED
#if QUANTIZED
#include "quantized_weights.cuh"
#else
#include "float_weights.cuh"
#endif
#endif
