// Which sequences a threadgroup of attention_decode takes together, and how its SIMD groups are shared out among them.
//
// A run is sequences each of which shares at least half of what it sees of the partition with the one before it; who shares less is better
// off alone, with all SIMD groups. A unit is up to MOST of a run, fewer where the launch would have less than SPREAD threadgroups left.
// Each threadgroup finds that out for itself, from what all can see; in a batch in which nobody shares it reads two words for it.
//
// Constants beside attention.h's: PARTITION, SIMDS, KEYS, PARTS, PARTITIONS, SPREAD, MOST and ABREAST, as attention_decode.metal says.
#pragma once
#include "attention.h"

// What a launch is told of its sequences.
struct Company {
  device const int *contexts, *alike;
  int count;
};

// Sequences b to b + size - 1 at a partition. SIMD group `simd` has one strand of number simd % slots of them; `abreast` strands are done
// at the same time. The keys before `common` lie in the same blocks.
struct Unit {
  int b, size, shift, abreast, common;
};
INLINE int slots_of(thread const Unit &unit) { return 1 << unit.shift; } // size or more, a power of two
INLINE int member_of(thread const Unit &unit, int simd) { return simd & (slots_of(unit) - 1); }

INLINE int first_partition(int context) { return first_seen(context - 1) / PARTITION; }
INLINE int last_partition(int context) { return (context - 1) / PARTITION; }
INLINE bool in_one_partition(int context) { return PARTITIONS == 1 || first_partition(context) == last_partition(context); }

// Whether sequence b, which is not the first, has a tile of every strand, and half of the partition from `start` on, in common with b - 1.
// Where a window begins, everybody stays alone.
INLINE bool joins(Company company, int b, int start) {
  const int before = company.contexts[b - 1], context = company.contexts[b], longest = max(before, context);
  const int shared = min(min(company.alike[b], start + PARTITION), min(before, context)) - start;
  return first_seen(longest - 1) <= start && shared >= SIMDS * KEYS && 2 * shared >= min(longest - start, PARTITION);
}

INLINE Unit alone(int b) {
  Unit unit;
  unit.b = b, unit.size = 1, unit.shift = 0, unit.abreast = SIMDS, unit.common = 0;
  return unit;
}

// How many sequences a unit may have, so that threadgroups still are many.
INLINE int most_of(Company company, int lane) {
  int threadgroups = 0, most = MOST;
  for (int b = lane; b < company.count; b += 32)
    threadgroups += last_partition(company.contexts[b]) - first_partition(company.contexts[b]) + 1;
  threadgroups = simd_sum(threadgroups) * (K * PARTS);
  while (most > 1 && threadgroups / most < SPREAD) most /= 2;
  return most;
}

// The first of the run of sequences, each of which joins the one before it, that b is in.
INLINE int run_of(Company company, int b, int start, int lane) {
  for (int from = b;; from -= 32) {
    const int one = from - lane, back = simd_min(one >= 1 && joins(company, one, start) ? 32 : lane);
    if (back < 32) return from - back;
  }
}

// The unit of the partition from `start` on that b is in. Every SIMD group comes to the same.
INLINE Unit find_unit(Company company, int b, int start, int lane) {
  Unit unit = alone(b);
  if ((b == 0 || company.alike[b] <= start) && (b + 1 >= company.count || company.alike[b + 1] <= start)) return unit;
  const int most = most_of(company, lane);
  unit.b = b - ((b - run_of(company, b, start, lane)) & (most - 1));
  const int one = unit.b + lane;
  const bool member = lane == 0 || (lane < most && one < company.count && joins(company, one, start));
  unit.size = simd_min(member ? 32 : lane);
  const bool counts = lane < unit.size;
  const int end = start + PARTITION, shared = counts && lane > 0 ? company.alike[one] : end, there = counts ? company.contexts[one] : end;
  unit.common = min(simd_min(min(shared, there)), end);
  while (slots_of(unit) < unit.size) unit.shift++;
  unit.abreast = unit.size > 1 ? min(SIMDS >> unit.shift, ABREAST) : SIMDS;
  return unit;
}
