// out[b] = softmax(q[b] k^T * SCALE) v over the keys of sequence b that its newest token sees: one row a sequence.
//
//   out           [T, H, D] float32          rows from `count` on are not touched
//   partial       [RECORDS_OF_ALL * ROWS * (D + 2)] float32, scratch: grid * 2 * (STRETCH / 256 + STRETCHES) records, and, if CASCADE,
//                                            B * K * PARTS * (STRETCHES + min(CASCADE, ceil(M * S / 256))); STRETCHES = ceil(M * S / STRETCH)
//   counters      [grid * 2 + (CASCADE ? B * K * PARTS : 0)] uint32, zero between launches
//   q             [T, H, D] float32          row b is sequence b's
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; this step's are in it
//   block_tables  [B, M] int32               entries behind a context are not read
//   context_lens  [B] int32                  tokens in the cache, at least 1, at most M * S, of those that count
//   count         [1] int32                  sequences that count
//   alike         [B] int32, if CASCADE      leading tokens of sequence b that lie in the same blocks as those of sequence b - 1, whole blocks
//                                            that both have filled; 0 for the first, and a smaller number is never wrong
//
// Beside attention.cuh's constants: B, the length of context_lens. PARTS = ceil(H / K / 16), ROWS = ceil(H / K / PARTS). CASCADE: chunks of
// a sequence, a multiple of STRETCH / 256, that others may read for it, or 0.
// Launch: block 32; shared memory SHARED = RING * 32 * (2 * D + 16) + (D <= 128 ? 0 : 32 * D - 2048) bytes, RING = min(8, max(2, 512 / D));
// grid as many as the GPU holds at once, multiprocessors * floor(their shared memory / (SHARED + 1024)), and no more than units there can
// be, B * K * PARTS * ceil(M * S / 256). D = 128: 34 KiB, six on a multiprocessor of 228 KiB.
//
// A block of threads is one warp. Units are (sequence, KV head's rows, chunk of 256 keys), in this order, and each warp takes an equal run
// of them, whatever the lengths of the sequences are: one long sequence fills the GPU, and so do many short ones. A warp's keys and values
// come through a ring of RING stages of 32 rows of its own, over the borders of units: while it works on one stage, the others are on
// their way, 8 KiB each at D = 128. More than sixteen query heads to a KV head are as many parts, which read the same keys.
//
// A sequence of one chunk is finished at once. Of others each chunk leaves a record (top, sum, ROWS rows of weighted values); who is last
// to finish its part of a stretch merges the chunks into a record of the stretch, and who is last to finish a stretch merges those. The
// records of what runs of several warps share lie where the owner of its first unit has kept room for them: scratch grows with the grid,
// and not with the number of sequences.
//
// Cascade. A chunk that lies in the same blocks for sequences that follow each other is one unit, that of the first of them, which reads it
// for all: their rows fill the sixteen of an mma, of which H / K are one sequence's, and where registers hold them, for heads up to 64, a
// tile meets a second sixteen before its stages are given away. A run of such sequences is cut into bundles of that many, counted from the
// last one that has nothing in common with the one before it. A unit whose tiles meet two sixteens counts as two when units are spread over warps, and where
// there are too few units for all warps, nobody takes two. A chunk in which tables part is read by each for itself. (A tile of it would be
// met by rows that do not see it, and 0 times the NaN of somebody's broken value is NaN.) So is everything once a context has left its
// WINDOW. Only the reading is shared: each (sequence, query head, chunk) has the arithmetic, and the bits, that it has alone, and is merged
// as it is alone. A sequence that others read for has a place of its own for its chunks' records, as far as the stretch in which it goes on
// alone, and for its stretches'; whoever brings the last of these merges them.
// Scores and sums in float32; the order of the arithmetic is attention.cuh's.
#include "attention.cuh"

#ifndef CASCADE
#define CASCADE 0
#endif

