// out[b] = softmax(q[b] k^T * SCALE) v over the keys of sequence b that its newest token sees, and the head's sink: one row a
// sequence.
//
//   out           [T, H, D] float32          rows from `count` on are not written
//   partial       [B, K * PARTS, AREA] uint32 for sequences of several partitions: partitions.h. If LAUNCHES is 1, zero between launches,
//                                            but for a fault (partition_records.h)
//   q             [T, H, D] float32          row b is sequence b's
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; this step's are in it. Packed: blocks of packed_read.h
//   block_tables  [B, M] int32               entries after a context are not read
//   context_lens  [B] int32                  tokens in the cache, 1 to M * S, of valid sequences
//   count         [1] int32                  number of valid sequences
//   sinks         [H] float32, if SINKS      attention.h
//   shared_prefix_lens  [B] int32, if CASCADE  leading tokens of sequence b that are in the same blocks as those of sequence b - 1: whole
//                                            blocks that both have filled. 0 for the first; a smaller number is never wrong
//
// Constants in addition to attention.h's: PARTITION, keys of a partition, a multiple of 32; SIMDS, SIMD groups of a threadgroup, 1 to 16;
// CASCADE; SPREAD, how many threadgroups a launch should keep where sequences share; and LAUNCHES, 1, or 2 if attention_merge is launched
// next with the same constants. The bits are the same.
// PARTITIONS = ceil(M * S / PARTITION), at most 32; PARTS = ceil(H / K / (D <= 128 ? 8 : D <= 256 ? 4 : 2)), ROWS = ceil(H / K / PARTS).
// Launch: grid (K * PARTS, B, PARTITIONS); threads 32 * SIMDS.
//
// A threadgroup takes a sequence, a partition of its keys, and the ROWS query heads of a KV head: one read of the keys serves them all.
// (More than eight heads, or four or two wide ones, are several parts that read the same keys at about the same time, so that all but the first
// find them in a cache.) Tiles of KEYS keys form SIMDS stripes: tile t is in stripe t % SIMDS. A stripe has sums of its own; each SIMD
// group computes one (decode_tile.h).
//
// Where sequences share blocks, up to MAX_MEMBERS of them are a unit: the threadgroup of the first computes the partition for all of them,
// and those of the others return. Here, too, a SIMD group computes one stripe of one sequence; `concurrent` stripes are computed at the
// same time, the others after them. A tile that all members share is copied to threadgroup memory once, by all threads, and multiplied by
// all sequences from there; after those tiles, each SIMD group reads its own sequence's. Only the reading is shared: a stripe's sums are
// those of a sequence alone. shared_reads.h says which sequences form a unit.
//   - Registers: a unit needs about as many as a single sequence. For that, a tile's keys and values are both in flight. In a unit few of
//     them are, and the merged values of its sequences take their place (FITS).
//   - Threadgroup memory: shared tiles use the memory in which stripes are merged.
//   - Time: a unit takes as long as its sequences one after another would, less the time that they wait for memory.
//
// Where a sequence's keys are in several partitions, each threadgroup stores a record and counts; the last of a sequence's part to count
// merges the records (partition_records.h) and sets them to zero, or, if LAUNCHES is 2, the next launch merges them. Only partitions with
// visible keys count; where there is one of them, its threadgroup writes `out` directly.
//
// Order of the arithmetic: float32, fma. A score is four (or eight) products of a lane in order, then lanes KEY_LANES / 2, ..., 2, 1 apart.
// A lane adds its weights, and the weighted values of its side, keys ascending; sides, 16, 8, ... apart, are added after the last tile.
// Stripes are merged ascending, each under the maximum so far; then partitions, whichever is last; sums of partitions by fixed pairs of
// lanes. Partitions and tiles are counted from the sequence's first token, and parts without keys add zeros: bits depend neither on the
// other sequences nor on a sequence's position in the batch. attention_prefill multiplies by simdgroup_matrix, in another order: its bits
// differ.
//
// Shared prefixes by log-sum-exp are Hydragen's (arXiv:2402.05099); there the prefix is one part of the sum. Here the parts are the ones
// that exist anyway, so that nothing depends on the other sequences of the batch.
#include "partitions.h"

