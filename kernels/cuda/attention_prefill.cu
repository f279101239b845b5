// out[t] = softmax(q[t] k^T * SCALE) v over the keys that row t sees and the head's sink, for the rows of sequences with several rows
// (prefill chunks).
//
//   out           [T, H, D] float32          only rows of the chunk sequences are written; meanwhile they hold the merged sections
//   q             [T, H, D] float32
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; includes this step's
//   block_tables  [B, M] int32
//   context_lens  [B] int32                  tokens in the cache, including this step's
//   query_starts  [B + 1] int32              sequence b has rows query_starts[b] to query_starts[b + 1] - 1; its last row has position
//                                            context_lens[b] - 1
//   sinks         [H] float32, if SINKS      attention.cuh
//   chunks        [2] int32                  first chunk sequence, number of chunk sequences
//
// Constants: those of attention.cuh, and STAGES: 2, or 1 where shared memory does not suffice for 2. H / K is at most WARPS * 16.
// Launch: WARPS = D <= 128 ? 8 : D <= 256 ? 4 : 2; block WARPS * 32; grid (ceil(T / SPAN) + chunk sequences, K * HALVES) or more, with
// SPAN = WARPS * 16 * K / H rounded down; shared memory STAGES * (D <= 128 ? 128 : 64) * (2 * (D + VALUES) + 32) and, for D > 128,
// WARPS * (64 * VALUES + 32 * D - 512 * REGISTER_STEPS) bytes. D = 128: 136 KiB; D = 256: 220 KiB, with one stage 154; D = 512: 158, with one stage.
//
// Unit of work: a thread block takes (sequence, SPAN query positions, KV head); a warp takes sixteen of its SPAN * H / K rows. The last
// positions of a sequence see most keys and come first; heads come one after another, so that the keys of one or two heads fill the L2
// cache. While the warps work on one stage of keys and values, the next is being copied. There is one barrier per stage of several tiles,
// so that the softmax of one warp overlaps with the products of another. A warp skips tiles that its rows do not see, and masks only at the
// edge of the visible keys. The sums of a section are kept in registers (D > 128: in shared memory), those of the sections in `out`. Scores
// and sums are float32; the order of arithmetic is attention.cuh's.
#include "attention.cuh"

constexpr int WARPS = D <= 128 ? 8 : D <= 256 ? 4 : 2;
constexpr int THREADS = WARPS * 32;
constexpr int SPAN = WARPS * 16 / G;
constexpr int STAGE_KEYS = D <= 128 ? 128 : 64;
#if PACKED
constexpr int TILE_BYTES = TILE / 32 * PACKED_STAGE;  // of the keys, and of the values, of a tile
#else
constexpr int TILE_BYTES = TILE * PITCH;
#endif
constexpr int SAVED_BYTES = HALVES == 2 ? STAGE_KEYS * (PITCH - VALUES_PITCH) : 0;  // by half the values
constexpr int SIDE_BYTES = STAGE_KEYS / TILE * TILE_BYTES;                          // of those of a stage
constexpr int STAGE_BYTES = 2 * SIDE_BYTES - SAVED_BYTES;
constexpr int SECTION_BYTES = D <= 128 ? 0 : 16 * WARPS * VALUES * 4;
constexpr int COLUMN_UNROLL = D <= 128 ? COLUMNS : 2;  // full where the sums must be registers; otherwise 2, which needs fewer registers
constexpr int COPY_UNROLL = D <= 128 ? 4 : 2;

static_assert(SPAN >= 1, "attention_prefill: H / K must be at most the rows of a thread block");

// The merged partitions of a section so far: `o` as in RowState.
struct SectionState {
#if D <= 128
  float registers[COLUMNS][4];
  __device__ __forceinline__ float &o(int n, int i) { return registers[n][i]; }
#else
  float *shared;
  __device__ __forceinline__ float &o(int n, int i) { return shared[(n * 4 + i) * THREADS]; }
#endif
  float max[2], sum[2];
};