constexpr int PARTS = (G + 15) / 16;
constexpr int ROWS = (G + PARTS - 1) / PARTS;
constexpr int HEADS = K * PARTS;
constexpr int RING = D >= 256 ? 2 : D <= 64 ? 8 : 512 / D;
constexpr int STAGE_KEYS = 32;
constexpr int STAGE_BYTES = STAGE_KEYS * PITCH;
constexpr int CHUNKS = STRETCH / CHUNK;                      // of a stretch
constexpr int STRETCHES = (M * S + STRETCH - 1) / STRETCH;   // of a sequence
constexpr int RECORDS = CHUNKS + STRETCHES;
constexpr int TOGETHER = CASCADE ? 16 / ROWS : 1;            // sequences whose rows an mma has
constexpr int PASSES = CASCADE && D <= 64 ? 2 : 1;           // mmas that a tile meets, at most
constexpr int KEPT = CASCADE ? STRETCHES + ((M * S + CHUNK - 1) / CHUNK < CASCADE ? (M * S + CHUNK - 1) / CHUNK : CASCADE) : 0;
constexpr int COPIES_AT_ONCE = D <= 160 ? 32 : 4; // of a run; wide heads leave few registers
constexpr int AT_ONCE = 16; // records that a merge has on their way

DEVICE int first_chunk(int context) { return first_seen(context - 1) / CHUNK; }
DEVICE int last_chunk(int context) { return (context - 1) / CHUNK; }

static_assert(CASCADE % CHUNKS == 0, "attention_decode: CASCADE is whole stretches");
static_assert(PASSES == 1 || (RING >= 4 && RING >= STEPS), "attention_decode: a tile that is met twice lies in the ring");

// --- who does what

// What the kernel is told of all sequences.
struct Step {
  const int *tables, *contexts, *alike;
  int count;
};

// Chunks that sequence b has in common with b - 1, all of them the first of both, and seen as a whole. It keeps one to itself.
DEVICE int in_common(const Step &step, int b) {
  if (!CASCADE || b == 0) return 0;
  const int context = step.contexts[b], before = step.contexts[b - 1];
  if (first_seen(context - 1) > 0 || first_seen(before - 1) > 0) return 0;
  return smaller(smaller(step.alike[b], before) / CHUNK, smaller(CASCADE, last_chunk(context)));
}

// How a sequence shares. One with `offset` 0 follows nobody.
struct Share {
  int offset; // its place in the bundle
  int lead;   // its first chunk that it reads itself
  int twice;  // chunks from `lead` to here it reads for rows that are two mmas
};
// Asked so that registers hold only what a variant of the kernel needs.
DEVICE bool follows(const Share &share) { return CASCADE && share.offset; }
DEVICE int lead_of(const Share &share, int context) { return CASCADE ? share.lead : first_chunk(context); }
DEVICE int twice_of(const Share &share, int context) { return PASSES == 2 ? share.twice : lead_of(share, context); }

// `common`: in_common(b); `behind`: how many stand between b and the last that had nothing in common; `most`: sequences of a bundle.
DEVICE Share share_of(const Step &step, int b, int context, int common, int behind, int most) {
  Share share;
  share.offset = behind % most;
  share.lead = share.twice = share.offset ? common : first_chunk(context);
  if (PASSES == 1 || most == TOGETHER || share.offset >= TOGETHER) return share;
  int least = CASCADE;
#pragma unroll
  for (int i = 1; i <= TOGETHER; i++) least = smaller(least, b + i < step.count ? in_common(step, b + i) : 0);
  share.twice = larger(share.lead, least);
  return share;
}

// Units are numbered as if one that meets two mmas were two: of one head, those from one chunk of a sequence to another, both of its own.
DEVICE int units_between(const Share &share, int from, int to) {
  return to - from + (PASSES == 2 ? smaller(to, share.twice) - smaller(from, share.twice) : 0);
}
DEVICE int units_of(const Share &share, int context) { return units_between(share, lead_of(share, context), last_chunk(context) + 1); }

// This warp's run of units, and everybody's. A unit is whose run its first number is in.
struct Run {
  int first, past; // unit numbers
  int total, warps;
  int most; // sequences of a bundle
};
DEVICE int owner_of(const Run &run, int unit) { return (int)(((s64)(unit + 1) * run.warps - 1) / run.total); }

// A tile of keys: of which unit, sequence and head, and its first key.
struct Place {
  int unit, b, head, context, start;
  Share share;
};
DEVICE int lead_of(const Place &at) { return lead_of(at.share, at.context); }
DEVICE int twice_of(const Place &at) { return twice_of(at.share, at.context); }
DEVICE int unit_at(const Place &at, int chunk) { return at.unit + units_between(at.share, at.start / CHUNK, chunk); }

DEVICE void begin_head(Place &at) { at.start = larger(first_seen(at.context - 1) & -TILE, lead_of(at) * CHUNK); }