constant constexpr int MERGED_ROWS = D >= 256 ? 1 : 256 / D;                    // at a time: 8 KiB of threadgroup memory
constant constexpr int EXCHANGE = SIMDS * MERGED_ROWS * PIECES;                 // float4s in which SIMD groups exchange rows
constant constexpr int FITTING = EXCHANGE * 4 / (TILE * UNIT_REGISTERS) / 2;    // stripes whose shared keys and values fit there
constant constexpr int CONCURRENT = FITTING < SIMDS / 2 ? FITTING : SIMDS / 2;  // a unit has two sequences or more
// Whether the merged values of n sequences fit into the registers of a tile's values.
#define FITS(n) ((n) <= SIMDS && (n) * ROWS * D <= THREADS * STEPS * EACH * PIECE_REGISTERS)
constant constexpr int MAX_MEMBERS = !CASCADE || CONCURRENT < 1 ? 1 : FITS(16) ? 16 : FITS(8) ? 8 : FITS(4) ? 4 : FITS(2) ? 2 : 1;
constant constexpr int MERGED = (MAX_MEMBERS * ROWS * PIECES + THREADS - 1) / THREADS;              // pieces that a thread merges
constant constexpr int COPIED = MAX_MEMBERS > 1 ? (CONCURRENT * TILE + THREADS - 1) / THREADS : 1;  // pieces of shared tiles that it copies

#include "shared_reads.h"
#include "stripe_merge.h"
#include "partition_records.h"

#if CASCADE
#if SINKS
#define SHARED_PREFIX_LENS_ARGUMENT device const int *shared_prefix_lens [[buffer(8)]],
#else
#define SHARED_PREFIX_LENS_ARGUMENT device const int *shared_prefix_lens [[buffer(7)]],
#endif
#define SET_SHARED_PREFIX_LENS(sequences) sequences.shared_prefix_lens = shared_prefix_lens
#else
#define SHARED_PREFIX_LENS_ARGUMENT
#define SET_SHARED_PREFIX_LENS(sequences) sequences.shared_prefix_lens = nullptr
#endif

// Where one threadgroup's rows go, of any sequence: row `row` of a sequence's H, its part's area. And the sinks, if there are any.
struct Results {
  device float *out;
  device const float *head_sinks;
  device atomic_uint *partial;
  int row, heads, part;
};
INLINE device atomic_uint *records_of(Results to, int b);
INLINE void write_results(Results to, thread const Merged &merged, Exchange exchange, Sequences sequences, thread const Unit &unit,
                          int partition, int thread_index);
INLINE void count_results(threadgroup uint *lasts, Results to, Sequences sequences, thread const Unit &unit, int thread_index);

