// Which sequences a threadgroup of attention_decode takes together, and how its SIMD groups are divided among them.
//
// A run is sequences each of which shares at least half of the keys it sees in the partition with the one before it; a sequence that
// shares less is faster alone, with all SIMD groups. A unit is up to MAX_MEMBERS of a run, fewer where the launch would have less than
// SPREAD threadgroups left. Each threadgroup finds its unit by itself, from what all can read; in a batch in which no sequence shares
// it reads two words for that.
//
// Constants in addition to partitions.h's: SPREAD, MAX_MEMBERS and CONCURRENT, as attention_decode.metal says.
#pragma once
#include "partitions.h"

// The sequences of a launch.
struct Sequences {
  device const int *contexts, *shared_prefix_lens;
  int count;
};

// Sequences b to b + size - 1 at a partition. SIMD group `simd` has one stripe of member simd % slots_of(unit); `concurrent` stripes are
// computed at the same time. The keys before `common` are in the same blocks.
struct Unit {
  int b, size, shift, concurrent, common;
};
INLINE int slots_of(thread const Unit &unit) { return 1 << unit.shift; }  // size or more, a power of two
INLINE int member_of(thread const Unit &unit, int simd) { return simd & (slots_of(unit) - 1); }

// Whether sequence b, which is not the first, has a tile of every stripe, and half of the partition from `start` on, in common with b - 1.
// In the partition where a window begins no sequence joins.
INLINE bool joins(Sequences sequences, int b, int start) {
  const int before = sequences.contexts[b - 1], context = sequences.contexts[b], longest = max(before, context);
  const int shared = min(min(sequences.shared_prefix_lens[b], start + PARTITION), min(before, context)) - start;
  return first_visible(longest - 1) <= start && shared >= SIMDS * KEYS && 2 * shared >= min(longest - start, PARTITION);
}

INLINE Unit single(int b) {
  Unit unit;
  unit.b = b, unit.size = 1, unit.shift = 0, unit.concurrent = SIMDS, unit.common = 0;
  return unit;
}

// How many sequences a unit may have, so that enough threadgroups remain.
INLINE int max_members(Sequences sequences, int lane) {
  int threadgroups = 0, members = MAX_MEMBERS;
  for (int b = lane; b < sequences.count; b += 32)
    threadgroups += last_partition(sequences.contexts[b]) - first_partition(sequences.contexts[b]) + 1;
  threadgroups = simd_sum(threadgroups) * (K * PARTS);
  while (members > 1 && threadgroups / members < SPREAD) members /= 2;
  return members;
}

// The first sequence of the run that b is in.
INLINE int run_start(Sequences sequences, int b, int start, int lane) {
  for (int from = b;; from -= 32) {
    const int other = from - lane, back = simd_min(other >= 1 && joins(sequences, other, start) ? 32 : lane);
    if (back < 32) return from - back;
  }
}

// The unit of the partition from `start` on that b is in. All SIMD groups find the same.
INLINE Unit find_unit(Sequences sequences, int b, int start, int lane) {
  Unit unit = single(b);
  if ((b == 0 || sequences.shared_prefix_lens[b] <= start) && (b + 1 >= sequences.count || sequences.shared_prefix_lens[b + 1] <= start))
    return unit;
  const int members = max_members(sequences, lane);
  unit.b = b - ((b - run_start(sequences, b, start, lane)) & (members - 1));
  const int other = unit.b + lane;
  const bool member = lane == 0 || (lane < members && other < sequences.count && joins(sequences, other, start));
  unit.size = simd_min(member ? 32 : lane);
  const bool counts = lane < unit.size;
  const int end = start + PARTITION, shared = counts && lane > 0 ? sequences.shared_prefix_lens[other] : end;
  const int context = counts ? sequences.contexts[other] : end;
  unit.common = min(simd_min(min(shared, context)), end);
  while (slots_of(unit) < unit.size) unit.shift++;
  unit.concurrent = unit.size > 1 ? min(SIMDS >> unit.shift, CONCURRENT) : SIMDS;
  return unit;
}

// --- tiles that the sequences of a unit share

// Tiles that are in threadgroup memory for a while, one of each concurrent stripe.
struct SharedTiles {
  threadgroup cache_unit *keys, *values;  // [CONCURRENT][TILE]
#if PACKED_CACHE
  threadgroup uint *scales;  // [CONCURRENT][KEYS]: of keys and values
#endif
};
// What a thread copies there: the places of its units in the cache, and the units themselves, in flight; the scales of one key.
struct Copied {
  KeyPlace places[COPIED];
  cache_unit units[COPIED];
  Scales scales;
};
#define NOT_COPIED 0xFFFFFFFFu
INLINE int own_unit(int thread_index, int i) { return (thread_index + i * THREADS) % TILE % ROW_UNITS; }

// Where a key is that all members share, of tile `turn` of a stripe; NOT_COPIED if that is no tile of theirs.
INLINE KeyPlace shared_place(device const int *table, thread const Unit &unit, int head, int stripe, int tile, int turn, int key) {
  const int wanted = first_tile(stripe, tile) + turn * SIMDS;
  if (stripe < SIMDS && wanted < unit.common / KEYS) return key_place(table, head, wanted * KEYS + key);
  KeyPlace none;
  none.at = NOT_COPIED;
  return none;
}

