// attention_decode: records of a sequence's partitions, how threadgroups hand them over, and how they are merged.
//
// Constants in addition to decode_tile.h's: PARTITIONS, RECORD, OWN_NUMBERS and IN_FLIGHT, as attention_decode.metal says.
//
// Metal 3 has no order between threadgroups, so the count says only that all records have been stored, not that they have arrived. Each
// word says itself whether it has arrived: 0 is "not yet", which no number is, as +0.0 is written as -0.0. A thread that reads 0 reads
// again.
//   - Guaranteed: Metal's atomics are C++'s, relaxed. Those on one address have one order, the same for all threadgroups, and a
//     read-modify-write takes the newest value: so a word is read again by such an operation. threadgroup_barrier(mem_device) keeps the
//     stores before it ahead of the count. Between two launches is a barrier for everything, so the next launch finds zeros.
//   - Relied upon: a store that has been executed reaches other threadgroups in reasonable time, as C++ recommends, without further help.
//     A threadgroup that is waited for has counted, so it has started, and it waits for none.
//
// A word that is data and readiness in one is that of single-pass scans (Merrill and Garland, "Single-pass Parallel Prefix Scan with
// Decoupled Look-back", 2016), without their waiting for threadgroups that may not have started.
#pragma once
#include "decode_tile.h"

INLINE void store_word(device atomic_uint *word, float value) {
  const uint bits = as_type<uint>(value);
  atomic_store_explicit(word, bits == 0 ? 0x80000000u : bits, memory_order_relaxed);
}
INLINE uint load_word(device atomic_uint *word) { return atomic_load_explicit(word, memory_order_relaxed); }
// A word's number as soon as it has arrived; `bits` is what was read of it before. Afterwards the word is 0.
INLINE float await_word(device atomic_uint *word, uint bits) {
  while (bits == 0) bits = atomic_fetch_or_explicit(word, 0u, memory_order_relaxed);
  atomic_store_explicit(word, 0u, memory_order_relaxed);
  return as_type<float>(bits);
}

INLINE void store_record(device atomic_uint *record, float4 o, float2 stats, int row, int piece) {
#pragma unroll
  for (int i = 0; i < 4; i++) store_word(record + row * D + piece * 4 + i, o[i]);
  if (piece == 0) store_word(record + ROWS * D + 2 * row, stats.x), store_word(record + ROWS * D + 2 * row + 1, stats.y);
}

// Whether this threadgroup is the last of `expected` to count.
INLINE bool is_last(device atomic_uint *counter, int expected) {
  const int before = (int)atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
  if (before == expected - 1) atomic_store_explicit(counter, 0u, memory_order_relaxed);
  return before == expected - 1;
}

// The factors of partitions in each row, and one over the row's sum.
struct PartitionFactors {
  threadgroup float *rescales;  // [ROWS][PARTITIONS]
  threadgroup float *inverses;  // [ROWS]
};
INLINE float max_of_lanes(float x) {
#pragma unroll
  for (int apart = 16; apart >= 1; apart /= 2) x = max(x, simd_shuffle_xor(x, (ushort)apart));
  return x;
}
INLINE float sum_of_lanes(float x) {
#pragma unroll
  for (int apart = 16; apart >= 1; apart /= 2) x += simd_shuffle_xor(x, (ushort)apart);
  return x;
}

// Maximums and sums of partitions `first` to `last`: a lane has a partition, a SIMD group a row.
INLINE void merge_record_stats(PartitionFactors factors, device atomic_uint *records, int heads, int first, int last, int simd, int lane) {
  const bool exists = lane >= first && lane <= last;
  for (int r = simd; r < heads; r += SIMDS) {
    float max_score = NO_SCORE, sum = 0.0f;
    if (exists) {
      device atomic_uint *stats = records + lane * RECORD + ROWS * D + 2 * r;
      const uint max_bits = load_word(stats), sum_bits = load_word(stats + 1);
      max_score = await_word(stats, max_bits), sum = await_word(stats + 1, sum_bits);
    }
    const float total_max = max_of_lanes(max_score), rescale = exists ? rescale_of(max_score, total_max) : 0.0f;
    const float inverse = 1.0f / sum_of_lanes(exists ? sum * rescale : 0.0f);
    if (exists) factors.rescales[r * PARTITIONS + lane] = rescale;
    if (lane == 0) factors.inverses[r] = inverse;
  }
}

// Merges partitions `first` to `last` into `numbers` numbers of `out`, rows of D one after another.
INLINE void merge_record_values(device float *out, PartitionFactors factors, device atomic_uint *records, int numbers, int first, int last,
                                int thread_index) {
  float o[OWN_NUMBERS];
#pragma unroll
  for (int m = 0; m < OWN_NUMBERS; m++) o[m] = 0.0f;
  for (int p = first; p <= last; p += IN_FLIGHT) {
    uint bits[OWN_NUMBERS][IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < OWN_NUMBERS * IN_FLIGHT; k++) {
      const int m = k / IN_FLIGHT, j = k % IN_FLIGHT, i = thread_index + m * THREADS;
      bits[m][j] = i < numbers && p + j <= last ? load_word(records + (p + j) * RECORD + i) : 0;
    }
#pragma unroll
    for (int k = 0; k < OWN_NUMBERS * IN_FLIGHT; k++) {
      const int m = k / IN_FLIGHT, j = k % IN_FLIGHT, i = thread_index + m * THREADS;
      if (i >= numbers || p + j > last) continue;
      o[m] = fma(await_word(records + (p + j) * RECORD + i, bits[m][j]), factors.rescales[i / D * PARTITIONS + p + j], o[m]);
    }
  }
#pragma unroll
  for (int m = 0; m < OWN_NUMBERS; m++) {
    const int i = thread_index + m * THREADS;
    if (i < numbers) out[i] = o[m] * factors.inverses[i / D];
  }
}
