// out[t] = softmax(q[t] k^T * SCALE) v over the keys that row t sees, for the rows of sequences with several: prompts, pieces of prompts.
//
//   out           [T, H, D] float32          only rows of the chunk sequences are written; on the way they hold merged stretches
//   q             [T, H, D] float32
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; this step's are in it
//   block_tables  [B, M] int32
//   context_lens  [B] int32                  tokens in the cache, with this step's
//   query_starts  [B + 1] int32              sequence b's rows are query_starts[b] to query_starts[b + 1] - 1; its last stands at
//                                            position context_lens[b] - 1
//   chunks        [2] int32                  first chunk sequence, number of chunk sequences
//
// Beside attention.cuh's constants: STAGES, 2, or 1 where shared memory does not suffice for 2. H / K is at most WARPS * 16.
// Launch: WARPS = D <= 128 ? 8 : 4; block WARPS * 32; grid (ceil(T / SPAN) + chunk sequences, K) or more, with SPAN = WARPS * 16 * K / H in
// whole numbers; shared memory STAGES * 2 * (D <= 128 ? 128 : 64) * (2 * D + 16) + (D <= 128 ? 0 : 384 * D - 8192)
// bytes. D = 128: 136 KiB; D = 256: 220 KiB, with one stage 154.
//
// A block of threads takes (sequence, SPAN query positions, KV head), a warp sixteen of its SPAN * H / K rows. The last positions of a
// sequence, which see most, come first; head by head, so that the keys of one or two heads fill the second-level cache. While the warps
// work on a stage of keys and values, the next one is on its way. There is one barrier a stage of several tiles, so that one warp's softmax
// has the time of another's products. A warp passes over tiles that its rows do not see, and masks only at the edge of what they see. What
// the chunks of a stretch come to is kept in registers (D > 128: in shared memory), what the stretches come to in `out`.
// Scores and sums in float32; the order of the arithmetic is attention.cuh's.
#include "attention.cuh"

constexpr int WARPS = D <= 128 ? 8 : 4;
constexpr int THREADS = WARPS * 32;
constexpr int SPAN = WARPS * 16 / G;
constexpr int STAGE_KEYS = D <= 128 ? 128 : 64;
constexpr int SIDE_BYTES = STAGE_KEYS * PITCH;
constexpr int STAGE_BYTES = 2 * SIDE_BYTES;
constexpr int TOTAL_BYTES = D <= 128 ? 0 : 16 * WARPS * D * 4;
constexpr int COLUMNS_AT_ONCE = D <= 128 ? COLUMNS : 2; // all where they must be registers; else few, which need fewer registers
constexpr int COPIES_AT_ONCE = D <= 128 ? 4 : 2;

static_assert(SPAN >= 1, "attention_prefill: more query heads to a KV head than rows in a block of threads");

// What the chunks of a stretch come to so far: `o` as in Rows.
struct Total {
#if D <= 128
  float own[COLUMNS][4];
  __device__ __forceinline__ float &o(int n, int i) { return own[n][i]; }
#else
  float *shared;
  __device__ __forceinline__ float &o(int n, int i) { return shared[(n * 4 + i) * THREADS]; }
#endif
  float top[2], sum[2];
};

// What this block of threads has to do: `count` query positions from `position` on, of which the first is row `row` of the batch.
struct Work {
  const int *table;
  int head, row, position, count, context;
};

// Positions of a lane's two rows, and of the first and the last row of its warp.
struct Lane {
  int position[2];
  int low, high; // high is -1 where the warp has no rows
};

DEVICE bool find_work(Work &work, const int *block_tables, const int *context_lens, const int *query_starts, const int *chunks) {
  int b, before;
  const int first = chunks[0], past = first + chunks[1];
  const auto spans = [=](int i) { return (query_starts[i + 1] - query_starts[i] + SPAN - 1) / SPAN; };
  if (!find(blockIdx.x, first, past, spans, b, before)) return false;
  const int queries = query_starts[b + 1] - query_starts[b];
  const int skipped = (spans(b) - 1 - ((int)blockIdx.x - before)) * SPAN;
  work.table = block_tables + (s64)b * M;
  work.head = blockIdx.y;
  work.row = query_starts[b] + skipped;
  work.context = context_lens[b];
  work.position = work.context - queries + skipped;
  work.count = smaller(SPAN, queries - skipped);
  return true;
}