// Tile `turn` of each of the stripes from `stripe` on.
INLINE void find(thread Copied &copied, device const cache_unit *cache, device const int *table, thread const Unit &unit, int head,
                 int stripe, int tile, int turn, int thread_index) {
#pragma unroll
  for (int i = 0; i < COPIED; i++) {
    const int at = thread_index + i * THREADS, own = at < unit.concurrent * TILE ? stripe + at / TILE : SIMDS;
    copied.places[i] = shared_place(table, unit, head, own, tile, turn, key_of_unit(at % TILE));
  }
#if PACKED_CACHE
  const int own = thread_index < unit.concurrent * KEYS ? stripe + thread_index / KEYS : SIMDS;
  const KeyPlace place = shared_place(table, unit, head, own, tile, turn, thread_index % KEYS);
  if (place.at != NOT_COPIED) copied.scales.both = load_scale_pair(cache, place, head);
#endif
}
INLINE void fetch_keys(thread Copied &copied, device const cache_unit *cache, int thread_index) {
#pragma unroll
  for (int i = 0; i < COPIED; i++)
    if (copied.places[i].at != NOT_COPIED) copied.units[i] = cache[key_unit(copied.places[i], own_unit(thread_index, i))];
}
INLINE void fetch_values(thread Copied &copied, device const cache_unit *cache, int thread_index) {
#pragma unroll
  for (int i = 0; i < COPIED; i++)
    if (copied.places[i].at != NOT_COPIED) copied.units[i] = cache[value_unit(copied.places[i], own_unit(thread_index, i))];
}
INLINE void store(thread const Copied &copied, threadgroup cache_unit *to, int thread_index) {
#pragma unroll
  for (int i = 0; i < COPIED; i++)
    if (thread_index + i * THREADS < CONCURRENT * TILE) to[thread_index + i * THREADS] = copied.units[i];
}
#if PACKED_CACHE
INLINE void store_scales(thread const Copied &copied, SharedTiles tiles, int thread_index) {
  if (thread_index < CONCURRENT * KEYS) tiles.scales[thread_index] = copied.scales.both;
}
// The scales of tile `at` of those in threadgroup memory: read into registers, as the next tiles' are stored while values are multiplied.
INLINE Scales scales_in_tile(SharedTiles tiles, int at, thread const Lane &lane) {
  Scales scales;
  scales.both = tiles.scales[at * KEYS + min(lane.number, KEYS - 1)];
  return scales;
}
#else
INLINE void store_scales(thread const Copied &, SharedTiles, int) {}
INLINE Scales scales_in_tile(SharedTiles, int, thread const Lane &) { return Scales(); }
#endif

// The tiles that a unit's sequences have in common from `start` on, of the stripes from `stripe` on; `own` is this SIMD group's, or SIMDS.
// All threads must call it. While a tile's keys are multiplied its values are in flight, and the next tile's keys while its values are.
INLINE void attend_shared(thread Sums &sums, thread const float4 (&queries)[PADDED_ROWS][EACH], SharedTiles tiles,
                          device const cache_unit *cache, device const int *table, thread const Unit &unit, int head, int start, int stripe,
                          int own, int thread_index, thread const Lane &lane) {
  const int tile = start / KEYS, end = unit.common / KEYS, offset = (own - stripe) * TILE;
  Copied copied;
#pragma unroll
  for (int i = 0; i < COPIED; i++) copied.units[i] = cache_unit(0);
#if PACKED_CACHE
  copied.scales.both = 0;
#endif
  find(copied, cache, table, unit, head, stripe, tile, 0, thread_index);
  fetch_keys(copied, cache, thread_index);
  for (int turn = 0; turn * SIMDS < end - tile; turn++) {
    const int at = first_tile(own, tile) + turn * SIMDS;
    const bool takes_part = own < SIMDS && at < end;
    float parts[HALF], scores[SCORES];
    cache_unit units[LOADS];
    Scales scales;
    store(copied, tiles.keys, thread_index);
    store_scales(copied, tiles, thread_index);
    fetch_values(copied, cache, thread_index);
    find(copied, cache, table, unit, head, stripe, tile, turn + 1, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (takes_part) {
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        if (step % GROUP == 0) load_from_tile(units, tiles.keys + offset, step / GROUP, lane);
        add_partial_scores(parts, queries, units, step, lane);
      }
      reduce_scores(scores, parts, lane);
      scales = scales_in_tile(tiles, own - stripe, lane);
    }
    store(copied, tiles.values, thread_index);
    fetch_keys(copied, cache, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (takes_part) {
      update_softmax(scores, sums, scales, lane, at * KEYS, start, unit.common);
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        if (step % GROUP == 0) load_from_tile(units, tiles.values + offset, step / GROUP, lane);
        add_values(sums, scores, units, step, lane);
      }
    }
  }
}