DEVICE void begin_sequence(Place &at, const Step &step, const Run &run) {
  const int common = in_common(step, at.b);
  at.context = step.contexts[at.b];
  at.share = share_of(step, at.b, at.context, common, common ? at.share.offset + 1 : 0, run.most);
}

DEVICE bool ends_unit(const Place &at) { return at.start + TILE >= at.context || (at.start + TILE) % CHUNK == 0; }

DEVICE void advance(Place &at, const Step &step, const Run &run) {
  if (ends_unit(at)) at.unit += PASSES == 2 && at.start / CHUNK < at.share.twice ? 2 : 1;
  at.start += TILE;
  if (at.start < at.context) return;
  if (++at.head == HEADS) {
    at.head = 0, at.b++;
    if (at.unit < run.past) begin_sequence(at, step, run);
  }
  begin_head(at);
}

// A lane's of 32 sequences.
struct Lane {
  int context, common;
  int behind; // after the last that has nothing in common
  bool counts;
};

// Sequences from `base` on; `last` is the last one with nothing in common with that before it.
DEVICE Lane lane_of(const Step &step, int base, int &last) {
  const int lane = threadIdx.x, b = base + lane;
  Lane one;
  one.counts = b < step.count;
  one.context = b < B ? step.contexts[b] : 0;
  one.common = one.counts ? in_common(step, b) : 0;
  one.behind = 0;
  if (CASCADE) {
    const u32 alone = __ballot_sync(ALL_LANES, one.common == 0), till = alone & ALL_LANES >> (31 - lane);
    one.behind = till ? lane - 31 + __clz((int)till) : b - last;
    last = __shfl_sync(ALL_LANES, b - one.behind, 31);
  }
  return one;
}

DEVICE int units_of_lane(const Step &step, int b, const Lane &one, int most) {
  return one.counts ? units_of(share_of(step, b, one.context, one.common, one.behind, most), one.context) : 0;
}

// Two mmas to a tile, if with one there would be more units than warps.
DEVICE void count_units(Run &run, const Step &step) {
  int once = 0, twice = 0, last = 0;
#pragma unroll 2
  for (int base = 0; base < B; base += 32) {
    const Lane one = lane_of(step, base, last);
    once += units_of_lane(step, base + threadIdx.x, one, TOGETHER);
    if (PASSES == 2) twice += units_of_lane(step, base + threadIdx.x, one, 2 * TOGETHER);
  }
  run.most = TOGETHER;
  run.total = __reduce_add_sync(ALL_LANES, once) * HEADS;
  if (PASSES == 1 || run.total <= (int)gridDim.x) return;
  run.most = 2 * TOGETHER;
  run.total = __reduce_add_sync(ALL_LANES, twice) * HEADS;
}

DEVICE bool find_run(Run &run, Place &at, const Step &step) {
  count_units(run, step);
  run.warps = smaller(gridDim.x, run.total);
  if ((int)blockIdx.x >= run.warps) return false;
  run.first = (int)((s64)run.total * blockIdx.x / run.warps);
  run.past = (int)((s64)run.total * (blockIdx.x + 1) / run.warps);
  int before = 0, last = 0, owner = -1;
  Share share;
  for (int base = 0; owner < 0; base += 32) {
    const Lane one = lane_of(step, base, last);
    share = share_of(step, base + threadIdx.x, one.context, one.common, one.behind, run.most);
    owner = find_lane(run.first, one.counts ? units_of(share, one.context) * HEADS : 0, before);
    at.b = base + owner;
  }
  at.context = step.contexts[at.b];
  at.share = {__shfl_sync(ALL_LANES, share.offset, owner), __shfl_sync(ALL_LANES, share.lead, owner),
              __shfl_sync(ALL_LANES, share.twice, owner)};
  const int units = units_of(at.share, at.context), number = (run.first - before) % units, two = 2 * (twice_of(at) - lead_of(at));
  at.head = (run.first - before) / units;
  begin_head(at);
  const int chunk = lead_of(at) + (number < two ? number / 2 : number - two / 2);
  at.start = larger(at.start, chunk * CHUNK);
  at.unit = number < two ? run.first - number % 2 : run.first;
  if (at.unit == run.first) return true;
  at.start = smaller((chunk + 1) * CHUNK, (at.context + TILE - 1) & -TILE) - TILE; // the second number of somebody else's: on to the next
  advance(at, step, run);
  return at.unit < run.past;
}

