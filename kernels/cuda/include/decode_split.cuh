// How attention_decode divides a step's work: units, the run of units of each warp, and which units are read for several sequences.
//
// A unit is (sequence, part of the query heads of a KV head, partition of 256 keys), numbered in this order. Each warp takes an equal run
// of consecutive units. With CASCADE, a partition that consecutive sequences have in the same blocks is one unit, owned by the first of
// them (the reader), which computes it for all of them (the followers). Such sequences are bundled, counted from the last one that shares
// nothing with the one before it; a bundle has TOGETHER sequences, or twice as many where a tile may be multiplied with two groups of rows
// (PASSES).
//
// Where ranks divide contexts (own_keys.cuh), keys, partitions and contexts here are those that this rank has, counted from its own first:
// a sequence may have none. No CASCADE.
#pragma once
#include "attention.cuh"

constexpr int PARTS = (G + 15) / 16;           // the query heads of a KV head, in parts of at most 16
constexpr int ROWS = (G + PARTS - 1) / PARTS;  // query heads of a part
constexpr int HEADS = K * PARTS;               // "head" below: a part of a KV head's query heads
constexpr int SECTION_PARTITIONS = SECTION / PARTITION;
constexpr int SECTIONS = (M * S + SECTION - 1) / SECTION;  // of a sequence, at most
constexpr int TOGETHER = CASCADE ? 16 / ROWS : 1;          // sequences whose rows fill one mma
constexpr int PASSES = CASCADE && D <= 64 ? 2 : 1;         // mmas that one tile is multiplied with, at most

DEVICE int last_partition(int context) { return (context - 1) / PARTITION; }

// The inputs that describe the batch.
struct Batch {
  const int *tables, *contexts, *shared_prefix_lens;
  int count;
  int cascade;  // the kernel's argument of that name, if CASCADE
};

// The keys of sequence b that its row sees: `hidden` to `context` - 1.
DEVICE int context_of(const Batch &batch, int b) { return own_of(batch.contexts[b]); }
DEVICE int hidden_of(const Batch &batch, int b, int context) {
  return own_of(first_visible(WORLD == 1 ? context - 1 : batch.contexts[b] - 1));
}
DEVICE bool has_keys(const Batch &batch, int b) { return WORLD == 1 || hidden_of(batch, b, 0) < context_of(batch, b); }

// Partitions at the start of sequence b that are also those of b - 1 and fully visible to both. The last partition of b is never shared.
DEVICE int shared_partitions(const Batch &batch, int b) {
  if (!CASCADE || b == 0) return 0;
  const int context = batch.contexts[b], before = batch.contexts[b - 1];
  if (first_visible(context - 1) > 0 || first_visible(before - 1) > 0) return 0;
  return min(min(batch.shared_prefix_lens[b], before) / PARTITION, min(batch.cascade, last_partition(context)));
}

// --- one sequence's part of the units

struct Share {
  int offset;  // index in the bundle; 0: a reader
  int first;   // the first partition that the sequence reads itself
  int twice;   // end of the partitions from `first` on that are read for two passes
};
// These three keep a variant of the kernel from holding registers for fields that it does not need.
DEVICE bool is_follower(const Share &share) { return CASCADE && share.offset; }
DEVICE int first_of(const Share &share, int context) { return CASCADE || WORLD > 1 ? share.first : first_visible(context - 1) / PARTITION; }
DEVICE int twice_of(const Share &share, int context) { return PASSES == 2 ? share.twice : first_of(share, context); }

// `hidden`: hidden_of(b). `shared`: shared_partitions(b). `distance`: from the last sequence that shares nothing with the one before it.
// `bundle`: sequences of one.
DEVICE Share share_of(const Batch &batch, int b, int hidden, int shared, int distance, int bundle) {
  Share share;
  share.offset = distance % bundle;
  share.first = share.twice = share.offset ? shared : hidden / PARTITION;
  if (PASSES == 1 || bundle == TOGETHER || share.offset >= TOGETHER) return share;
  int least = batch.cascade;
#pragma unroll
  for (int i = 1; i <= TOGETHER; i++) least = min(least, b + i < batch.count ? shared_partitions(batch, b + i) : 0);
  share.twice = max(share.first, least);
  return share;
}

