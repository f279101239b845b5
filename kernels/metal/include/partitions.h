// attention_decode, attention_merge: where the keys of a sequence are split, and where the scratch has what.
//
// Constants in addition to decode_tile.h's: PARTITION, keys of a partition, a multiple of 32. An area is a sequence's part (PARTS heads):
// a count of the partitions that have finished, the fault, 30 words of padding, and a record of each partition: ROWS * D weighted values,
// then maximum and sum of each row in turn. Of the faults only that of the first area is used (partition_records.h).
#pragma once
#include "decode_tile.h"

constant constexpr int PARTITIONS = (M * S + PARTITION - 1) / PARTITION;
constant constexpr int RECORD = ROWS * (D + 2);                           // words
constant constexpr int AREA_HEAD = 32;                                    // words; the count has a cache line of its own
constant constexpr int AREA = AREA_HEAD + PARTITIONS * RECORD;            // words
constant constexpr int OWN_NUMBERS = (ROWS * D + THREADS - 1) / THREADS;  // numbers that a thread merges over the partitions

static_assert(PARTITION % 32 == 0, "attention_decode: PARTITION must be a multiple of 32");
static_assert(PARTITIONS <= 32, "attention_decode: more than 32 partitions, PARTITION must be larger");
static_assert(SIMDS >= 1 && SIMDS <= 16, "attention_decode: SIMDS must be 1 to 16");

// The partitions with keys that the newest token of a context sees.
INLINE int first_partition(int context) { return first_visible(context - 1) / PARTITION; }
INLINE int last_partition(int context) { return (context - 1) / PARTITION; }
INLINE bool in_one_partition(int context) { return PARTITIONS == 1 || first_partition(context) == last_partition(context); }

INLINE device float *out_of(device float *out, int b, int row) { return out + ((ulong)b * H + row) * D; }
INLINE device atomic_uint *area_of(device atomic_uint *partial, int b, int part) {
  return partial + ((ulong)b * (K * PARTS) + part) * AREA;
}
