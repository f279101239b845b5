// out[t] = softmax(q[t] k^T * SCALE) v over the keys that row t sees and the head's sink, for sequences with several rows: prompts
// and chunks of prompts.
//
//   out           [T, H, D] float32          only rows of the chunk sequences are written
//   q             [T, H, D] float32
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; this step's are in it. Packed: blocks of packed_read.h
//   block_tables  [B, M] int32               entries of blocks whose keys no row sees are not read
//   context_lens  [B] int32                  tokens in the cache, with this step's
//   query_starts  [B + 1] int32              sequence b's rows are query_starts[b] to query_starts[b + 1] - 1; its last is at position
//                                            context_lens[b] - 1
//   chunks        [2] int32                  first chunk sequence, number of chunk sequences
//   sinks         [H] float32, if SINKS      attention.h
//
// Constants in addition to attention.h's: SIMDS, SIMD groups of a threadgroup, 1 to 16. H / K is at most SIMDS * 8.
// Launch: threads 32 * SIMDS; grid (ceil(T / SPAN) + chunk sequences, K * HALVES) or more, with SPAN = SIMDS * 8 * K / H rounded down.
//
// A threadgroup takes (sequence, SPAN query positions, KV head), a SIMD group eight of its SPAN * H / K rows. The last positions of a
// sequence, which see most, come first. Tiles of KEYS keys and values go through threadgroup memory, 17 KiB, as they are in the cache, or as
// halves without their scales if it is packed, with rows padded so that the lanes of a fragment's load read different banks. Scores, weights and sums stay in registers as fragments of
// 8 x 8, and so does q, for D > 128 up to OWN_STEPS; the rest is read again for each tile. A SIMD group skips tiles that its rows do not
// see, and masks only at the edge of what they see. For D > 256 a threadgroup has one of two HALVES of the values' columns, and computes all
// scores: columns do not depend on each other.
//
// Which two numbers of a fragment a lane holds is in gpu.h (matrix_row, matrix_column); the lanes of a row are 1 and 8 apart.
//
// Order of the arithmetic: float32 by simdgroup_multiply_accumulate, of scores over d in steps of 8 ascending, of values over keys in steps
// of 8 ascending; a lane adds its weights, keys ascending, and a row's four lanes are added after the last tile, 1, then 8 apart. Tiles
// begin at multiples of KEYS, counted from the sequence's first token; a tile that a row does not see leaves the row's sums unchanged: its
// bits depend neither on how a prompt is divided into chunks nor on the other rows. They differ from attention_decode's.
// Scales of a packed cache multiply a key's scores, after their sum, and its value's weights, which are summed without it.
#include "attention.h"
constant constexpr int HALVES = D <= 256 ? 1 : 2;  // of the values' columns: a SIMD group has registers for 256
#if PACKED_CACHE
#include "packed_tile.h"
#else
#include "float_tile.h"
#endif

constant constexpr int ROW_BYTES = D * (int)sizeof(tile_number);
constant constexpr int KEYS = ROW_BYTES <= 256 ? 32 : ROW_BYTES <= 512 ? 16 : 8;  // of a tile
constant constexpr int PITCH_BYTES = ROW_BYTES + 16;                              // from row to row in threadgroup memory
constant constexpr int PITCH = PITCH_BYTES / (int)sizeof(tile_number);
constant constexpr int SIDE = KEYS * (PITCH_BYTES / 16);  // pieces from a tile's keys to its values
constant constexpr int VALUE_PITCH = PITCH - D + D / HALVES;
constant constexpr int TILE = SIDE + KEYS * VALUE_PITCH * (int)sizeof(tile_number) / 16;  // pieces
constant constexpr int STEPS = D / 8;                                                     // fragments of a row
constant constexpr int COLUMNS = D / HALVES;                                              // of the values, that a threadgroup has
constant constexpr int VALUE_STEPS = COLUMNS / 8;
constant constexpr int OWN_STEPS = D <= 128 ? STEPS : 8;  // of q, in registers
constant constexpr int SPAN = SIMDS * 8 / G;
constant constexpr int THREADS = 32 * SIMDS;

static_assert(SIMDS >= 1 && SIMDS <= 16, "attention_prefill: SIMDS must be 1 to 16");
static_assert(SPAN >= 1, "attention_prefill: more query heads to a KV head than rows in a threadgroup");

// The work of this threadgroup: `count` query positions from `position` on, of which the first is row `row` of the batch.
struct Work {
  device const int *table;
  int head, row, position, count;
};

// A lane's position in a fragment; its row of q, where that begins in q and out, and its position in the sequence; the SIMD group's first
// and last position.
struct Lane {
  int row, column;
  bool exists;  // whether there is such a row of q
  int head;     // its query head
  ulong offset;
  int position, low, high;  // high is -1 where the SIMD group has no rows
};