DEVICE int row_of_lane(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

// Where a lane's row begins in q and out; null if there is no such row.
template <typename Number> DEVICE Number *place_of(Number *rows, const Work &work, int r) {
  const int row = row_of_lane(r);
  return row < work.count * G ? rows + ((s64)(work.row + row / G) * H + work.head * G + row % G) * D : nullptr;
}

DEVICE Lane lane_of(const Work &work) {
  const int from = threadIdx.x / 32 * 16, rows = work.count * G;
  const int high = from < rows ? work.position + (smaller(from + 16, rows) - 1) / G : -1;
  return {{work.position + row_of_lane(0) / G, work.position + row_of_lane(1) / G}, work.position + from / G, high};
}

// Keys and values from `start` on to a stage; zeros for those outside of first to past - 1, whose blocks are not looked up.
DEVICE void send_for(u8 *stage, const Work &work, const uint4 *cache, int start, int first, int past) {
#pragma unroll COPIES_AT_ONCE
  for (int i = 0; i < STAGE_KEYS * PIECES / THREADS; i++) {
    const int piece = i * THREADS + threadIdx.x, row = piece / PIECES, column = piece % PIECES, key = start + row;
    const bool there = key >= first && key < past;
    const uint4 *from = there ? cache + row_at(work.table[key / S], work.head, key) + column : cache;
    u8 *to = stage + row * PITCH + column * 16;
    copy_16_or_zero(to, from, there);
    copy_16_or_zero(to + SIDE_BYTES, there ? from + SIDE : cache, there);
  }
  copy_commit();
}

DEVICE void begin_total(Total &total) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) total.o(n, i) = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; r++) total.top[r] = NEVER, total.sum[r] = 0.0f;
}

DEVICE void end_chunk(Total &total, Rows &rows) {
  float a[2], b[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const Fades fades = fades_of(total.top[r], rows.top[r]);
    a[r] = fades.a, b[r] = fades.b;
    total.top[r] = fades.top;
    total.sum[r] = fmaf(whole_sum(rows.sum[r]), fades.b, total.sum[r] * fades.a);
  }
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) total.o(n, i) = fmaf(rows.o[n][i], b[i / 2], total.o(n, i) * a[i / 2]);
  begin(rows);
}

// The stretches before, in `out` with these tops and sums, and the present one. `any`: there is one before.
DEVICE void end_stretch(Total &total, float (&top)[2], float (&sum)[2], bool any, const Work &work, float *out, bool last) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float *row = place_of(out, work, r);
    if (row == nullptr) continue;
    const Fades fades = fades_of(top[r], total.top[r]);
    top[r] = fades.top;
    sum[r] = fmaf(total.sum[r], fades.b, sum[r] * fades.a);
    const float inverse = last ? 1.0f / sum[r] : 1.0f;
#pragma unroll COLUMNS_AT_ONCE
    for (int n = 0; n < COLUMNS; n++) {
      float2 *at = (float2 *)(row + n * 8 + column);
      const float2 old = any ? *at : make_float2(0.0f, 0.0f);
      const float x = fmaf(total.o(n, 2 * r), fades.b, old.x * fades.a), y = fmaf(total.o(n, 2 * r + 1), fades.b, old.y * fades.a);
      *at = make_float2(x * inverse, y * inverse);
    }
  }
}

DEVICE void attend_tile(Rows &rows, const Queries &queries, const u8 *keys, const u8 *values, int start, const Lane &lane) {
  float s[TILE / 8][4];
  score<0, TILE>(s, queries, keys);
  if (start < first_seen(lane.high) || start + TILE > lane.low + 1) hide(s, start, lane.position);
  soften(s, rows);
  weigh<0, TILE>(rows, s, values);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill(float *out, const float *q, const uint4 *cache, const int *block_tables, const int *context_lens,
                      const int *query_starts, const int *chunks) {
  DYNAMIC_SHARED(shared);
  Work work;
  if (!find_work(work, block_tables, context_lens, query_starts, chunks)) return;
  const int first = first_seen(work.position), past = work.position + work.count, begins = first & -TILE;
  send_for(shared, work, cache, begins, first, past);
  const Lane lane = lane_of(work);
  Queries queries;
  u8 *behind = shared + STAGES * STAGE_BYTES;
  load_queries(queries, place_of(q, work, 0), place_of(q, work, 1), behind + TOTAL_BYTES, threadIdx.x, THREADS);

  Rows rows;
  Total total;
#if D > 128
  total.shared = (float *)behind + threadIdx.x;
#endif
  begin(rows);
  begin_total(total);
  float top[2] = {NEVER, NEVER}, sum[2] = {0.0f, 0.0f};
  bool any = false;

  int stage = 0;
  for (int base = begins; base < past; base += STAGE_KEYS) {
    const bool more = base + STAGE_KEYS < past;
    copy_wait<0>();
    __syncthreads();
    if (STAGES > 1 && more) send_for(shared + (stage ^ 1) * STAGE_BYTES, work, cache, base + STAGE_KEYS, first, past);
    const u8 *here = shared + stage * STAGE_BYTES;
#pragma unroll 1
    for (int start = base; start < base + STAGE_KEYS; start += TILE) {
      if (start + TILE <= first_seen(lane.low) || start > lane.high) continue;
      const u8 *tile = here + (start - base) * PITCH;
      attend_tile(rows, queries, tile + key_place(), tile + SIDE_BYTES + value_place(), start, lane);
      const bool last = start + TILE > lane.high;
      if ((start + TILE) % CHUNK == 0 || last) end_chunk(total, rows);
      if ((start + TILE) % STRETCH == 0 || last) {
        end_stretch(total, top, sum, any, work, out, last);
        begin_total(total);
        any = true;
      }
    }
    if (STAGES == 1) {
      __syncthreads();
      if (more) send_for(shared, work, cache, base + STAGE_KEYS, first, past);
    } else {
      stage ^= 1;
    }
  }
}