// Unit numbers count a unit of two passes as two. Numbers between two partitions of a sequence, both read by itself, for one head.
DEVICE int units_between(const Share &share, int from, int to) {
  return to - from + (PASSES == 2 ? min(to, share.twice) - min(from, share.twice) : 0);
}
DEVICE int units_of(const Share &share, int context) { return units_between(share, first_of(share, context), last_partition(context) + 1); }

// --- this warp's run of units. A unit belongs to the run that contains its first number.

struct Run {
  int first, end;    // unit numbers
  int total, warps;  // of the launch
  int bundle;        // sequences of a bundle
};
// The warp whose run contains a unit.
DEVICE int owner_of(const Run &run, int unit) { return (int)(((s64)(unit + 1) * run.warps - 1) / run.total); }

// A tile of keys: its unit, sequence and head, and its first key.
struct Cursor {
  int unit, b, head, context, start;
  Share share;
  int hidden;  // read where it does not follow from `context`
};
DEVICE int first_seen(const Cursor &at) { return WORLD == 1 ? first_visible(at.context - 1) : at.hidden; }
DEVICE int first_of(const Cursor &at) { return first_of(at.share, at.context); }
DEVICE int twice_of(const Cursor &at) { return twice_of(at.share, at.context); }
DEVICE int unit_at(const Cursor &at, int partition) { return at.unit + units_between(at.share, at.start / PARTITION, partition); }

DEVICE void begin_head(Cursor &at) { at.start = max(first_seen(at) & -TILE, first_of(at) * PARTITION); }

DEVICE void begin_sequence(Cursor &at, const Batch &batch, const Run &run) {
  while (WORLD > 1 && !has_keys(batch, at.b)) at.b++;  // there is a later one: the run has not ended
  const int shared = shared_partitions(batch, at.b);
  at.context = context_of(batch, at.b), at.hidden = hidden_of(batch, at.b, at.context);
  at.share = share_of(batch, at.b, at.hidden, shared, shared ? at.share.offset + 1 : 0, run.bundle);
}

DEVICE bool is_unit_end(const Cursor &at) { return at.start + TILE >= at.context || (at.start + TILE) % PARTITION == 0; }

// Moves to the next tile.
DEVICE void advance(Cursor &at, const Batch &batch, const Run &run) {
  if (is_unit_end(at)) at.unit += PASSES == 2 && at.start / PARTITION < at.share.twice ? 2 : 1;
  at.start += TILE;
  if (at.start < at.context) return;
  if (++at.head == HEADS) {
    at.head = 0, at.b++;
    if (at.unit < run.end) begin_sequence(at, batch, run);
  }
  begin_head(at);
}

// --- finding the run: sequences are examined 32 at a time, one per lane

struct LaneSequence {
  int context, hidden, shared;
  int distance;  // from the last sequence that shares nothing with the one before it
  bool valid;
};

// Sequence base + lane. `last`: in, the last sequence before `base` that shares nothing with the one before it; out, the same before
// base + 32.
DEVICE LaneSequence sequence_of_lane(const Batch &batch, int base, int &last) {
  const int lane = lane_of(), b = base + lane;
  LaneSequence sequence;
  sequence.valid = b < batch.count && has_keys(batch, b);
  sequence.context = sequence.valid ? context_of(batch, b) : 0;
  sequence.hidden = sequence.valid ? hidden_of(batch, b, sequence.context) : 0;
  sequence.shared = sequence.valid ? shared_partitions(batch, b) : 0;
  sequence.distance = 0;
  if (CASCADE) {
    const u32 alone = __ballot_sync(ALL_LANES, sequence.shared == 0), till = alone & ALL_LANES >> (31 - lane);
    sequence.distance = till ? lane - 31 + __clz((int)till) : b - last;
    last = __shfl_sync(ALL_LANES, b - sequence.distance, 31);
  }
  return sequence;
}