// Chunks that a sequence reads for others, too, if it reads them itself.
DEVICE int read_for_others(const Place &at, const Step &step, const Run &run) {
  return at.share.offset + 1 < run.most && at.b + 1 < step.count ? in_common(step, at.b + 1) : 0;
}

// Sequences from at.b on that a unit is read for.
DEVICE int company(const Place &at, const Step &step, const Run &run) {
  const int i = threadIdx.x, b = at.b + i;
  const bool there = i > 0 && at.share.offset + i < run.most && b < step.count;
  return __ffs((int)~(__ballot_sync(ALL_LANES, there && in_common(step, b) > at.start / CHUNK) >> 1));
}

// --- what is on its way

// Stages are sent for in the order of the tiles, and of a tile first keys 0 to 31, then keys 32 to 63, then their values. Lane l looks up
// where keys l and l + 32 of a tile lie, and in time: their blocks are read from the table when the tile before is sent for.
struct Stream {
  Place next;      // the tile after the one that is being sent for
  int block[2];    // of its keys; -1 where the whole run of them is not seen
  u32 row[2];      // of the present tile's keys, in the cache
  int first, past; // keys of the present tile that are seen
  bool there;      // is there a present tile?
  int slot;        // of the ring
};

// Keys that lie side by side in a block, and in a stage.
constexpr int SIDE_BY_SIDE = S < STAGE_KEYS ? S : STAGE_KEYS;

DEVICE void look_up(Stream &stream, const Step &step, const Run &run) {
  const Place &at = stream.next;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = at.start + half * STAGE_KEYS + threadIdx.x, low = key & -SIDE_BY_SIDE;
    const bool seen = low < at.context && low + SIDE_BY_SIDE > first_seen(at.context - 1);
    stream.block[half] = at.unit < run.past && seen ? step.tables[(s64)at.b * M + key / S] : -1;
  }
}

DEVICE void begin_tile(Stream &stream, const Step &step, const Run &run) {
  const Place &at = stream.next;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = at.start + half * STAGE_KEYS + threadIdx.x;
    stream.row[half] = row_at(larger(stream.block[half], 0), at.head / PARTS, key);
  }
  stream.first = first_seen(at.context - 1) - at.start, stream.past = at.context - at.start;
  stream.there = at.unit < run.past;
  if (!stream.there) return;
  advance(stream.next, step, run);
  look_up(stream, step, run);
}

// The runs of a stage that lie side by side, piece for piece; zeros for keys of the stage outside of first to past - 1.
template <bool WHOLE> DEVICE void send_stage(u8 *slot, const uint4 *side, u32 row, int first, int past) {
  constexpr int RUN_PIECES = SIDE_BY_SIDE * PIECES;
#pragma unroll(WHOLE ? 4 : 1)
  for (int base = 0; base < STAGE_KEYS; base += SIDE_BY_SIDE) {
    const uint4 *from = side + __shfl_sync(ALL_LANES, row, base) + threadIdx.x;
#pragma unroll(WHOLE ? COPIES_AT_ONCE : 1)
    for (int i = 0; i < RUN_PIECES; i += 32) {
      const int piece = i + threadIdx.x, key = base + piece / PIECES;
      if (RUN_PIECES % 32 && piece >= RUN_PIECES) continue;
      u8 *to = slot + key * PITCH + piece % PIECES * 16;
      if (WHOLE) copy_16(to, from + i);
      else copy_16_or_zero(to, from + i, key >= first && key < past);
    }
  }
}

// Stage number `stage` of a tile into the slot that all lanes are done with; behind the last one nothing, but a group all the same:
// copy_wait counts them.
DEVICE void send_for(Stream &stream, int stage, u8 *ring, const uint4 *cache, const Step &step, const Run &run) {
  __syncwarp();
  if (stage == 0) begin_tile(stream, step, run);
  if (stream.there) {
    const int half = stage % 2, first = stream.first - half * STAGE_KEYS, past = stream.past - half * STAGE_KEYS;
    const uint4 *side = stage >= 2 ? cache + SIDE : cache;
    const u32 row = half ? stream.row[1] : stream.row[0];
    u8 *slot = ring + stream.slot * STAGE_BYTES;
    if (first <= 0 && past >= STAGE_KEYS) send_stage<true>(slot, side, row, first, past);
    else send_stage<false>(slot, side, row, first, past);
  }
  copy_commit();
  stream.slot = stream.slot + 1 == RING ? 0 : stream.slot + 1;
}

