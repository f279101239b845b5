// out[b] = softmax(q[b] k^T * SCALE) v over the keys of sequence b that its newest token sees: one row a sequence.
//
//   out           [T, H, D] float32          rows from `count` on are not touched
//   partial       [grid * 2 * (STRETCH / 256 + STRETCHES) * ROWS * (D + 2)] float32, scratch; STRETCHES = ceil(M * S / STRETCH)
//   counters      [grid * 2] uint32          zero between launches
//   q             [T, H, D] float32          row b is sequence b's
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; this step's are in it
//   block_tables  [B, M] int32               entries behind a context are not read
//   context_lens  [B] int32                  tokens in the cache, at least 1, at most M * S, of those that count
//   count         [1] int32                  sequences that count
//
// Beside attention.cuh's constants: B, the length of context_lens. PARTS = ceil(H / K / 16), ROWS = ceil(H / K / PARTS).
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
// Scores and sums in float32; the order of the arithmetic is attention.cuh's.
#include "attention.cuh"

constexpr int PARTS = (G + 15) / 16;
constexpr int ROWS = (G + PARTS - 1) / PARTS;
constexpr int HEADS = K * PARTS;
constexpr int RING = D >= 256 ? 2 : D <= 64 ? 8 : 512 / D;
constexpr int STAGE_KEYS = 32;
constexpr int STAGE_BYTES = STAGE_KEYS * PITCH;
constexpr int CHUNKS = STRETCH / CHUNK;                      // of a stretch
constexpr int STRETCHES = (M * S + STRETCH - 1) / STRETCH;   // of a sequence
constexpr int RECORDS = CHUNKS + STRETCHES;
constexpr int COPIES_AT_ONCE = D <= 192 ? 32 : 4; // of a run; wide heads leave few registers
constexpr int AT_ONCE = 16; // records that a merge has on their way

DEVICE int first_chunk(int context) { return first_seen(context - 1) / CHUNK; }
DEVICE int last_chunk(int context) { return (context - 1) / CHUNK; }
DEVICE int chunks_of(int context) { return last_chunk(context) - first_chunk(context) + 1; }

// --- who does what

// This warp's run of units, and everybody's.
struct Run {
  int first, past; // unit numbers
  int total, warps;
};
DEVICE int owner_of(const Run &run, int unit) { return (int)(((s64)(unit + 1) * run.warps - 1) / run.total); }

// A tile of keys: of which unit, sequence and head, and its first key.
struct Place {
  int unit, b, head, context, start;
};

DEVICE void begin_head(Place &at) { at.start = first_seen(at.context - 1) & -TILE; }

DEVICE void advance(Place &at, const Run &run, const int *context_lens) {
  at.start += TILE;
  if (at.start < at.context) {
    if (at.start % CHUNK == 0) at.unit++;
    return;
  }
  at.unit++;
  if (++at.head == HEADS) {
    at.head = 0, at.b++;
    if (at.unit < run.past) at.context = context_lens[at.b];
  }
  begin_head(at);
}

DEVICE bool find_run(Run &run, Place &at, const int *context_lens, const int *count) {
  const int lane = threadIdx.x, sequences = smaller(B, count[0]);
  int total = 0;
#pragma unroll 4
  for (int b = lane; b < B; b += 32) {
    const int context = context_lens[b];
    total += b < sequences ? chunks_of(context) : 0;
  }
  run.total = __reduce_add_sync(ALL_LANES, total) * HEADS;
  run.warps = smaller(gridDim.x, run.total);
  if ((int)blockIdx.x >= run.warps) return false;
  run.first = (int)((s64)run.total * blockIdx.x / run.warps);
  run.past = (int)((s64)run.total * (blockIdx.x + 1) / run.warps);
  int before;
  at.unit = run.first;
  find(run.first, 0, sequences, [=](int b) { return chunks_of(context_lens[b]) * HEADS; }, at.b, before);
  at.context = context_lens[at.b];
  const int chunks = chunks_of(at.context);
  at.head = (run.first - before) / chunks;
  begin_head(at);
  at.start = larger(at.start, (first_chunk(at.context) + (run.first - before) % chunks) * CHUNK);
  return true;
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
  int stage;       // of the present tile
  int slot;        // of the ring
};

// Keys that lie side by side in a block, and in a stage.
constexpr int SIDE_BY_SIDE = S < STAGE_KEYS ? S : STAGE_KEYS;

DEVICE void look_up(Stream &stream, const Run &run, const int *block_tables) {
  const Place &at = stream.next;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = at.start + half * STAGE_KEYS + threadIdx.x, low = key & -SIDE_BY_SIDE;
    const bool seen = low < at.context && low + SIDE_BY_SIDE > first_seen(at.context - 1);
    stream.block[half] = at.unit < run.past && seen ? block_tables[(s64)at.b * M + key / S] : -1;
  }
}

