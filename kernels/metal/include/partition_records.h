// attention_decode, attention_merge: records of a sequence's partitions, how they are handed over, and how they are merged.
//
// Constants in addition to partitions.h's: LAUNCHES. IN_FLIGHT is defined here.
//
// 2: attention_decode stores the records, the next launch, attention_merge, merges them. Between two launches is a barrier for everything.
//
// 1: the last threadgroup of attention_decode to finish a sequence's part merges it. Metal 3 has no order between threadgroups, so the count
// says only that all records have been stored, not that they have arrived. Each word says itself whether it has arrived: 0 is "not yet",
// which no number is, as +0.0 is written as -0.0. A thread that reads 0 reads again.
//   - Guaranteed: Metal's atomics are C++'s, relaxed. Those on one address have one order, the same for all threadgroups, and a
//     read-modify-write takes the newest value. A word is read by an exchange for 0, which is never a plain load to a compiler, as a
//     fetch_or of 0 is (LLVM's InstCombine, up to LLVM 16): a plain load may return the same stale value for ever. The exchange also puts
//     back the zero that the next launch needs. threadgroup_barrier(mem_device) keeps the stores before it ahead of the count. Between two
//     launches is a barrier for everything, so the next launch finds zeros.
//   - Relied upon: a store that has been executed reaches other threadgroups in reasonable time, as C++ recommends, without further help.
//     A threadgroup that is waited for has counted, so it has started, and it waits for none.
//   - If that is wrong somewhere, MAX_TRIES bounds the waiting: the numbers become NaN and the fault, word FAULT of `partial`, becomes 1.
//     The host reports it and writes zeros over all of `partial` (backends/metal/queue.py), in which words may have arrived since.
//
// A word that is data and readiness in one is that of single-pass scans (Merrill and Garland, "Single-pass Parallel Prefix Scan with
// Decoupled Look-back", 2016), without their waiting for threadgroups that may not have started.
#pragma once
#include "partitions.h"

constant constexpr int IN_FLIGHT = OWN_NUMBERS >= 32 ? 1 : 32 / OWN_NUMBERS;  // partitions whose words a thread loads at a time
constant constexpr int FAULT = 1;                                             // word of `partial`
// Tries of a thread for all its words together: about a second. After several seconds macOS would reset the GPU.
constant constexpr int MAX_TRIES = 1 << 20;
constant constexpr int TRIES_PER_LOOK = 1 << 10;  // after that number, a thread looks whether another one has given up

INLINE void store_word(device atomic_uint *word, float value) {
  const uint bits = as_type<uint>(value);
  atomic_store_explicit(word, bits == 0 ? 0x80000000u : bits, memory_order_relaxed);
}
INLINE uint load_word(device atomic_uint *word) { return atomic_load_explicit(word, memory_order_relaxed); }

// What a thread may still wait, and where it reports that it has given up.
struct Patience {
  device atomic_uint *fault;
  int tries;
};
INLINE Patience patience_of(device atomic_uint *partial) {
  Patience patience;
  patience.fault = partial + FAULT, patience.tries = MAX_TRIES;
  return patience;
}

#if LAUNCHES == 1
// A word's bits, or 0 if they have not arrived. Afterwards the word is 0.
INLINE uint take_word(device atomic_uint *word) { return atomic_exchange_explicit(word, 0u, memory_order_relaxed); }
// A word's number as soon as it has arrived; `bits` is what was taken of it before. NaN if it does not arrive.
INLINE float await_word(thread Patience &patience, device atomic_uint *word, uint bits) {
  while (bits == 0 && patience.tries > 0) {
    bits = take_word(word);
    patience.tries--;
    if (patience.tries % TRIES_PER_LOOK == 0 && load_word(patience.fault) != 0) patience.tries = 0;
  }
  if (bits != 0) return as_type<float>(bits);
  atomic_store_explicit(patience.fault, 1u, memory_order_relaxed);
  return as_type<float>(0x7FC00000u);
}
#else
INLINE uint take_word(device atomic_uint *word) { return load_word(word); }
INLINE float await_word(thread Patience &, device atomic_uint *, uint bits) { return as_type<float>(bits); }
#endif

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

// The factors of partitions in each row, and one over the row's sum, which the head's sink joins, if there are any.
struct PartitionFactors {
  threadgroup float *rescales;     // [ROWS][PARTITIONS]
  threadgroup float *inverses;     // [ROWS]
  device const float *head_sinks;  // [H]
  int row;                         // the first row's query head
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
INLINE void merge_record_stats(PartitionFactors factors, thread Patience &patience, device atomic_uint *records, int heads, int first,
                               int last, int simd, int lane) {
  const bool exists = lane >= first && lane <= last;
  for (int r = simd; r < heads; r += SIMDS) {
    float max_score = NO_SCORE, sum = 0.0f;
    if (exists) {
      device atomic_uint *stats = records + lane * RECORD + ROWS * D + 2 * r;
      const uint max_bits = take_word(stats), sum_bits = take_word(stats + 1);
      max_score = await_word(patience, stats, max_bits), sum = await_word(patience, stats + 1, sum_bits);
    }
    const float total_max = max_of_lanes(max_score), rescale = exists ? rescale_of(max_score, total_max) : 0.0f;
    const float total = sum_of_lanes(exists ? sum * rescale : 0.0f);
    const float inverse = 1.0f / with_sink(total, total_max, factors.head_sinks, factors.row + r);
    if (exists) factors.rescales[r * PARTITIONS + lane] = rescale;
    if (lane == 0) factors.inverses[r] = inverse;
  }
}

// Merges partitions `first` to `last` into `numbers` numbers of `out`, rows of D one after another.
INLINE void merge_record_values(device float *out, PartitionFactors factors, thread Patience &patience, device atomic_uint *records,
                                int numbers, int first, int last, int thread_index) {
  float o[OWN_NUMBERS];
#pragma unroll
  for (int m = 0; m < OWN_NUMBERS; m++) o[m] = 0.0f;
  for (int p = first; p <= last; p += IN_FLIGHT) {
    uint bits[OWN_NUMBERS][IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < OWN_NUMBERS * IN_FLIGHT; k++) {
      const int m = k / IN_FLIGHT, j = k % IN_FLIGHT, i = thread_index + m * THREADS;
      bits[m][j] = i < numbers && p + j <= last ? take_word(records + (p + j) * RECORD + i) : 0;
    }
#pragma unroll
    for (int k = 0; k < OWN_NUMBERS * IN_FLIGHT; k++) {
      const int m = k / IN_FLIGHT, j = k % IN_FLIGHT, i = thread_index + m * THREADS;
      if (i >= numbers || p + j > last) continue;
      const float number = await_word(patience, records + (p + j) * RECORD + i, bits[m][j]);
      o[m] = fma(number, factors.rescales[i / D * PARTITIONS + p + j], o[m]);
    }
  }
#pragma unroll
  for (int m = 0; m < OWN_NUMBERS; m++) {
    const int i = thread_index + m * THREADS;
    if (i < numbers) out[i] = o[m] * factors.inverses[i / D];
  }
}

// Merges the records of one sequence's part into its `heads` rows of `out`. All threads must call it; a barrier is needed before the factors
// are used again.
INLINE void merge_records(device float *out, PartitionFactors factors, thread Patience &patience, device atomic_uint *records, int heads,
                          int context, int thread_index, int simd, int lane) {
  const int first = first_partition(context), last = last_partition(context);
  merge_record_stats(factors, patience, records, heads, first, last, simd, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  merge_record_values(out, factors, patience, records, heads * D, first, last, thread_index);
}
