// out[b] = what the partitions of sequence b's keys come to: attention_decode's second half, for contexts beyond one partition.
//
//   out           [T, H, D] float32          only rows of sequences of several partitions are written
//   partial       [B, H, PARTITIONS, D + 2] float32: weighted values, their top, their sum; PARTITIONS = ceil(M * S / PARTITION), 2 to 32
//   context_lens  [B] int32
//   count         [1] int32                  sequences that count
//
// Constants: attention_decode's. Launch: grid (H, B), threads 32. A SIMD group takes a query head of a sequence; lane p has partition p's
// top and sum. Sums are added by fixed pairs of lanes, values by partitions ascending, float32, fma.
#include "attention.h"

constant constexpr int PARTITIONS = (M * S + PARTITION - 1) / PARTITION;

static_assert(PARTITIONS <= 32, "attention_merge: more than 32 partitions, PARTITION must be larger");

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

kernel void attention_merge(device float *out [[buffer(0)]], device const float *partial [[buffer(1)]],
                            device const int *context_lens [[buffer(2)]], device const int *count [[buffer(3)]],
                            uint3 group [[threadgroup_position_in_grid]], uint lane_index [[thread_index_in_simdgroup]]) {
  const int b = (int)group.y, lane = (int)lane_index;
  if (b >= count[0]) return;
  const int context = context_lens[b], first = first_seen(context - 1) / PARTITION, last = (context - 1) / PARTITION;
  if (first == last) return;
  const ulong row = (ulong)b * H + group.x;
  device const float *records = partial + row * PARTITIONS * (D + 2);

  const bool there = lane >= first && lane <= last;
  device const float *ends = records + (there ? lane : first) * (D + 2) + D;
  const float top = there ? ends[0] : NEVER, most = largest(top), fade = there ? fade_of(top, most) : 0.0f;
  const float inverse = 1.0f / added(there ? ends[1] * fade : 0.0f);

  float o[(D + 31) / 32];
#pragma unroll
  for (int i = 0; i < (D + 31) / 32; i++) o[i] = 0.0f;
  for (int p = first; p <= last; p++) {
    const float by = simd_shuffle(fade, (ushort)p);
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; i++)
      if (i * 32 + lane < D) o[i] = fma(records[p * (D + 2) + i * 32 + lane], by, o[i]);
  }
#pragma unroll
  for (int i = 0; i < (D + 31) / 32; i++)
    if (i * 32 + lane < D) out[row * D + i * 32 + lane] = o[i] * inverse;
}