// --- records

// Where the records of a stretch or of a sequence begin, and whether others write to them, too.
struct Room {
  int owner;
  bool own;
};
DEVICE Room room_of(const Run &run, int first, int last) {
  const bool own = first >= run.first && last < run.past;
  return {own ? (int)blockIdx.x : owner_of(run, first), own};
}
// Each warp has room twice: for what is its own, and for what it shares with the warps behind it.
DEVICE int record_of(const Room &room) { return (room.owner * 2 + !room.own) * RECORDS; }
// A sequence that others read for: first the records of its stretches, then of its chunks.
DEVICE int record_of(int b, int head) { return gridDim.x * 2 * RECORDS + (b * HEADS + head) * KEPT; }

DEVICE float *sums_of(float *partial, int record) { return partial + (s64)record * (ROWS * D); }
DEVICE float2 *ends_of(float *partial, int record) {
  const int records = gridDim.x * 2 * RECORDS + (CASCADE ? B * HEADS * KEPT : 0);
  return (float2 *)(partial + (s64)records * (ROWS * D)) + (s64)record * ROWS;
}

// Is this warp the last of `expected` to come, itself with `more` of them? Then all of what the others wrote can be read.
DEVICE bool is_last(u32 *counter, int more, int expected) {
  u32 before = 0;
  __syncwarp();
  if (threadIdx.x == 0) {
    before = arrive(counter, more);
    if ((int)before == expected - more) *counter = 0;
  }
  before = __shfl_sync(ALL_LANES, before, 0);
  __syncwarp();
  return (int)before == expected - more;
}

// Where row r of a part of the heads begins in q and out; null if there is no such row.
template <typename Number> DEVICE Number *row_of(Number *rows, int b, int head, int r) {
  const int row = head % PARTS * ROWS + r;
  return r < ROWS && row < G ? rows + ((s64)b * H + head / PARTS * G + row) * D : nullptr;
}

DEVICE void finish_alone(const Rows &rows, const float (&sum)[2], float *out, const Place &at) {
  const int g = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float *row = row_of(out, at.b, at.head, g + 8 * r);
    if (row == nullptr) continue;
    const float inverse = 1.0f / sum[r];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
      *(float2 *)(row + n * 8 + column) = make_float2(rows.o[n][2 * r] * inverse, rows.o[n][2 * r + 1] * inverse);
  }
}

// The lane's row r of an mma as row `row` of a record.
DEVICE void put_row(const Rows &rows, const float (&sum)[2], int r, float *partial, int record, int row) {
  const int t = threadIdx.x % 4;
  float *to = sums_of(partial, record) + row * D + t * 2;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) *(float2 *)(to + n * 8) = make_float2(rows.o[n][2 * r], rows.o[n][2 * r + 1]);
  if (t == 0) ends_of(partial, record)[row] = make_float2(rows.top[r], sum[r]);
}

DEVICE void put_record(const Rows &rows, const float (&sum)[2], float *partial, int record) {
  const int g = threadIdx.x / 4;
#pragma unroll
  for (int r = 0; r < 2; r++)
    if (g + 8 * r < ROWS) put_row(rows, sum, r, partial, record, g + 8 * r);
}

DEVICE void sum_up(float (&sum)[2], const Rows &rows) {
#pragma unroll
  for (int r = 0; r < 2; r++) sum[r] = whole_sum(rows.sum[r]);
}

// Of mma number `pass`, what belongs to sequences at.b + from to at.b + past - 1, to places of their own.
DEVICE void put_shared(const Rows &rows, const float (&sum)[2], float *partial, const Place &at, int pass, int from, int past) {
  const int g = threadIdx.x / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = pass * TOGETHER + (g + 8 * r) / ROWS;
    if ((g + 8 * r) / ROWS >= TOGETHER || i < from || i >= past) continue;
    put_row(rows, sum, r, partial, record_of(at.b + i, at.head) + STRETCHES + at.start / CHUNK, (g + 8 * r) % ROWS);
  }
}

DEVICE float4 merged(float4 o, float4 next, const Fades &fades) {
  return make_float4(fmaf(next.x, fades.b, o.x * fades.a), fmaf(next.y, fades.b, o.y * fades.a), fmaf(next.z, fades.b, o.z * fades.a),
                     fmaf(next.w, fades.b, o.w * fades.a));
}

