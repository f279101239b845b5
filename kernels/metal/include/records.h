// Records of a sequence's partitions in attention_decode: how threadgroups hand them over, and how they are put together.
//
// Constants beside attention.h's: ROWS, PARTITIONS, SIMDS, THREADS, RECORD, MINE and AT_ONCE, as attention_decode.metal says.
//
// Metal 3 has no order between threadgroups, so the count says only that all records are on their way. That they are there each word says
// itself: 0 is "not yet", which no number is, as +0.0 is written as -0.0. Who reads 0 asks again.
//   - Promised: Metal's atomics are C++'s, relaxed. Those on one address have one order, the same for all threadgroups, and what reads and
//     changes takes the newest: so it is by such an operation that a word is asked for again. threadgroup_barrier(mem_device) keeps the
//     stores ahead of it ahead of the count. Between two launches is a barrier for everything, so the next one finds zeros.
//   - Relied upon: a store that has been made reaches others in reasonable time, as C++ would have it, without help. Whoever is waited for
//     has counted, so it has begun, and it waits for nobody.
//
// A word that is data and readiness in one is that of single-pass scans (Merrill and Garland, "Single-pass Parallel Prefix Scan with
// Decoupled Look-back", 2016), without their waiting for who may not have begun.
#pragma once
#include "attention.h"

INLINE void put(device atomic_uint *word, float value) {
  const uint bits = as_type<uint>(value);
  atomic_store_explicit(word, bits == 0 ? 0x80000000u : bits, memory_order_relaxed);
}
INLINE uint look(device atomic_uint *word) { return atomic_load_explicit(word, memory_order_relaxed); }
// A word's number as soon as it is there; `bits` is what has been seen of it. Behind it the word is 0.
INLINE float take(device atomic_uint *word, uint bits) {
  while (bits == 0) bits = atomic_fetch_or_explicit(word, 0u, memory_order_relaxed);
  atomic_store_explicit(word, 0u, memory_order_relaxed);
  return as_type<float>(bits);
}

INLINE void put_record(device atomic_uint *record, float4 o, float2 ends, int row, int piece) {
#pragma unroll
  for (int i = 0; i < 4; i++) put(record + row * D + piece * 4 + i, o[i]);
  if (piece == 0) put(record + ROWS * D + 2 * row, ends.x), put(record + ROWS * D + 2 * row + 1, ends.y);
}

// Is this threadgroup the last of `expected` to count?
INLINE bool is_last(device atomic_uint *counter, int expected) {
  const int before = (int)atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
  if (before == expected - 1) atomic_store_explicit(counter, 0u, memory_order_relaxed);
  return before == expected - 1;
}

// What partitions `first` to `last` are worth in each row, a lane a partition, a SIMD group a row; and one over the row's sum.
struct Shares {
  threadgroup float *fades; // [ROWS][PARTITIONS]
  threadgroup float *inverses; // [ROWS]
};
INLINE float largest(float x) {
#pragma unroll
  for (int apart = 16; apart >= 1; apart /= 2) x = max(x, simd_shuffle_xor(x, (ushort)apart));
  return x;
}
INLINE float added(float x) {
#pragma unroll
  for (int apart = 16; apart >= 1; apart /= 2) x += simd_shuffle_xor(x, (ushort)apart);
  return x;
}
INLINE void take_ends(Shares shares, device atomic_uint *records, int heads, int first, int last, int simd, int lane) {
  const bool there = lane >= first && lane <= last;
  for (int r = simd; r < heads; r += SIMDS) {
    float top = NEVER, sum = 0.0f;
    if (there) {
      device atomic_uint *ends = records + lane * RECORD + ROWS * D + 2 * r;
      const uint top_bits = look(ends), sum_bits = look(ends + 1);
      top = take(ends, top_bits), sum = take(ends + 1, sum_bits);
    }
    const float most = largest(top), fade = there ? fade_of(top, most) : 0.0f;
    const float inverse = 1.0f / added(there ? sum * fade : 0.0f);
    if (there) shares.fades[r * PARTITIONS + lane] = fade;
    if (lane == 0) shares.inverses[r] = inverse;
  }
}

// Partitions `first` to `last` become `numbers` of `out`, rows of D behind each other.
INLINE void take_values(device float *out, Shares shares, device atomic_uint *records, int numbers, int first, int last, int thread_index) {
  float o[MINE];
#pragma unroll
  for (int m = 0; m < MINE; m++) o[m] = 0.0f;
  for (int p = first; p <= last; p += AT_ONCE) {
    uint bits[MINE][AT_ONCE];
#pragma unroll
    for (int k = 0; k < MINE * AT_ONCE; k++) {
      const int m = k / AT_ONCE, j = k % AT_ONCE, i = thread_index + m * THREADS;
      bits[m][j] = i < numbers && p + j <= last ? look(records + (p + j) * RECORD + i) : 0;
    }
#pragma unroll
    for (int k = 0; k < MINE * AT_ONCE; k++) {
      const int m = k / AT_ONCE, j = k % AT_ONCE, i = thread_index + m * THREADS;
      if (i >= numbers || p + j > last) continue;
      o[m] = fma(take(records + (p + j) * RECORD + i, bits[m][j]), shares.fades[i / D * PARTITIONS + p + j], o[m]);
    }
  }
#pragma unroll
  for (int m = 0; m < MINE; m++) {
    const int i = thread_index + m * THREADS;
    if (i < numbers) out[i] = o[m] * shares.inverses[i / D];
  }
}
