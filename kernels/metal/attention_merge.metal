// out[b] = the merge of the records that attention_decode with LAUNCHES 2, the launch before, has stored for sequence b.
//
//   out           [T, H, D] float32          rows of sequences with keys in several partitions are written, no others
//   partial       [B, K * PARTS, AREA] uint32, as attention_decode has left it (partitions.h); unchanged
//   context_lens  [B] int32                  as attention_decode's
//   count         [1] int32                  as attention_decode's
//   sinks         [H] float32, if SINKS      as attention_decode's
//
// Constants: attention_decode's. Launch: grid (K * PARTS, B); threads 32 * SIMDS, of any SIMDS.
//
// The order of the arithmetic, and so the bits, are those of the merge inside of attention_decode: it is the same code.
#include "partition_records.h"

static_assert(LAUNCHES == 2, "attention_merge: LAUNCHES must be 2");

[[max_total_threads_per_threadgroup(32 * SIMDS)]] kernel void attention_merge(
    device float *out [[buffer(0)]], device atomic_uint *partial [[buffer(1)]], device const int *context_lens [[buffer(2)]],
    device const int *count [[buffer(3)]], SINKS_ARGUMENT(4) uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float rescales[ROWS * PARTITIONS];
  threadgroup float inverses[ROWS];
  const int b = (int)group.y, part = (int)group.x, row = part / PARTS * G + part % PARTS * ROWS, heads = min(ROWS, G - part % PARTS * ROWS);
  if (b >= count[0] || in_one_partition(context_lens[b])) return;
  PartitionFactors factors;
  factors.rescales = rescales, factors.inverses = inverses, factors.head_sinks = SINKS_POINTER, factors.row = row;
  Patience patience = patience_of(partial);
  merge_records(out_of(out, b, row), factors, patience, area_of(partial, b, part) + AREA_HEAD, heads, context_lens[b], (int)index,
                (int)simd, (int)lane);
}