DEVICE void begin_tile(Stream &stream, const Run &run, const int *block_tables, const int *context_lens) {
  const Place &at = stream.next;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = at.start + half * STAGE_KEYS + threadIdx.x;
    stream.row[half] = row_at(larger(stream.block[half], 0), at.head / PARTS, key);
  }
  stream.first = first_seen(at.context - 1) - at.start, stream.past = at.context - at.start;
  stream.there = at.unit < run.past;
  if (!stream.there) return;
  advance(stream.next, run, context_lens);
  look_up(stream, run, block_tables);
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

// The next stage into the slot that all lanes are done with; behind the last one nothing, but a group all the same: copy_wait counts them.
DEVICE void send_for(Stream &stream, u8 *ring, const Run &run, const uint4 *cache, const int *block_tables, const int *context_lens) {
  __syncwarp();
  if (stream.stage == 0) begin_tile(stream, run, block_tables, context_lens);
  if (stream.there) {
    const int half = stream.stage % 2, first = stream.first - half * STAGE_KEYS, past = stream.past - half * STAGE_KEYS;
    const uint4 *side = stream.stage >= 2 ? cache + SIDE : cache;
    const u32 row = half ? stream.row[1] : stream.row[0];
    u8 *slot = ring + stream.slot * STAGE_BYTES;
    if (first <= 0 && past >= STAGE_KEYS) send_stage<true>(slot, side, row, first, past);
    else send_stage<false>(slot, side, row, first, past);
  }
  copy_commit();
  stream.stage = (stream.stage + 1) % 4;
  stream.slot = stream.slot + 1 == RING ? 0 : stream.slot + 1;
}

// --- records

// Where the records of a stretch or of a sequence begin, and whether others write to them, too.
struct Share {
  int first, last; // units
  int owner;
  bool own;
};
DEVICE Share share_of(const Run &run, int first, int last) {
  const bool own = first >= run.first && last < run.past;
  return {first, last, own ? (int)blockIdx.x : owner_of(run, first), own};
}
// Each warp has room twice: for what is its own, and for what it shares with the warps behind it.
DEVICE int record_of(const Share &share) { return (share.owner * 2 + !share.own) * RECORDS; }

DEVICE float *sums_of(float *partial, int record) { return partial + (s64)record * (ROWS * D); }
DEVICE float2 *ends_of(float *partial, int record) {
  return (float2 *)(partial + (s64)gridDim.x * (2 * RECORDS * ROWS * D)) + (s64)record * ROWS;
}

// Is this warp the last of `expected` to come? Then all of what the others wrote can be read.
DEVICE bool is_last(u32 *counter, int expected) {
  u32 before = 0;
  __syncwarp();
  if (threadIdx.x == 0) {
    before = arrive(counter);
    if ((int)before == expected - 1) *counter = 0;
  }
  before = __shfl_sync(ALL_LANES, before, 0);
  __syncwarp();
  return (int)before == expected - 1;
}

// Where row r of a part of the heads begins in q and out; null if there is no such row.
template <typename Number> DEVICE Number *row_of(Number *rows, const Place &at, int r) {
  const int head = at.head % PARTS * ROWS + r;
  return r < ROWS && head < G ? rows + ((s64)at.b * H + at.head / PARTS * G + head) * D : nullptr;
}

DEVICE void finish_alone(const Rows &rows, const float (&sum)[2], float *out, const Place &at) {
  const int g = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float *row = row_of(out, at, g + 8 * r);
    if (row == nullptr) continue;
    const float inverse = 1.0f / sum[r];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
      *(float2 *)(row + n * 8 + column) = make_float2(rows.o[n][2 * r] * inverse, rows.o[n][2 * r + 1] * inverse);
  }
}

DEVICE void put_record(const Rows &rows, const float (&sum)[2], float *partial, int record) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (g + 8 * r >= ROWS) continue;
    float *row = sums_of(partial, record) + (g + 8 * r) * D + t * 2;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) *(float2 *)(row + n * 8) = make_float2(rows.o[n][2 * r], rows.o[n][2 * r + 1]);
    if (t == 0) ends_of(partial, record)[g + 8 * r] = make_float2(rows.top[r], sum[r]);
  }
}

DEVICE float4 merged(float4 o, float4 next, const Fades &fades) {
  return make_float4(fmaf(next.x, fades.b, o.x * fades.a), fmaf(next.y, fades.b, o.y * fades.a), fmaf(next.z, fades.b, o.z * fades.a),
                     fmaf(next.w, fades.b, o.w * fades.a));
}

