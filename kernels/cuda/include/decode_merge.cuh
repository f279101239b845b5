// What attention_decode does at the end of a unit: writes out a sequence of one partition, or stores a record of the partition and, with
// the last one, merges the records.
//
// A record is (max, sum, ROWS rows of weighted values) of a partition or of a section. Partitions of a section are merged into a record of
// the section, by the last warp to finish its part of the section; sections are merged into the output by the last warp to finish one.
// Records of a run, or of what several runs share, are stored in the space of the warp that owns the first unit, so scratch grows with the
// grid, not with the number of sequences. A follower (decode_split.cuh) has space of its own instead: for its partitions up to the end of
// the section in which it continues alone, and for its sections. The warp that adds the last of these merges them.
#pragma once
#include "decode_tile.cuh"
#include "last_block.cuh"

constexpr int RECORDS = SECTION_PARTITIONS + SECTIONS;  // of one space of a warp
constexpr int MAX_PARTITIONS = (M * S + PARTITION - 1) / PARTITION;
constexpr int LOADS = 16;  // records that a merge loads at a time

// --- where records are

// The arrays of all records of this half: weighted values [][ROWS][VALUES], maxima and sums [][ROWS]; and how many records a follower has
// for a head.
struct Records {
  float *values;
  float2 *max_and_sum;
  int of_follower;
};
DEVICE Records records_at(float *partial, int B, int cascade) {
  const int of_follower = CASCADE ? SECTIONS + min(MAX_PARTITIONS, cascade) : 0;
  const int records = gridDim.x * 2 * RECORDS + (CASCADE ? B * HEADS * of_follower : 0);
  if (HALVES == 2) partial += (s64)blockIdx.y * records * (ROWS * (VALUES + 2));
  return {partial, (float2 *)(partial + (s64)records * (ROWS * VALUES)), of_follower};
}

// The space of the records of a section or of a sequence, and whether only this warp writes to it.
struct Space {
  int owner;
  bool exclusive;
};
DEVICE Space space_of(const Run &run, int first, int last) {
  const bool exclusive = first >= run.first && last < run.end;
  return {exclusive ? (int)blockIdx.x : owner_of(run, first), exclusive};
}
// Each warp has two spaces: one for records of its own, and one for those it shares with the warps after it.
DEVICE int first_record(const Space &space) { return (space.owner * 2 + !space.exclusive) * RECORDS; }
// Of a follower: first the records of its sections, then those of its partitions.
DEVICE int first_record(const Records &partial, int b, int head) {
  return gridDim.x * 2 * RECORDS + (b * HEADS + head) * partial.of_follower;
}

// A record's weighted values [ROWS][VALUES], and its maxima and sums [ROWS].
DEVICE float *values_of(const Records &partial, int record) { return partial.values + (s64)record * (ROWS * VALUES); }
DEVICE float2 *max_and_sum_of(const Records &partial, int record) { return partial.max_and_sum + (s64)record * ROWS; }

// "Warp" here is a thread block: of one warp, or of a TEAM of them.
DEVICE void sync_team() {
  if (TEAM == 1) __syncwarp();
  else __syncthreads();
}

// Adds `more` to a counter; true for the warp that completes `expected`, which then sees everything that the others wrote before theirs.
DEVICE bool is_last(u32 *counter, int more, int expected) {
#if TEAM > 1
  return is_last_block(counter, more, expected);
#else
  u32 before = 0;
  __syncwarp();
  if (threadIdx.x == 0) {
    before = arrive(counter, more);
    if ((int)before == expected - more) *counter = 0;
  }
  before = __shfl_sync(ALL_LANES, before, 0);
  __syncwarp();
  return (int)before == expected - more;
#endif
}

// --- writing

// The output of a sequence of one partition. `head_sinks`, here and below: those of all heads, if there are any.
DEVICE void write_output(const RowState &state, const float (&sum)[2], float *out, const float *head_sinks, const Cursor &at) {
  const int g = lane_of() / 4, column = first_column() + lane_of() % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float *row = row_pointer(out, at.b, at.head, g + 8 * r);
    if (row == nullptr) continue;
    const float inverse = 1.0f / with_sink(sum[r], state.max[r], head_sinks, query_head(at.head, g + 8 * r));
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
      *(float2 *)(row + n * 8 + column) = make_float2(state.o[n][2 * r] * inverse, state.o[n][2 * r + 1] * inverse);
  }
}