// The work of this thread block: `count` query positions from `position` on; the first of them is row `row` of the batch.
struct Work {
  const int *table;
  int head, row, position, count, context;
};

// Positions of a lane's two rows, and of the first and last row of its warp.
struct WarpRows {
  int position[2];
  int low, high;  // high is -1 where the warp has no rows
};

DEVICE bool find_work(Work &work, const int *block_tables, const int *context_lens, const int *query_starts, const int *chunks);
DEVICE WarpRows rows_of_warp(const Work &work);
template <typename Number> DEVICE Number *row_pointer(Number *rows, const Work &work, int r);
DEVICE void copy_stage(u8 *stage, const Work &work, const uint4 *cache, int start, int first, int end);
DEVICE void attend_tile(RowState &state, const Queries &queries, const u8 *keys, const u8 *values, int start, const WarpRows &rows);
DEVICE void reset_section(SectionState &section);
DEVICE void merge_partition(SectionState &section, RowState &state);
DEVICE void merge_section(SectionState &section, float (&max)[2], float (&sum)[2], bool any, const Work &work, float *out,
                          const float *head_sinks, bool last);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill(float *out, const float *q, const uint4 *cache, const int *block_tables, const int *context_lens,
                      const int *query_starts, SINKS_ARGUMENT const int *chunks) {
  DYNAMIC_SHARED(shared);
  Work work;
  if (!find_work(work, block_tables, context_lens, query_starts, chunks)) return;
  if (HALVES == 2) out += blockIdx.y % HALVES * VALUES;
  const int first = first_visible(work.position), end = work.position + work.count, first_tile = first & -TILE;
  copy_stage(shared, work, cache, first_tile, first, end);
  const WarpRows rows = rows_of_warp(work);
  Queries queries;
  u8 *after_stages = shared + STAGES * STAGE_BYTES;
  load_queries(queries, row_pointer(q, work, 0), row_pointer(q, work, 1), after_stages + SECTION_BYTES, threadIdx.x, THREADS);

  RowState state;
  SectionState section;
#if D > 128
  section.shared = (float *)after_stages + threadIdx.x;
#endif
  reset(state);
  reset_section(section);
  float max[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0.0f, 0.0f};  // of the sections in `out`
  bool any_section = false;

  int stage = 0;
  for (int base = first_tile; base < end; base += STAGE_KEYS) {
    const bool more = base + STAGE_KEYS < end;
    copy_wait<0>();
    __syncthreads();
    if (STAGES > 1 && more) copy_stage(shared + (stage ^ 1) * STAGE_BYTES, work, cache, base + STAGE_KEYS, first, end);
    const u8 *current = shared + stage * STAGE_BYTES;
#pragma unroll 1
    for (int start = base; start < base + STAGE_KEYS; start += TILE) {
      if (start + TILE <= first_visible(rows.low) || start > rows.high) continue;
      const u8 *tile = current + (start - base) / TILE * TILE_BYTES;
      attend_tile(state, queries, tile + key_lane_offset(), tile + SIDE_BYTES + value_lane_offset(), start, rows);
      const bool last = start + TILE > rows.high;
      if ((start + TILE) % PARTITION == 0 || last) merge_partition(section, state);
      if ((start + TILE) % SECTION == 0 || last) {
        merge_section(section, max, sum, any_section, work, out, SINKS_POINTER, last);
        reset_section(section);
        any_section = true;
      }
    }
    if (STAGES == 1) {
      __syncthreads();
      if (more) copy_stage(shared, work, cache, base + STAGE_KEYS, first, end);
    } else {
      stage ^= 1;
    }
  }
}

// --- which rows