// `count` records from `record` on become one, number `to`, or, where that is -1, this head's rows of `out`. Afterwards the records may be
// written to again.
DEVICE void merge(float *partial, int record, int count, int to, float *out, const Place &at) {
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
    } else if (float *row = row_of(out, at, r)) {
      const float inverse = 1.0f / sum;
      ((float4 *)row)[i % (D / 4)] = make_float4(o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse);
    }
  }
  __syncwarp();
}

// A unit is done: `at` is a tile of it.
DEVICE void end_unit(Rows &rows, float *out, float *partial, u32 *counters, const Run &run, const Place &at) {
  const int chunk = at.start / CHUNK, first = first_chunk(at.context), last = last_chunk(at.context), stretch = chunk / CHUNKS;
  float sum[2];
#pragma unroll
  for (int r = 0; r < 2; r++) sum[r] = whole_sum(rows.sum[r]);
  if (first == last) {
    finish_alone(rows, sum, out, at);
    return;
  }
  const int low = larger(first, stretch * CHUNKS), high = smaller(last, stretch * CHUNKS + CHUNKS - 1), zero = at.unit - chunk;
  const Share chunks = share_of(run, zero + low, zero + high);
  const int record = record_of(chunks);
  put_record(rows, sum, partial, record + chunk % CHUNKS);
  if (at.unit != smaller(chunks.last, run.past - 1)) return;
  if (chunks.own) __syncwarp();
  else if (!is_last(counters + 2 * chunks.owner, owner_of(run, chunks.last) - chunks.owner + 1)) return;
  const int first_stretch = first / CHUNKS, last_stretch = last / CHUNKS;
  const Share all = share_of(run, zero + first, zero + last);
  const int records = record_of(all) + CHUNKS;
  const bool only = first_stretch == last_stretch;
  int from = record + low % CHUNKS, past = from + high - low + 1, to = only ? -1 : records + stretch;
#pragma unroll 1
  for (;;) {
    merge(partial, from, past - from, to, out, at);
    if (to < 0) return;
    if (all.own ? stretch != last_stretch : !is_last(counters + 2 * all.owner + 1, last_stretch - first_stretch + 1)) return;
    from = records + first_stretch, past = records + last_stretch + 1, to = -1;
  }
}

// --- the run

// The stage that is sent for next takes the slot of the one that is read now.
DEVICE const u8 *stage_at(const u8 *ring, int slot) {
  copy_wait<RING - 1>();
  __syncwarp();
  return ring + slot * STAGE_BYTES;
}

DEVICE void load_head(Queries &queries, const float *q, const Place &at, void *shared) {
  const int g = threadIdx.x / 4;
  load_queries(queries, row_of(q, at, g), row_of(q, at, g + 8), shared, threadIdx.x, 32);
}

extern "C" __global__ void __launch_bounds__(32, 1)
    attention_decode(float *out, float *partial, u32 *counters, const float *q, const uint4 *cache, const int *block_tables,
                     const int *context_lens, const int *count) {
  DYNAMIC_SHARED(ring);
  Run run;
  Stream stream;
  if (!find_run(run, stream.next, context_lens, count)) return;
  Place at = stream.next;
  look_up(stream, run, block_tables);
  stream.stage = stream.slot = 0;
#pragma unroll 1
  for (int i = 0; i < RING; i++) send_for(stream, ring, run, cache, block_tables, context_lens);

  Queries queries;
  Rows rows;
  int b = -1, head = -1;
  while (at.unit < run.past) {
    if (at.b != b || at.head != head) load_head(queries, q, at, ring + RING * STAGE_BYTES);
    b = at.b, head = at.head;
    begin(rows);
    Place done;
    do {
      float s[TILE / 8][4];
      score<0, 32>(s, queries, stage_at(ring, stream.slot) + key_place());
      send_for(stream, ring, run, cache, block_tables, context_lens);
      score<32, 32>(s, queries, stage_at(ring, stream.slot) + key_place());
      send_for(stream, ring, run, cache, block_tables, context_lens);
      if (at.start < first_seen(at.context - 1) || at.start + TILE > at.context) hide(s, at.start, {at.context - 1, at.context - 1});
      soften(s, rows);
      weigh<0, 32>(rows, s, stage_at(ring, stream.slot) + value_place());
      send_for(stream, ring, run, cache, block_tables, context_lens);
      weigh<32, 32>(rows, s, stage_at(ring, stream.slot) + value_place());
      send_for(stream, ring, run, cache, block_tables, context_lens);
      done = at;
      advance(at, run, context_lens);
    } while (at.unit == done.unit);
    end_unit(rows, out, partial, counters, run, done);
  }
}