DEVICE int units_of_lane(const Batch &batch, int b, const LaneSequence &s, int bundle) {
  return s.valid ? units_of(share_of(batch, b, s.hidden, s.shared, s.distance, bundle), s.context) : 0;
}

// Two passes per tile are used only if one pass gives more units than there are warps.
DEVICE void count_units(Run &run, const Batch &batch) {
  int once = 0, twice = 0, last = 0;
#pragma unroll 2
  for (int base = 0; base < batch.count; base += 32) {
    const LaneSequence sequence = sequence_of_lane(batch, base, last);
    once += units_of_lane(batch, base + lane_of(), sequence, TOGETHER);
    if (PASSES == 2) twice += units_of_lane(batch, base + lane_of(), sequence, 2 * TOGETHER);
  }
  run.bundle = TOGETHER;
  run.total = __reduce_add_sync(ALL_LANES, once) * HEADS;
  if (PASSES == 1 || run.total <= (int)gridDim.x) return;
  run.bundle = 2 * TOGETHER;
  run.total = __reduce_add_sync(ALL_LANES, twice) * HEADS;
}

// This warp's run, and its first tile; false if it has no work.
DEVICE bool find_run(Run &run, Cursor &at, const Batch &batch) {
  count_units(run, batch);
  run.warps = min((int)gridDim.x, run.total);
  if ((int)blockIdx.x >= run.warps) return false;
  run.first = (int)((s64)run.total * blockIdx.x / run.warps);
  run.end = (int)((s64)run.total * (blockIdx.x + 1) / run.warps);
  int before = 0, last = 0, owner = -1;
  Share share;
  for (int base = 0; owner < 0; base += 32) {
    const LaneSequence s = sequence_of_lane(batch, base, last);
    share = share_of(batch, base + lane_of(), s.hidden, s.shared, s.distance, run.bundle);
    owner = find_lane(run.first, s.valid ? units_of(share, s.context) * HEADS : 0, before);
    at.b = base + owner;
  }
  at.context = context_of(batch, at.b), at.hidden = hidden_of(batch, at.b, at.context);
  at.share = {__shfl_sync(ALL_LANES, share.offset, owner), __shfl_sync(ALL_LANES, share.first, owner),
              __shfl_sync(ALL_LANES, share.twice, owner)};
  const int units = units_of(at.share, at.context), number = (run.first - before) % units, two = 2 * (twice_of(at) - first_of(at));
  at.head = (run.first - before) / units;
  begin_head(at);
  const int partition = first_of(at) + (number < two ? number / 2 : number - two / 2);
  at.start = max(at.start, partition * PARTITION);
  at.unit = number < two ? run.first - number % 2 : run.first;
  if (at.unit == run.first) return true;
  // run.first is the second number of a unit that belongs to the warp before: skip it
  at.start = min((partition + 1) * PARTITION, (at.context + TILE - 1) & -TILE) - TILE;
  advance(at, batch, run);
  return at.unit < run.end;
}

// --- the sequences that a unit is read for

// Partitions that the sequence, if it is a reader, also reads for the next one.
DEVICE int partitions_for_next(const Cursor &at, const Batch &batch, const Run &run) {
  return at.share.offset + 1 < run.bundle && at.b + 1 < batch.count ? shared_partitions(batch, at.b + 1) : 0;
}

// Number of consecutive sequences, from at.b on, that the unit is read for.
DEVICE int sequences_of_unit(const Cursor &at, const Batch &batch, const Run &run) {
  const int i = lane_of(), b = at.b + i;
  const bool possible = i > 0 && at.share.offset + i < run.bundle && b < batch.count;
  return __ffs((int)~(__ballot_sync(ALL_LANES, possible && shared_partitions(batch, b) > at.start / PARTITION) >> 1));
}
