// attention_decode: the stripes of a threadgroup's SIMD groups are merged, by way of threadgroup memory, MERGED_ROWS rows at a time.
//
// Constants in addition to shared_reads.h's: MERGED_ROWS and MERGED, as attention_decode.metal says.
#pragma once
#include "shared_reads.h"

struct Exchange {
  threadgroup float4 *o;       // [SIMDS][MERGED_ROWS][PIECES]
  threadgroup float2 *stats;   // [SIMDS][PADDED_ROWS]: maximum, sum; then the factors of the rows so far and of the SIMD group's rows
  threadgroup float2 *totals;  // [MAX_MEMBERS][PADDED_ROWS]: maximum, sum of all stripes so far
};
INLINE threadgroup float4 *row_of(Exchange exchange, int simd, int row) { return exchange.o + (simd * MERGED_ROWS + row) * PIECES; }
INLINE threadgroup float2 *stats_of(Exchange exchange, int simd, int row) { return exchange.stats + simd * PADDED_ROWS + row; }

// What a thread has merged: pieces of rows, all members' rows in turn; and maximum and sum of one row of one member.
struct Merged {
  float4 o[MERGED];
  float max_score, sum;
};
INLINE void clear(thread Merged &merged) {
  merged.max_score = NO_SCORE, merged.sum = 0.0f;
#pragma unroll
  for (int m = 0; m < MERGED; m++) merged.o[m] = float4(0.0f);
}

struct Item {
  int member, row, piece;
};
INLINE Item item_of(thread const Unit &unit, int thread_index, int m) {
  const int i = thread_index + m * THREADS, line = i / PIECES;
  Item item;
  item.member = line & (slots_of(unit) - 1), item.row = line >> unit.shift, item.piece = i % PIECES;
  return item;
}

INLINE void write_stats(Exchange exchange, thread const Sums &sums, int simd, thread const Lane &lane) {
  if (lane.side == 0 && lane.along % SHARE == 0) *stats_of(exchange, simd, lane.row) = float2(sums.max_score, sums.sum);
}

INLINE void write_rows(Exchange exchange, thread const Sums &sums, int base, int simd, thread const Lane &lane) {
  if (lane.side > 0) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (r < base || r >= base + MERGED_ROWS) continue;
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (has_piece(lane, e)) row_of(exchange, simd, r - base)[piece_of(lane, e)] = sums.o[r][e];
  }
}

// A row's maximum and sum over `count` stripes, by a thread of its own; afterwards `stats` holds the factors.
INLINE void merge_stats(thread Merged &merged, Exchange exchange, thread const Unit &unit, int count, int thread_index) {
  const int member = thread_index / PADDED_ROWS, row = thread_index % PADDED_ROWS;
  if (member >= unit.size) return;
  for (int s = 0; s < count; s++) {
    threadgroup float2 *place = stats_of(exchange, s * slots_of(unit) + member, row);
    const float2 stats = *place;
    const float max_score = max(merged.max_score, stats.x);
    const float earlier = rescale_of(merged.max_score, max_score), rescale = rescale_of(stats.x, max_score);
    merged.sum = fma(stats.y, rescale, merged.sum * earlier), merged.max_score = max_score;
    *place = float2(earlier, rescale);
  }
  exchange.totals[thread_index] = float2(merged.max_score, merged.sum);
}

// Merges the stripes that SIMD groups have now, `count` for each member, with those so far. All threads must call it, and a barrier is
// needed before the exchange is used again.
INLINE void merge(thread Merged &merged, Exchange exchange, thread const Sums &sums, thread const Unit &unit, int heads, int count,
                  int thread_index, int simd, thread const Lane &lane) {
  write_stats(exchange, sums, simd, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  merge_stats(merged, exchange, unit, count, thread_index);
  for (int base = 0; base < heads; base += MERGED_ROWS) {
    if (base > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    write_rows(exchange, sums, base, simd, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int m = 0; m < MERGED; m++) {
      const Item item = item_of(unit, thread_index, m);
      if (item.row < base || item.row >= min(base + MERGED_ROWS, heads) || item.member >= unit.size) continue;
      for (int s = 0; s < count; s++) {
        const int from = s * slots_of(unit) + item.member;
        const float2 factors = *stats_of(exchange, from, item.row);
        merged.o[m] = fma(row_of(exchange, from, item.row - base)[item.piece], float4(factors.y), merged.o[m] * factors.x);
      }
    }
  }
}