// The state of a SIMD group. `max_score` and `sum` are of the lane's row, of the sum this lane's part.
struct Sums {
  float2 o[VALUE_STEPS];
  float max_score, sum;
};

INLINE bool find_work(thread Work &work, uint3 group, device const int *block_tables, device const int *context_lens,
                      device const int *query_starts, device const int *chunks);
INLINE Lane lane_of(thread const Work &work, uint number, int simd);
INLINE float2 query_at(device const float *q, thread const Lane &lane, int step);
INLINE void compute_scores(thread float2 (&s)[KEYS / 8], thread const float2 (&queries)[OWN_STEPS], device const float *q,
                           threadgroup const tile_number *keys, thread const Lane &lane);
INLINE void update_softmax(thread float2 (&s)[KEYS / 8], thread Sums &sums, TileScales scales, thread const Lane &lane, int start,
                           bool masked);
INLINE void add_values(thread Sums &sums, thread const float2 (&weights)[KEYS / 8], threadgroup const tile_number *values,
                       thread const Lane &lane);
INLINE void write_rows(device float *out, thread const Sums &sums, thread const Lane &lane, device const float *head_sinks);

[[max_total_threads_per_threadgroup(32 * SIMDS)]] kernel void attention_prefill(
    device float *out [[buffer(0)]], device const float *q [[buffer(1)]], device const uint4 *cache [[buffer(2)]],
    device const int *block_tables [[buffer(3)]], device const int *context_lens [[buffer(4)]],
    device const int *query_starts [[buffer(5)]], device const int *chunks [[buffer(6)]],
    SINKS_ARGUMENT(7) uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane_index [[thread_index_in_simdgroup]], uint simd_index [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint4 tile[TILE];
  TileScales scales;
#if PACKED_CACHE
  threadgroup uint scales_of_keys[KEYS];
  scales.of = scales_of_keys;
#endif
  const int half_index = (int)group.y % HALVES;
  Work work;
  if (!find_work(work, group, block_tables, context_lens, query_starts, chunks)) return;
  const Lane lane = lane_of(work, lane_index, (int)simd_index);
  const int first = first_visible(work.position), end = work.position + work.count;

  float2 queries[OWN_STEPS];
#pragma unroll
  for (int step = 0; step < OWN_STEPS; step++) queries[step] = query_at(q, lane, step);
  Sums sums;
  sums.max_score = NO_SCORE, sums.sum = 0.0f;
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; step++) sums.o[step] = float2(0.0f);

  for (int start = first / KEYS * KEYS; start < end; start += KEYS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile has been read by all
    load_tile<KEYS, PITCH, THREADS>((threadgroup tile_number *)tile, (threadgroup tile_number *)(tile + SIDE), scales, cache, work.table,
                                    work.head, half_index, start, first, end, (int)thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (start + KEYS <= first_visible(lane.low) || start > lane.high) continue;
    float2 weights[KEYS / 8];  // scores at first
    compute_scores(weights, queries, q, (threadgroup const tile_number *)tile, lane);
    update_softmax(weights, sums, scales, lane, start, start < first_visible(lane.high) || start + KEYS > lane.low + 1);
    add_values(sums, weights, (threadgroup const tile_number *)(tile + SIDE), lane);
  }
  write_rows(out + half_index * COLUMNS, sums, lane, SINKS_POINTER);
}

// --- the work of threadgroups and lanes

INLINE int spans_of(device const int *query_starts, int b) { return (query_starts[b + 1] - query_starts[b] + SPAN - 1) / SPAN; }

INLINE bool find_work(thread Work &work, uint3 group, device const int *block_tables, device const int *context_lens,
                      device const int *query_starts, device const int *chunks) {
  int b = chunks[0], span = (int)group.x;  // spans of sequences from b on that come before this one
  const int end = b + chunks[1];
  while (b < end && span >= spans_of(query_starts, b)) span -= spans_of(query_starts, b), b++;
  if (b >= end) return false;
  const int queries = query_starts[b + 1] - query_starts[b], skipped = (spans_of(query_starts, b) - 1 - span) * SPAN;
  work.table = block_tables + (ulong)b * M;
  work.head = (int)group.y / HALVES;
  work.row = query_starts[b] + skipped;
  work.position = context_lens[b] - queries + skipped;
  work.count = min(SPAN, queries - skipped);
  return true;
}

INLINE Lane lane_of(thread const Work &work, uint number, int simd) {
  Lane lane;
  lane.row = (int)matrix_row(number), lane.column = (int)matrix_column(number);
  const int from = simd * 8, row = from + lane.row, rows = work.count * G;
  lane.exists = row < rows;
  lane.head = work.head * G + row % G;
  lane.offset = ((ulong)(work.row + row / G) * H + lane.head) * D;
  lane.position = work.position + row / G;
  lane.low = work.position + from / G;
  lane.high = from < rows ? work.position + (min(from + 8, rows) - 1) / G : -1;
  return lane;
}

// --- loads

// Columns step * 8 on of the lane's row of q; zeros for a row that does not exist.
INLINE float2 query_at(device const float *q, thread const Lane &lane, int step) {
  return lane.exists ? *(device const float2 *)(q + lane.offset + step * 8 + lane.column) * SCALE_2 : float2(0.0f);
}

// Two numbers of a tile, `apart` from each other.
INLINE float2 pair_at(threadgroup const tile_number *at, int apart) { return float2(to_float(at[0]), to_float(at[apart])); }

// --- scores, softmax, values. Fragments are kept as the lane's two numbers, and are matrices only where they are multiplied

INLINE simdgroup_float8x8 matrix_of(float2 pair) {
  simdgroup_float8x8 matrix;
  matrix.thread_elements()[0] = pair.x;
  matrix.thread_elements()[1] = pair.y;
  return matrix;
}
INLINE float2 multiply_add(float2 a, float2 b, float2 c) {  // a b + c
  simdgroup_float8x8 sum = matrix_of(c);
  simdgroup_multiply_accumulate(sum, matrix_of(a), matrix_of(b), sum);
  return float2(sum.thread_elements()[0], sum.thread_elements()[1]);
}

// Rows times keys; in a key's fragment d goes downwards.
INLINE void compute_scores(thread float2 (&s)[KEYS / 8], thread const float2 (&queries)[OWN_STEPS], device const float *q,
                           threadgroup const tile_number *keys, thread const Lane &lane) {
  threadgroup const tile_number *from = keys + lane.column * PITCH + lane.row;
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) s[n] = float2(0.0f);
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const float2 rows = step < OWN_STEPS ? queries[step % OWN_STEPS] : query_at(q, lane, step);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) s[n] = multiply_add(rows, pair_at(from + n * 8 * PITCH + step * 8, PITCH), s[n]);
  }
}