// `count` records from `record` on become one, number `to`, or, where that is -1, the rows of `out` of this head. Afterwards the records may
// be written to again.
DEVICE void merge(float *partial, int record, int count, int to, float *out, int b, int head) {
  for (int i = threadIdx.x; i < ROWS * D / 4; i += 32) {
    const int r = i / (D / 4);
    const float4 *sums = (const float4 *)sums_of(partial, record) + i;
    const float2 *ends = ends_of(partial, record) + r;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float top = NEVER, sum = 0.0f;
    for (int left = count; left > 0; left -= AT_ONCE) {
      float4 next[AT_ONCE];
      float2 end[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const int record = smaller(j, left - 1);
        next[j] = sums[record * (ROWS * D / 4)], end[j] = ends[record * ROWS];
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const Fades fades = fades_of(top, j < left ? end[j].x : NEVER);
        top = fades.top;
        sum = fmaf(end[j].y, fades.b, sum * fades.a);
        o = merged(o, next[j], fades);
      }
      sums += AT_ONCE * (ROWS * D / 4), ends += AT_ONCE * ROWS;
    }
    if (to >= 0) {
      ((float4 *)sums_of(partial, to))[i] = o;
      if (i % (D / 4) == 0) ends_of(partial, to)[r] = make_float2(top, sum);
    } else if (float *row = row_of(out, b, head, r)) {
      const float inverse = 1.0f / sum;
      ((float4 *)row)[i % (D / 4)] = make_float4(o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse);
    }
  }
  __syncwarp();
}

// --- a sequence that others read for

// Its chunks that have records of their own: to the end of the stretch in which it goes on alone.
DEVICE int kept_chunks(int lead, int context) { return smaller(last_chunk(context) + 1, (lead + CHUNKS - 1) / CHUNKS * CHUNKS); }
DEVICE int stretches_of(int context) { return last_chunk(context) / CHUNKS + 1; }

DEVICE void finish_follower(float *out, float *partial, int b, int head, const Step &step) {
  const int context = step.contexts[b], kept = kept_chunks(in_common(step, b), context), stretches = stretches_of(context);
  const int record = record_of(b, head);
#pragma unroll 1
  for (int stretch = 0;; stretch++) {
    const int chunk = stretch * CHUNKS;
    const bool all = chunk >= kept;
    const int from = all ? record : record + STRETCHES + chunk, count = all ? stretches : smaller(CHUNKS, kept - chunk);
    const int to = all || stretches == 1 ? -1 : record + stretch;
    merge(partial, from, count, to, out, b, head);
    if (to < 0) return;
  }
}

// Each of the sequences at.b + from to at.b + past - 1 has one record more.
DEVICE void hand_over(float *out, float *partial, u32 *counters, const Place &at, int from, int past, const Step &step) {
  const int i = threadIdx.x, b = at.b + i;
  bool last = false;
  __syncwarp();
  if (i >= from && i < past) {
    const int context = step.contexts[b], kept = kept_chunks(in_common(step, b), context);
    const int expected = kept + stretches_of(context) - (kept + CHUNKS - 1) / CHUNKS;
    u32 *counter = counters + gridDim.x * 2 + b * HEADS + at.head;
    last = (int)arrive(counter, 1) == expected - 1;
    if (last) *counter = 0;
  }
  u32 all = __ballot_sync(ALL_LANES, last);
  __syncwarp();
#pragma unroll 1
  for (; all; all &= all - 1) finish_follower(out, partial, at.b + __ffs((int)all) - 1, at.head, step);
}

// --- a unit is done

// Chunks of this run from `low` to the present one.
DEVICE int done_since(const Place &at, const Run &run, int low) {
  const int skipped = run.first - unit_at(at, low), two = 2 * larger(0, twice_of(at) - low);
  return at.start / CHUNK + 1 - low - (skipped <= 0 ? 0 : skipped <= two ? (skipped + 1) / 2 : skipped - two / 2);
}