[[max_total_threads_per_threadgroup(32 * SIMDS)]] kernel void attention_decode(
    device float *out [[buffer(0)]], device atomic_uint *partial [[buffer(1)]], device const float *q [[buffer(2)]],
    device const cache_unit *cache [[buffer(3)]], device const int *block_tables [[buffer(4)]],
    device const int *context_lens [[buffer(5)]], device const int *count [[buffer(6)]],
    SINKS_ARGUMENT(7) SHARED_PREFIX_LENS_ARGUMENT uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint lane_index [[thread_index_in_simdgroup]], uint simd_index [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 rows[EXCHANGE];
  threadgroup float2 stats[SIMDS * PADDED_ROWS];
  threadgroup float2 totals[MAX_MEMBERS * PADDED_ROWS];
#if LAUNCHES == 1
  threadgroup float rescales[ROWS * PARTITIONS];
  threadgroup float inverses[ROWS];
  threadgroup uint lasts[MAX_MEMBERS];
#endif
#if PACKED_CACHE
  threadgroup uint tile_scales[CONCURRENT > 0 ? CONCURRENT * KEYS : 1];
#endif
  Exchange exchange;
  exchange.o = rows, exchange.stats = stats, exchange.totals = totals;
  Sequences sequences;
  sequences.contexts = context_lens, sequences.count = count[0];
  SET_SHARED_PREFIX_LENS(sequences);
  const int b = (int)group.y, partition = (int)group.z, start = partition * PARTITION, thread_index = (int)index, simd = (int)simd_index;
  if (b >= sequences.count) return;
  const int context = context_lens[b], first = max(first_visible(context - 1), start), end = min(context, start + PARTITION);
  if (first >= end) return;
  const Lane lane = lane_of(lane_index);
  const Unit unit = MAX_MEMBERS > 1 ? find_unit(sequences, b, start, lane.number) : single(b);
  if (unit.b != b) return;
  const int head = (int)group.x / PARTS, part = (int)group.x % PARTS;
  Results to;
  to.out = out, to.head_sinks = SINKS_POINTER, to.partial = partial, to.row = head * G + part * ROWS, to.heads = min(ROWS, G - part * ROWS),
  to.part = (int)group.x;

  Merged merged;
  clear(merged);
  float4 queries[PADDED_ROWS][EACH];
  Sums sums;
  if (MAX_MEMBERS == 1 || unit.size == 1) {
    load_queries(queries, q + ((ulong)b * H + to.row) * D, lane, to.heads);
    clear(sums);
    attend(sums, queries, cache, block_tables + (ulong)b * M, head, first, end, simd, lane);
    sum_sides(sums);
    merge(merged, exchange, sums, unit, to.heads, SIMDS, thread_index, simd, lane);
  } else {
    SharedTiles tiles;
    tiles.keys = (threadgroup cache_unit *)rows, tiles.values = tiles.keys + CONCURRENT * TILE;
#if PACKED_CACHE
    tiles.scales = tile_scales;
#endif
    const int member = member_of(unit, simd), own_b = b + min(member, unit.size - 1);
    const int own_first = unit.common / KEYS * KEYS, own_end = min(context_lens[own_b], start + PARTITION);
    load_queries(queries, q + ((ulong)own_b * H + to.row) * D, lane, to.heads);
    for (int stripe = 0; stripe < SIMDS; stripe += unit.concurrent) {
      const int stripes = min(unit.concurrent, SIMDS - stripe);
      const int own = member < unit.size && simd >> unit.shift < stripes ? stripe + (simd >> unit.shift) : SIMDS;
      clear(sums);
      attend_shared(sums, queries, tiles, cache, block_tables + (ulong)b * M, unit, head, start, stripe, own, thread_index, lane);
      if (own < SIMDS) attend_in_halves(sums, queries, cache, block_tables + (ulong)own_b * M, head, own_first, own_end, own, lane);
      sum_sides(sums);
      merge(merged, exchange, sums, unit, to.heads, stripes, thread_index, simd, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  write_results(to, merged, exchange, sequences, unit, partition, thread_index);
#if LAUNCHES == 1
  if (PARTITIONS == 1 || (unit.size == 1 && in_one_partition(context))) return;
  threadgroup_barrier(mem_flags::mem_device);  // the records are stored before they are counted
  count_results(lasts, to, sequences, unit, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  PartitionFactors factors;
  factors.rescales = rescales, factors.inverses = inverses, factors.head_sinks = to.head_sinks, factors.row = to.row;
  Patience patience = patience_of(to.partial);
  for (int i = 0; i < unit.size; i++) {
    if (!lasts[i]) continue;
    const int sequence = b + i;
    merge_records(out_of(to.out, sequence, to.row), factors, patience, records_of(to, sequence), to.heads, context_lens[sequence],
                  thread_index, simd, lane.number);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next sequence's factors are written to the same memory
  }
#endif
}

INLINE device atomic_uint *records_of(Results to, int b) { return area_of(to.partial, b, to.part) + AREA_HEAD; }

INLINE void write_results(Results to, thread const Merged &merged, Exchange exchange, Sequences sequences, thread const Unit &unit,
                          int partition, int thread_index) {
#pragma unroll
  for (int m = 0; m < MERGED; m++) {
    const Item item = item_of(unit, thread_index, m);
    if (item.row >= to.heads || item.member >= unit.size) continue;
    const int b = unit.b + item.member;
    const float2 total = exchange.totals[item.member * PADDED_ROWS + item.row];
    if (in_one_partition(sequences.contexts[b])) {
      const float inverse = 1.0f / with_sink(total.y, total.x, to.head_sinks, to.row + item.row);
      ((device float4 *)(out_of(to.out, b, to.row) + item.row * D))[item.piece] = merged.o[m] * inverse;
    } else {
      store_record(records_of(to, b) + partition * RECORD, merged.o[m], total, item.row, item.piece);
    }
  }
}

// Each sequence is counted by a thread of its own; lasts [MAX_MEMBERS] says for which of them this was the last partition.
INLINE void count_results(threadgroup uint *lasts, Results to, Sequences sequences, thread const Unit &unit, int thread_index) {
  if (thread_index >= unit.size) return;
  const int b = unit.b + thread_index, context = sequences.contexts[b], partitions = last_partition(context) - first_partition(context) + 1;
  lasts[thread_index] = partitions > 1 && is_last(area_of(to.partial, b, to.part), partitions);
}