// Sequences first to end - 1 have units(b) consecutive units each. Finds the sequence b of `unit`, and how many units come before b's. Done
// by the whole warp for one unit; false if there is no such unit.
template <typename Units> DEVICE bool find_sequence(int unit, int first, int end, Units units, int &b, int &before) {
  const int lane = threadIdx.x % 32;
  before = 0;
  for (int base = first; base < end; base += 32) {
    const int owner = find_lane(unit, base + lane < end ? units(base + lane) : 0, before);
    b = base + owner;
    if (owner >= 0) return true;
  }
  return false;
}

// False if the grid has more thread blocks than there is work.
DEVICE bool find_work(Work &work, const int *block_tables, const int *context_lens, const int *query_starts, const int *chunks) {
  int b, before;
  const int first = chunks[0], end = first + chunks[1];
  const auto spans = [=](int i) { return (query_starts[i + 1] - query_starts[i] + SPAN - 1) / SPAN; };
  if (!find_sequence(blockIdx.x, first, end, spans, b, before)) return false;
  const int queries = query_starts[b + 1] - query_starts[b];
  const int skipped = (spans(b) - 1 - ((int)blockIdx.x - before)) * SPAN;
  work.table = block_tables + (s64)b * M;
  work.head = blockIdx.y / HALVES;
  work.row = query_starts[b] + skipped;
  work.context = context_lens[b];
  work.position = work.context - queries + skipped;
  work.count = min(SPAN, queries - skipped);
  return true;
}

DEVICE int row_of_lane(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

// The lane's row r in q or out; null if there is no such row.
template <typename Number> DEVICE Number *row_pointer(Number *rows, const Work &work, int r) {
  const int row = row_of_lane(r);
  return row < work.count * G ? rows + ((s64)(work.row + row / G) * H + work.head * G + row % G) * D : nullptr;
}

DEVICE WarpRows rows_of_warp(const Work &work) {
  const int first = threadIdx.x / 32 * 16, rows = work.count * G;
  const int high = first < rows ? work.position + (min(first + 16, rows) - 1) / G : -1;
  return {{work.position + row_of_lane(0) / G, work.position + row_of_lane(1) / G}, work.position + first / G, high};
}

// --- keys and values

#if PACKED
// Copies keys and values from `start` on to a stage; zeros for pieces without a key from first to end - 1, whose blocks are not looked up.
DEVICE void copy_stage(u8 *stage, const Work &work, const uint4 *cache, int start, int first, int end) {
  constexpr int QUANTS = 2 * ROW_BYTES, PIECES_OF_32 = QUANTS + 4;
  for (int i = threadIdx.x; i < STAGE_KEYS / 32 * PIECES_OF_32; i += THREADS) {
    const int part = i / PIECES_OF_32, piece = i % PIECES_OF_32, width = piece < QUANTS ? 4 : 8;
    const int key = start + part * 32 + (piece < QUANTS ? piece % 8 * 4 : (piece - QUANTS) * 8);
    const bool valid = key + width > first && key < end;
    const u32 block = valid ? (u32)work.table[key / S] : 0;
#pragma unroll
    for (int side = 0; side < 2; side++) {
      u8 *to = stage + side * SIDE_BYTES + part * PACKED_STAGE;
      if (piece < QUANTS) copy_quants(to, cache, side, work.head, piece, block, key % S, valid);
      else copy_scales(to, cache, side, work.head, piece - QUANTS, block, key % S, valid);
    }
  }
  copy_commit();
}
#else
// The thread block's half of the values of a stage.
DEVICE void copy_half_values(u8 *values, const Work &work, const uint4 *cache, int start, int first, int end) {
  constexpr int OWN = PIECES / 2;
#pragma unroll 1
  for (int piece = threadIdx.x; piece < STAGE_KEYS * OWN; piece += THREADS) {
    const int row = piece / OWN, column = piece % OWN, key = start + row;
    const bool valid = key >= first && key < end;
    const uint4 *from = cache + blockIdx.y % HALVES * OWN + column + VALUES_OFFSET;
    copy_16_or_zero(values + row * VALUES_PITCH + column * 16, valid ? from + key_offset(work.table[key / S], work.head, key) : cache,
                    valid);
  }
}

// Copies keys and values from `start` on to a stage; zeros for keys outside of first to end - 1, whose blocks are not looked up.
DEVICE void copy_stage(u8 *stage, const Work &work, const uint4 *cache, int start, int first, int end) {
#pragma unroll COPY_UNROLL
  for (int i = 0; i < STAGE_KEYS * PIECES / THREADS; i++) {
    const int piece = i * THREADS + threadIdx.x, row = piece / PIECES, column = piece % PIECES, key = start + row;
    const bool valid = key >= first && key < end;
    const uint4 *from = valid ? cache + key_offset(work.table[key / S], work.head, key) + column : cache;
    u8 *to = stage + row * PITCH + column * 16;
    copy_16_or_zero(to, from, valid);
    if (HALVES == 1) copy_16_or_zero(to + SIDE_BYTES, valid ? from + VALUES_OFFSET : cache, valid);
  }
  if (HALVES == 2) copy_half_values(stage + SIDE_BYTES, work, cache, start, first, end);
  copy_commit();
}
#endif

DEVICE void attend_tile(RowState &state, const Queries &queries, const u8 *keys, const u8 *values, int start, const WarpRows &rows) {
  float s[TILE / 8][4];
#if PACKED
  score<0, 32>(s, queries, keys);
  score<32, 32>(s, queries, keys + PACKED_STAGE);
#else
  score<0, TILE>(s, queries, keys);
#endif
  cap_scores(s);
  if (start < first_visible(rows.high) || start + TILE > rows.low + 1) mask(s, start, rows.position);
  softmax(s, state);
#if PACKED
  add_values<0, 32>(state, s, values);
  add_values<32, 32>(state, s, values + PACKED_STAGE);
#else
  add_values<0, TILE>(state, s, values);
#endif
}

// --- merging

DEVICE void reset_section(SectionState &section) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) section.o(n, i) = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; r++) section.max[r] = MINUS_INFINITY, section.sum[r] = 0.0f;
}