// The lane's row r of an mma as row `row` of a record.
DEVICE void write_record_row(const RowState &state, const float (&sum)[2], int r, const Records &partial, int record, int row) {
  const int t = lane_of() % 4;
  float *to = values_of(partial, record) + row * VALUES + first_column() + t * 2;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) *(float2 *)(to + n * 8) = make_float2(state.o[n][2 * r], state.o[n][2 * r + 1]);
  if (t == 0 && (TEAM == 1 || threadIdx.x < 32)) max_and_sum_of(partial, record)[row] = make_float2(state.max[r], sum[r]);
}

DEVICE void write_record(const RowState &state, const float (&sum)[2], const Records &partial, int record) {
  const int g = lane_of() / 4;
#pragma unroll
  for (int r = 0; r < 2; r++)
    if (g + 8 * r < ROWS) write_record_row(state, sum, r, partial, record, g + 8 * r);
}

// The rows of pass `pass` that belong to sequences at.b + from to at.b + end - 1, each into its follower's own space.
DEVICE void write_follower_records(const RowState &state, const float (&sum)[2], const Records &partial, const Cursor &at, int pass,
                                   int from, int end) {
  const int g = lane_of() / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = pass * TOGETHER + (g + 8 * r) / ROWS;
    if ((g + 8 * r) / ROWS >= TOGETHER || i < from || i >= end) continue;
    const int record = first_record(partial, at.b + i, at.head) + SECTIONS + at.start / PARTITION;
    write_record_row(state, sum, r, partial, record, (g + 8 * r) % ROWS);
  }
}

// --- merging

// `count` records from `record` on become one, number `to`, or, if `to` is -1, the rows of `out` of this head. The merged records may then
// be written again.
DEVICE void merge(const Records &partial, int record, int count, int to, float *out, const float *head_sinks, int b, int head) {
  for (int i = threadIdx.x; i < ROWS * VALUES / 4; i += 32 * TEAM) {
    const int r = i / (VALUES / 4);
    const float4 *values = (const float4 *)values_of(partial, record) + i;
    const float2 *max_and_sum = max_and_sum_of(partial, record) + r;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float max = MINUS_INFINITY, sum = 0.0f;
    for (int left = count; left > 0; left -= LOADS) {
      float4 next[LOADS];
      float2 next_max_and_sum[LOADS];
#pragma unroll
      for (int j = 0; j < LOADS; j++) {
        const int record = min(j, left - 1);
        next[j] = values[record * (ROWS * VALUES / 4)], next_max_and_sum[j] = max_and_sum[record * ROWS];
      }
#pragma unroll
      for (int j = 0; j < LOADS; j++) {
        const MergeScales scales = merge_scales_of(max, j < left ? next_max_and_sum[j].x : MINUS_INFINITY);
        max = scales.max;
        sum = fmaf(next_max_and_sum[j].y, scales.next, sum * scales.old);
        o = make_float4(fmaf(next[j].x, scales.next, o.x * scales.old), fmaf(next[j].y, scales.next, o.y * scales.old),
                        fmaf(next[j].z, scales.next, o.z * scales.old), fmaf(next[j].w, scales.next, o.w * scales.old));
      }
      values += LOADS * (ROWS * VALUES / 4), max_and_sum += LOADS * ROWS;
    }
    if (to >= 0) {
      ((float4 *)values_of(partial, to))[i] = o;
      if (i % (VALUES / 4) == 0) max_and_sum_of(partial, to)[r] = make_float2(max, sum);
    } else if (float *row = row_pointer(out, b, head, r)) {
      const float inverse = 1.0f / with_sink(sum, max, head_sinks, query_head(head, r));
      ((float4 *)row)[i % (VALUES / 4)] = make_float4(o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse);
    }
  }
  sync_team();
}

// --- followers

// Partitions of a follower that have records in its own space: to the end of the section in which it continues alone.
DEVICE int own_space_partitions(int first, int context) {
  return min(last_partition(context) + 1, (first + SECTION_PARTITIONS - 1) / SECTION_PARTITIONS * SECTION_PARTITIONS);
}
DEVICE int sections_of(int context) { return last_partition(context) / SECTION_PARTITIONS + 1; }

// Merges all records of a follower into its output.
DEVICE void finish_follower(float *out, const float *head_sinks, const Records &partial, int b, int head, const Batch &batch) {
  const int context = batch.contexts[b], partitions = own_space_partitions(shared_partitions(batch, b), context);
  const int sections = sections_of(context), record = first_record(partial, b, head);
#pragma unroll 1
  for (int section = 0;; section++) {
    const int partition = section * SECTION_PARTITIONS;
    const bool all = partition >= partitions;
    const int from = all ? record : record + SECTIONS + partition, count = all ? sections : min(SECTION_PARTITIONS, partitions - partition);
    const int to = all || sections == 1 ? -1 : record + section;
    merge(partial, from, count, to, out, head_sinks, b, head);
    if (to < 0) return;
  }
}