// The chunk of a sequence that nobody else reads it for, and has no record of its own. `at` is a tile of it. Of a sequence that others read
// for, whether a stretch is done.
DEVICE bool end_own(const Rows &rows, const float (&sum)[2], float *out, float *partial, u32 *counters, const Run &run, const Place &at) {
  const int chunk = at.start / CHUNK, first = lead_of(at), last = last_chunk(at.context), stretch = chunk / CHUNKS;
  const bool waits = follows(at.share); // for what others read for it
  if (first == last && !waits) {
    finish_alone(rows, sum, out, at);
    return false;
  }
  const int low = larger(first, stretch * CHUNKS), high = smaller(last, stretch * CHUNKS + CHUNKS - 1);
  const Room room = room_of(run, unit_at(at, low), unit_at(at, high));
  const int record = record_of(room);
  put_record(rows, sum, partial, record + chunk % CHUNKS);
  if (chunk != high && unit_at(at, chunk + 1) < run.past) return false;
  if (room.own) __syncwarp();
  else if (!is_last(counters + 2 * room.owner, done_since(at, run, low), high - low + 1)) return false;
  const int first_stretch = first / CHUNKS, last_stretch = last / CHUNKS;
  const Room all = room_of(run, unit_at(at, first), unit_at(at, last));
  const int records = waits ? record_of(at.b, at.head) : record_of(all) + CHUNKS;
  const bool only = first_stretch == last_stretch && !waits;
  int from = record + low % CHUNKS, past = from + high - low + 1, to = only ? -1 : records + stretch;
#pragma unroll 1
  for (;;) {
    merge(partial, from, past - from, to, out, at.b, at.head);
    if (to < 0) return false;
    if (waits) return true;
    if (all.own ? stretch != last_stretch : !is_last(counters + 2 * all.owner + 1, 1, last_stretch - first_stretch + 1)) return false;
    from = records + first_stretch, past = records + last_stretch + 1, to = -1;
  }
}

// `at` is a tile of the unit, which was read for `sequences`; `rows` those of the first mma.
DEVICE void end_unit(const Rows &rows, float *out, float *partial, u32 *counters, const Step &step, const Run &run, const Place &at,
                     int sequences) {
  float sum[2];
  sum_up(sum, rows);
  const bool kept = follows(at.share) && at.start / CHUNK < kept_chunks(at.share.lead, at.context);
  int from = kept ? 0 : 1;
  if (CASCADE && sequences > from) put_shared(rows, sum, partial, at, 0, from, sequences);
  if (!kept && end_own(rows, sum, out, partial, counters, run, at)) from = 0;
  if (CASCADE && sequences > from) hand_over(out, partial, counters, at, from, sequences, step);
}

// --- the run

// The stage that is sent for next takes the slot of the one that is read now.
DEVICE const u8 *stage_at(const u8 *ring, int slot) {
  copy_wait<RING - 1>();
  __syncwarp();
  return ring + slot * STAGE_BYTES;
}
// A stage of the present tile, while nothing of it has been given away.
template <int STAGE> DEVICE const u8 *stage_of_tile(const u8 *ring, int slot) {
  copy_wait<(RING > STAGE ? RING - 1 - STAGE : 0)>();
  __syncwarp();
  return ring + (slot + STAGE < RING ? slot + STAGE : slot + STAGE - RING) * STAGE_BYTES;
}

// Rows r and r + 8 of mma number `pass` begin here in q, for a unit of so many sequences; null if there is no such row.
struct Pair {
  const float *row, *other;
};
DEVICE const float *row_of_group(const float *q, const Place &at, int pass, int r, int sequences) {
  const int i = pass * TOGETHER + r / ROWS;
  return r / ROWS < TOGETHER && i < sequences ? row_of(q, at.b + i, at.head, r % ROWS) : nullptr;
}
DEVICE Pair pair_of(const float *q, const Place &at, int pass, int sequences) {
  const int g = threadIdx.x / 4;
  return {row_of_group(q, at, pass, g, sequences), row_of_group(q, at, pass, g + 8, sequences)};
}

// The second mma's queries lie in the padding of the ring's rows, which has room for a step in each stage.
struct Second {
  u8 *ring;
};
DEVICE uint4 *place_of(const Second &second, int step) {
  return (uint4 *)(second.ring + step * STAGE_BYTES + threadIdx.x * PITCH + D * 2);
}
DEVICE void query_step(u32 (&a)[4], const Second &second, int step) {
  const uint4 all = *place_of(second, step);
  a[0] = all.x, a[1] = all.y, a[2] = all.z, a[3] = all.w;
}
DEVICE void load_second(const Second &second, const Pair &from) {
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 a[4];
    load_step(a, from.row, from.other, step);
    *place_of(second, step) = make_uint4(a[0], a[1], a[2], a[3]);
  }
}