// The end of a partition: merges it into its section, and starts the next.
DEVICE void merge_partition(SectionState &section, RowState &state) {
  float old[2], next[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const MergeScales scales = merge_scales_of(section.max[r], state.max[r]);
    old[r] = scales.old, next[r] = scales.next;
    section.max[r] = scales.max;
    section.sum[r] = fmaf(row_sum(state.sum[r]), scales.next, section.sum[r] * scales.old);
  }
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) section.o(n, i) = fmaf(state.o[n][i], next[i / 2], section.o(n, i) * old[i / 2]);
  reset(state);
}

// The end of a section: merges it into the earlier ones, which are in `out` with these maxima and sums. `any`: there are earlier ones.
// `last`: divides by the sum, with the sink's weight, which makes `out` final.
DEVICE void merge_section(SectionState &section, float (&max)[2], float (&sum)[2], bool any, const Work &work, float *out,
                          const float *head_sinks, bool last) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float *row = row_pointer(out, work, r);
    if (row == nullptr) continue;
    const MergeScales scales = merge_scales_of(max[r], section.max[r]);
    max[r] = scales.max;
    sum[r] = fmaf(section.sum[r], scales.next, sum[r] * scales.old);
    const float inverse = last ? 1.0f / with_sink(sum[r], max[r], head_sinks, work.head * G + row_of_lane(r) % G) : 1.0f;
#pragma unroll COLUMN_UNROLL
    for (int n = 0; n < COLUMNS; n++) {
      float2 *at = (float2 *)(row + n * 8 + column);
      const float2 old = any ? *at : make_float2(0.0f, 0.0f);
      const float x = fmaf(section.o(n, 2 * r), scales.next, old.x * scales.old);
      const float y = fmaf(section.o(n, 2 * r + 1), scales.next, old.y * scales.old);
      *at = make_float2(x * inverse, y * inverse);
    }
  }
}