// Each of the sequences at.b + from to at.b + end - 1 has one more record; finishes those that are complete.
DEVICE void count_follower_records(float *out, const float *head_sinks, const Records &partial, u32 *counters, const Cursor &at, int from,
                                   int end, const Batch &batch) {
  const int i = threadIdx.x, b = at.b + i;
  bool last = false;
  __syncwarp();
  if (i >= from && i < end) {
    const int context = batch.contexts[b], partitions = own_space_partitions(shared_partitions(batch, b), context);
    const int expected = partitions + sections_of(context) - (partitions + SECTION_PARTITIONS - 1) / SECTION_PARTITIONS;
    u32 *counter = counters + gridDim.x * 2 + b * HEADS + at.head;
    last = (int)arrive(counter, 1) == expected - 1;
    if (last) *counter = 0;
  }
  u32 complete = __ballot_sync(ALL_LANES, last);
  __syncwarp();
#pragma unroll 1
  for (; complete; complete &= complete - 1) finish_follower(out, head_sinks, partial, at.b + __ffs((int)complete) - 1, at.head, batch);
}

// --- the end of a unit

// Partitions of this run from `low` to the present one.
DEVICE int finished_since(const Cursor &at, const Run &run, int low) {
  const int skipped = run.first - unit_at(at, low), two = 2 * max(0, twice_of(at) - low);
  return at.start / PARTITION + 1 - low - (skipped <= 0 ? 0 : skipped <= two ? (skipped + 1) / 2 : skipped - two / 2);
}

// The end of a partition whose record belongs in a warp's space: one that the sequence reads itself and, of a follower, that comes after
// its own space. `at` is a tile of it. For a follower, returns whether a section is complete.
DEVICE bool end_partition(const RowState &state, const float (&sum)[2], float *out, const float *head_sinks, const Records &partial,
                          u32 *counters, const Run &run, const Cursor &at) {
  const int partition = at.start / PARTITION, first = first_of(at), last = last_partition(at.context);
  const int section = partition / SECTION_PARTITIONS;
  const bool follower = is_follower(at.share);
  if (first == last && !follower) {
    write_output(state, sum, out, head_sinks, at);
    return false;
  }
  const int low = max(first, section * SECTION_PARTITIONS), high = min(last, section * SECTION_PARTITIONS + SECTION_PARTITIONS - 1);
  const Space space = space_of(run, unit_at(at, low), unit_at(at, high));
  const int record = first_record(space);
  write_record(state, sum, partial, record + partition % SECTION_PARTITIONS);
  if (partition != high && unit_at(at, partition + 1) < run.end) return false;
  if (space.exclusive) sync_team();
  else if (!is_last(counters + 2 * space.owner, finished_since(at, run, low), high - low + 1)) return false;
  const int first_section = first / SECTION_PARTITIONS, last_section = last / SECTION_PARTITIONS;
  const Space all = space_of(run, unit_at(at, first), unit_at(at, last));
  const int records = follower ? first_record(partial, at.b, at.head) : first_record(all) + SECTION_PARTITIONS;
  const bool only = first_section == last_section && !follower;
  int from = record + low % SECTION_PARTITIONS, end = from + high - low + 1, to = only ? -1 : records + section;
#pragma unroll 1
  for (;;) {
    merge(partial, from, end - from, to, out, head_sinks, at.b, at.head);
    if (to < 0) return false;
    if (follower) return true;
    if (all.exclusive ? section != last_section : !is_last(counters + 2 * all.owner + 1, 1, last_section - first_section + 1)) return false;
    from = records + first_section, end = records + last_section + 1, to = -1;
  }
}

DEVICE void sum_rows(float (&sum)[2], const RowState &state) {
#pragma unroll
  for (int r = 0; r < 2; r++) sum[r] = row_sum(state.sum[r]);
}

// `at` is a tile of the unit, which was read for `sequences` sequences; `state` is that of the first pass.
DEVICE void end_unit(const RowState &state, float *out, const float *head_sinks, const Records &partial, u32 *counters, const Batch &batch,
                     const Run &run, const Cursor &at, int sequences) {
  float sum[2];
  sum_rows(sum, state);
  const bool own_space = is_follower(at.share) && at.start / PARTITION < own_space_partitions(at.share.first, at.context);
  int from = own_space ? 0 : 1;
  if (CASCADE && sequences > from) write_follower_records(state, sum, partial, at, 0, from, sequences);
  if (!own_space && end_partition(state, sum, out, head_sinks, partial, counters, run, at)) from = 0;
  if (CASCADE && sequences > from) count_follower_records(out, head_sinks, partial, counters, at, from, sequences, batch);
}