INLINE bool is_hidden(int key, thread const Lane &lane) { return key > lane.position || key < first_visible(lane.position); }

// Turns scores into weights under the rows' new maxima, times the scales of their values, hidden ones into 0, and rescales the sums.
// `masked`: whether some are hidden.
INLINE void update_softmax(thread float2 (&s)[KEYS / 8], thread Sums &sums, TileScales scales, thread const Lane &lane, int start,
                           bool masked) {
  float tile_max = NO_SCORE;
  bool hidden[KEYS / 8][2];
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      hidden[n][i] = masked && is_hidden(start + n * 8 + lane.column + i, lane);
      s[n][i] = capped(s[n][i] * key_scale(scales, n * 8 + lane.column + i));
      tile_max = max(tile_max, hidden[n][i] ? NO_SCORE : s[n][i]);
    }
  tile_max = max(tile_max, simd_shuffle_xor(tile_max, (ushort)1));
  tile_max = max(tile_max, simd_shuffle_xor(tile_max, (ushort)8));
  const float max_score = max(sums.max_score, tile_max), rescale = rescale_of(sums.max_score, max_score);
  const bool rises = simd_any(max_score != sums.max_score);
  sums.max_score = max_score;
  sums.sum *= rescale;
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float weight = hidden[n][i] ? 0.0f : fast_exp2(s[n][i] - max_score);
      sums.sum += weight;
      s[n][i] = hidden[n][i] ? 0.0f : weight * value_scale(scales, n * 8 + lane.column + i);
    }
  if (!rises) return;
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; step++) sums.o[step] *= rescale;
}

INLINE void add_values(thread Sums &sums, thread const float2 (&weights)[KEYS / 8], threadgroup const tile_number *values,
                       thread const Lane &lane) {
  threadgroup const tile_number *from = values + lane.row * VALUE_PITCH + lane.column;
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; step++)
      sums.o[step] = multiply_add(weights[n], pair_at(from + n * 8 * VALUE_PITCH + step * 8, 1), sums.o[step]);
}

INLINE void write_rows(device float *out, thread const Sums &sums, thread const Lane &lane, device const float *head_sinks) {
  float sum = sums.sum + simd_shuffle_xor(sums.sum, (ushort)1);
  sum += simd_shuffle_xor(sum, (ushort)8);
  if (!lane.exists) return;
  const float inverse = 1.0f / with_sink(sum, sums.max_score, head_sinks, lane.head);
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; step++) *(device float2 *)(out + lane.offset + step * 8 + lane.column) = sums.o[step] * inverse;
}