// A tile for the rows of one mma. As they are done, its stages are given away.
template <bool WHOLE, typename Rows16>
DEVICE void attend(Rows &rows, const Rows16 &queries, Stream &stream, u8 *ring, const uint4 *cache, const Place &at,
                   const Step &step, const Run &run) {
  float s[TILE / 8][4];
  score<0, 32>(s, queries, stage_at(ring, stream.slot) + key_place());
  send_for(stream, RING % 4, ring, cache, step, run);
  score<32, 32>(s, queries, stage_at(ring, stream.slot) + key_place());
  send_for(stream, (RING + 1) % 4, ring, cache, step, run);
  if (!WHOLE && (at.start < first_seen(at.context - 1) || at.start + TILE > at.context)) hide(s, at.start, {at.context - 1, at.context - 1});
  soften(s, rows);
  weigh<0, 32>(rows, s, stage_at(ring, stream.slot) + value_place());
  send_for(stream, (RING + 2) % 4, ring, cache, step, run);
  weigh<32, 32>(rows, s, stage_at(ring, stream.slot) + value_place());
  send_for(stream, (RING + 3) % 4, ring, cache, step, run);
}

// The same for the first of two: all see all of it, and it stays.
DEVICE void attend_first(Rows &rows, const Queries &queries, const Stream &stream, const u8 *ring) {
  float s[TILE / 8][4];
  score<0, 32>(s, queries, stage_of_tile<0>(ring, stream.slot) + key_place());
  score<32, 32>(s, queries, stage_of_tile<1>(ring, stream.slot) + key_place());
  soften(s, rows);
  weigh<0, 32>(rows, s, stage_of_tile<2>(ring, stream.slot) + value_place());
  weigh<32, 32>(rows, s, stage_of_tile<3>(ring, stream.slot) + value_place());
}

extern "C" __global__ void __launch_bounds__(32, D <= 32 ? 10 : 1)
    attention_decode(float *out, float *partial, u32 *counters, const float *q, const uint4 *cache, const int *block_tables,
#if CASCADE
                     const int *context_lens, const int *count, const int *alike) {
#else
                     const int *context_lens, const int *count) {
  const int *alike = nullptr;
#endif
  DYNAMIC_SHARED(ring);
  const Step step = {block_tables, context_lens, alike, smaller(B, count[0])};
  Run run;
  Stream stream;
  if (!find_run(run, stream.next, step)) return;
  Place at = stream.next;
  look_up(stream, step, run);
  stream.slot = 0;
#pragma unroll 1
  for (int i = 0; i < RING; i++) send_for(stream, i % 4, ring, cache, step, run);

  Queries queries;
  const Second second = {ring};
  Rows rows;
  int sequences = 1, loaded = 0; // of the present unit; whose queries are there
  int for_others = 0;
  while (at.unit < run.past) {
    if (CASCADE && loaded == 0) for_others = read_for_others(at, step, run);
    if (CASCADE) sequences = at.start / CHUNK < for_others ? company(at, step, run) : 1;
    if (sequences > loaded) {
      const Pair first = pair_of(q, at, 0, sequences);
      load_queries(queries, first.row, first.other, ring + RING * STAGE_BYTES, threadIdx.x, 32);
      if (PASSES == 2 && sequences > TOGETHER) load_second(second, pair_of(q, at, 1, sequences));
      loaded = sequences;
    }
    begin(rows);
    if (PASSES == 2 && sequences > TOGETHER) {
      Rows others;
      begin(others);
#pragma unroll 1
      for (int tile = 0; tile < CHUNK / TILE; tile++) {
        attend_first(rows, queries, stream, ring);
        attend<true>(others, second, stream, ring, cache, at, step, run);
      }
      at.start += CHUNK - TILE;
      float sum[2];
      sum_up(sum, others);
      put_shared(others, sum, partial, at, 1, TOGETHER, sequences);
    } else {
#pragma unroll 1
      for (;; at.start += TILE) {
        attend<false>(rows, queries, stream, ring, cache, at, step, run);
        if (ends_unit(at)) break;
      }
    }
    end_unit(rows, out, partial, counters, step, run, at, sequences);
    if (at.start + TILE >= at.context) loaded = 0;
    advance(at, step, run);
  }
}
