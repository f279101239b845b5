// out[b] = softmax(q[b] k^T * SCALE) v over the keys of sequence b that its newest token sees: one row a sequence.
//
//   out           [T, H, D] float32          rows from `count` on are not touched
//   partial       [B, K * PARTS, 32 + PARTITIONS * ROWS * (D + 2)] uint32: zero between launches. For sequences of several partitions: how
//                                            many have come, 31 of padding, and a record of each: ROWS * D weighted values, ROWS tops and
//                                            sums in turn
//   q             [T, H, D] float32          row b is sequence b's
//   cache         [P, 2, K, S, D] CACHE_TYPE keys at [:, 0], values at [:, 1]; this step's are in it
//   block_tables  [B, M] int32               entries behind a context are not read
//   context_lens  [B] int32                  tokens in the cache, at least 1, at most M * S, of those that count
//   count         [1] int32                  sequences that count
//
// Beside attention.h's constants: PARTITION, the keys of one, a multiple of 32, and SIMDS, SIMD groups of a threadgroup, 1 to 16.
// PARTITIONS = ceil(M * S / PARTITION), at most 32; PARTS = ceil(H / K / (D <= 128 ? 8 : 4)), ROWS = ceil(H / K / PARTS).
// Launch: grid (K * PARTS, PARTITIONS, B); threads 32 * SIMDS.
//
// A threadgroup takes a sequence, a partition of its keys, and the ROWS query heads of a KV head: one reading serves them all. (More than
// eight heads, or four wide ones, are several parts that read the same keys, side by side, so that all but the first find them in a cache.)
// Its SIMD groups take turns at tiles of KEYS keys: tile t is number t % SIMDS's.
//
// In a tile, KEY_LANES lanes go along D, four numbers each, or twice four; 32 / KEY_LANES keys lie side by side in a SIMD group, STEPS such
// follow each other, and all of them are loaded before they are used. So each lane has the parts of STEPS * ROWS scores. They are summed by
// halving: a lane hands over one half of its parts and keeps the other, so that 31 shuffles make 32 scores, and each lane ends with SCORES
// of them, all of one row, whose exponentials nobody else computes (where rows are few, several lanes do the same). A score's weight goes
// back to the lanes of D by one more shuffle.
//
// Where a sequence's keys lie in several partitions, each threadgroup leaves a record and counts; the last of a sequence's part to count
// puts the records together. Metal 3 has no order between threadgroups, so the count says only that all records are on their way. That they
// are there each word says itself: 0 is "not yet", which no number is, as +0.0 is written as -0.0. Who reads 0 asks again.
//   - Promised: Metal's atomics are C++'s, relaxed. Those on one address have one order, the same for all threadgroups, and what reads and
//     changes takes the newest: so it is by such an operation that a word is asked for again. threadgroup_barrier(mem_device) keeps the
//     stores ahead of it ahead of the count. Between two launches is a barrier for everything, so the next one finds zeros.
//   - Relied upon: a store that has been made reaches others in reasonable time, as C++ would have it, without help. Whoever is waited for
//     has counted, so it has begun, and it waits for nobody.
// The last one puts zeros back. Only partitions with keys count; where there is one of them, its threadgroup writes `out` at once.
//
// Order of the arithmetic: float32, fma. A score is four (or eight) products of a lane in order, then lanes KEY_LANES / 2, ..., 2, 1 apart.
// A lane adds its weights, and the weighted values of its side, keys ascending; sides, 16, 8, ... apart, are added behind the last tile.
// SIMD groups are merged ascending, then partitions, whoever is last; sums of partitions by fixed pairs of lanes. Partitions and tiles are
// counted from the sequence's first token, and parts without keys add zeros: bits depend neither on the other sequences nor on where a
// sequence stands. attention_prefill multiplies by simdgroup_matrix, in another order: its bits differ from these.
//
// A word that is data and readiness in one is that of single-pass scans (Merrill and Garland, "Single-pass Parallel Prefix Scan with
// Decoupled Look-back", 2016), without their waiting for who may not have begun.
#include "attention.h"

#define POWER_ABOVE(n) ((n) <= 1 ? 1 : (n) <= 2 ? 2 : (n) <= 4 ? 4 : (n) <= 8 ? 8 : (n) <= 16 ? 16 : 32)

constant constexpr int PARTS = (G + (D <= 128 ? 8 : 4) - 1) / (D <= 128 ? 8 : 4); // of a KV head's query heads
constant constexpr int ROWS = (G + PARTS - 1) / PARTS;
constant constexpr int WIDE_ROWS = POWER_ABOVE(ROWS);
constant constexpr int PIECES = D / 4; // of four numbers
constant constexpr int KEY_LANES = POWER_ABOVE(PIECES); // of a key
constant constexpr int EACH = (PIECES + KEY_LANES - 1) / KEY_LANES; // pieces of a lane
constant constexpr int SIDES = 32 / KEY_LANES; // keys at the same time
constant constexpr int MOST_STEPS = EACH > 1 ? 4 : 8; // wide heads leave few registers
constant constexpr int STEPS = 32 / WIDE_ROWS < MOST_STEPS ? 32 / WIDE_ROWS : MOST_STEPS; // keys behind each other
constant constexpr int KEYS = STEPS * SIDES; // of a tile, at most 32
constant constexpr int PARTIALS = STEPS * WIDE_ROWS; // a lane's parts of scores: at most 32
constant constexpr int SCORES = PARTIALS <= KEY_LANES ? 1 : PARTIALS / KEY_LANES; // a lane's scores
constant constexpr int SHARE = KEY_LANES / WIDE_ROWS; // lanes of a side that share a row's scores
constant constexpr int ALIKE = SHARE <= STEPS ? 1 : SHARE / STEPS; // lanes that hold the same score
constant constexpr int PARTITIONS = (M * S + PARTITION - 1) / PARTITION;
constant constexpr int MERGED_ROWS = D >= 256 ? 1 : 256 / D; // at once: 8 KiB of threadgroup memory
constant constexpr int THREADS = 32 * SIMDS;
constant constexpr int RECORD = ROWS * (D + 2); // words
constant constexpr int AREA = 32 + PARTITIONS * RECORD; // words of a sequence's part; 32, that the count has a line of a cache to itself
constant constexpr int MINE = (ROWS * D + THREADS - 1) / THREADS; // numbers that a thread merges over the partitions
constant constexpr int AT_ONCE = MINE >= 32 ? 1 : 32 / MINE; // partitions of which a thread has words on their way

static_assert(PARTITION % 32 == 0, "attention_decode: PARTITION must be a multiple of 32");
static_assert(PARTITIONS <= 32, "attention_decode: more than 32 partitions, PARTITION must be larger");
static_assert(SIMDS >= 1 && SIMDS <= 16, "attention_decode: SIMDS must be 1 to 16");

// What a SIMD group has so far: weighted values of all rows, a lane its pieces and its side; top and sum of the lane's own row, the sum
// only of the scores that are its own.
struct Sums {
  float4 o[ROWS][EACH];
  float top, sum;
};

// A lane's place: its side, its number on it, and its row.
struct Lane {
  int number, side, along, row;
};
INLINE Lane lane_of(uint number) {
  Lane lane;
  lane.number = (int)number, lane.side = lane.number / KEY_LANES, lane.along = lane.number % KEY_LANES, lane.row = lane.along / SHARE;
  return lane;
}
// Which of a tile's steps the lane's score j is of.
INLINE int step_of(thread const Lane &lane, int j) {
  return ALIKE > 1 ? lane.along % SHARE / ALIKE : lane.along % SHARE * SCORES + j;
}
// Which lane of its side has the score of a row and step; it is its score step % SCORES.
INLINE int holder_of(int row, int step) { return row * SHARE + (ALIKE > 1 ? step * ALIKE : step / SCORES); }

// Piece `each` of a lane. Lanes behind the last piece read that, and multiply by nothing.
INLINE int piece_of(thread const Lane &lane, int each) { return min(lane.along + each * KEY_LANES, PIECES - 1); }
INLINE bool has_piece(thread const Lane &lane, int each) { return lane.along + each * KEY_LANES < PIECES; }

INLINE void load_queries(thread float4 (&queries)[WIDE_ROWS][EACH], device const float *q, thread const Lane &lane, int heads) {
#pragma unroll
  for (int r = 0; r < WIDE_ROWS; r++)
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const bool there = r < heads && has_piece(lane, e);
      queries[r][e] = there ? ((device const float4 *)(q + r * D))[piece_of(lane, e)] * SCALE_2 : float4(0.0f);
    }
}

// Where lane i's key start + i lies, counted in pieces; or, if it is not seen, some seen one.
INLINE uint look_up(device const int *table, int head, int start, thread const Lane &lane, int first, int past) {
  const int key = clamp(start + lane.number, first, past - 1);
  return row_at(table[key / S], head, key) * PIECES;
}

// A tile's keys, or values: this lane's pieces.
INLINE void load_tile(thread cached4 (&tile)[STEPS][EACH], device const cached4 *side, uint rows, thread const Lane &lane) {
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    device const cached4 *row = side + simd_shuffle(rows, (ushort)(step * SIDES + lane.side));
#pragma unroll
    for (int e = 0; e < EACH; e++) tile[step][e] = row[piece_of(lane, e)];
  }
}

// This lane's part of a score; number i is of row i / STEPS and step i % STEPS.
INLINE float part_of(int i, thread const float4 (&queries)[WIDE_ROWS][EACH], thread const cached4 (&keys)[STEPS][EACH]) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const float4 q = queries[i / STEPS][e], k = wide4(keys[i % STEPS][e]);
    sum = fma(q.w, k.w, fma(q.z, k.z, fma(q.y, k.y, fma(q.x, k.x, sum))));
  }
  return sum;
}

// The lane's half of two parts, with the other lane's part of it.
INLINE float halved(float low, float high, bool upper, int apart) {
  return (upper ? high : low) + simd_shuffle_xor(upper ? low : high, (ushort)apart);
}

INLINE void score(thread float (&scores)[SCORES], thread const float4 (&queries)[WIDE_ROWS][EACH],
                  thread const cached4 (&keys)[STEPS][EACH], thread const Lane &lane) {
  constexpr int HALF = PARTIALS / 2; // at least 2
  float parts[HALF];
#pragma unroll
  for (int i = 0; i < HALF; i++)
    parts[i] = halved(part_of(i, queries, keys), part_of(i + HALF, queries, keys), lane.along & KEY_LANES / 2, KEY_LANES / 2);
  int left = HALF;
#pragma unroll
  for (int apart = KEY_LANES / 4; apart >= 1; apart /= 2) {
    if (left > 1) {
      left /= 2;
#pragma unroll
      for (int i = 0; i < left; i++) parts[i] = halved(parts[i], parts[i + left], lane.along & apart, apart);
    } else {
      parts[0] += simd_shuffle_xor(parts[0], (ushort)apart);
    }
  }
#pragma unroll
  for (int j = 0; j < SCORES; j++) scores[j] = parts[j];
}

// The largest of the lanes that share a row.
INLINE float row_top(float most) {
#pragma unroll
  for (int apart = SHARE / 2; apart >= 1; apart /= 2) most = max(most, simd_shuffle_xor(most, (ushort)apart));
#pragma unroll
  for (int apart = KEY_LANES; apart < 32; apart *= 2) most = max(most, simd_shuffle_xor(most, (ushort)apart));
  return most;
}

// Scores become weights under the row's new top, hidden ones 0; what is there is rescaled.
INLINE void soften(thread float (&scores)[SCORES], thread Sums &sums, thread const Lane &lane, int start, int first, int past) {
  float most = NEVER;
  bool seen[SCORES];
#pragma unroll
  for (int j = 0; j < SCORES; j++) {
    const int key = start + step_of(lane, j) * SIDES + lane.side;
    seen[j] = key >= first && key < past;
    most = max(most, seen[j] ? scores[j] : NEVER);
  }
  const float top = max(sums.top, row_top(most)), fade = fade_of(sums.top, top);
  sums.sum *= fade;
#pragma unroll
  for (int j = 0; j < SCORES; j++) {
    scores[j] = seen[j] ? power_of_2(scores[j] - top) : 0.0f;
    sums.sum += scores[j];
  }
  const bool rises = simd_any(top != sums.top);
  sums.top = top;
  if (!rises) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float by = simd_shuffle(fade, (ushort)(r * SHARE));
#pragma unroll
    for (int e = 0; e < EACH; e++) sums.o[r][e] *= by;
  }
}

INLINE void weigh(thread Sums &sums, thread const float (&weights)[SCORES], thread const cached4 (&values)[STEPS][EACH],
                  thread const Lane &lane) {
#pragma unroll
  for (int step = 0; step < STEPS; step++)
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float weight = simd_shuffle(weights[step % SCORES], (ushort)(lane.side * KEY_LANES + holder_of(r, step)));
#pragma unroll
      for (int e = 0; e < EACH; e++) sums.o[r][e] = fma(float4(weight), wide4(values[step][e]), sums.o[r][e]);
    }
}

// All tiles of keys first to past - 1 that are this SIMD group's.
INLINE void attend(thread Sums &sums, thread const float4 (&queries)[WIDE_ROWS][EACH], device const cached4 *cache,
                   device const int *table, int head, int first, int past, int simd, thread const Lane &lane) {
  const int tile = first / KEYS, from = tile + (simd + SIMDS - tile % SIMDS) % SIMDS;
  if (from * KEYS >= past) return;
  uint rows = look_up(table, head, from * KEYS, lane, first, past);
  for (int start = from * KEYS; start < past; start += SIMDS * KEYS) {
    cached4 keys[STEPS][EACH], values[STEPS][EACH];
    load_tile(keys, cache, rows, lane);
    load_tile(values, cache + VALUES * PIECES, rows, lane);
    rows = look_up(table, head, start + SIMDS * KEYS, lane, first, past);
    float scores[SCORES];
    score(scores, queries, keys, lane);
    soften(scores, sums, lane, start, first, past);
    weigh(sums, scores, values, lane);
  }
}

// Over sides; and of the sum over the lanes that share a row and hold different scores.
INLINE void gather_sides(thread Sums &sums) {
#pragma unroll
  for (int apart = SHARE / 2; apart >= ALIKE; apart /= 2) sums.sum += simd_shuffle_xor(sums.sum, (ushort)apart);
#pragma unroll
  for (int apart = 16; apart >= KEY_LANES; apart /= 2) {
    sums.sum += simd_shuffle_xor(sums.sum, (ushort)apart);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums.o[r][e][i] += simd_shuffle_xor(sums.o[r][e][i], (ushort)apart);
  }
}

// What the SIMD groups of a threadgroup put together, MERGED_ROWS rows at a time.
struct Board {
  threadgroup float4 *o; // [SIMDS][MERGED_ROWS][PIECES]
  threadgroup float2 *ends; // [SIMDS][WIDE_ROWS]: top, sum
};
INLINE threadgroup float4 *row_of(Board board, int simd, int row) { return board.o + (simd * MERGED_ROWS + row) * PIECES; }
INLINE threadgroup float2 *ends_of(Board board, int simd, int row) { return board.ends + simd * WIDE_ROWS + row; }

INLINE void put_ends(Board board, thread const Sums &sums, int simd, thread const Lane &lane) {
  if (lane.side == 0 && lane.along % SHARE == 0) *ends_of(board, simd, lane.row) = float2(sums.top, sums.sum);
}

INLINE void put_rows(Board board, thread const Sums &sums, int base, int simd, thread const Lane &lane) {
  if (lane.side > 0) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (r < base || r >= base + MERGED_ROWS) continue;
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (has_piece(lane, e)) row_of(board, simd, r - base)[piece_of(lane, e)] = sums.o[r][e];
  }
}

// Four numbers of a row over all SIMD groups; its top and sum.
struct Merged {
  float4 o;
  float top, sum;
};
INLINE Merged merge(Board board, int row, int base, int piece) {
  Merged all;
  all.top = ends_of(board, 0, row)->x, all.sum = 0.0f, all.o = float4(0.0f);
  for (int s = 1; s < SIMDS; s++) all.top = max(all.top, ends_of(board, s, row)->x);
  for (int s = 0; s < SIMDS; s++) {
    const float2 ends = *ends_of(board, s, row);
    const float fade = fade_of(ends.x, all.top);
    all.sum = fma(ends.y, fade, all.sum);
    all.o = fma(row_of(board, s, row - base)[piece], float4(fade), all.o);
  }
  return all;
}

// --- records of partitions

INLINE void put(device atomic_uint *word, float value) {
  const uint bits = as_type<uint>(value);
  atomic_store_explicit(word, bits == 0 ? 0x80000000u : bits, memory_order_relaxed);
}
INLINE uint look(device atomic_uint *word) { return atomic_load_explicit(word, memory_order_relaxed); }
// A word's number as soon as it is there; `bits` is what has been seen of it. Behind it the word is 0.
INLINE float take(device atomic_uint *word, uint bits) {
  while (bits == 0) bits = atomic_fetch_or_explicit(word, 0u, memory_order_relaxed);
  atomic_store_explicit(word, 0u, memory_order_relaxed);
  return as_type<float>(bits);
}

INLINE void put_record(device atomic_uint *record, Merged all, int row, int piece) {
#pragma unroll
  for (int i = 0; i < 4; i++) put(record + row * D + piece * 4 + i, all.o[i]);
  if (piece == 0) put(record + ROWS * D + 2 * row, all.top), put(record + ROWS * D + 2 * row + 1, all.sum);
}

// Is this threadgroup the last of `expected` to count? All of it must come along.
INLINE bool is_last(device atomic_uint *counter, threadgroup uint *before, int expected, uint thread_index) {
  threadgroup_barrier(mem_flags::mem_device); // its records are on their way
  if (thread_index == 0) {
    *before = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
    if ((int)*before == expected - 1) atomic_store_explicit(counter, 0u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return (int)*before == expected - 1;
}

// What partitions `first` to `last` are worth in each row, a lane a partition, a SIMD group a row; and one over the row's sum.
struct Shares {
  threadgroup float *fades; // [ROWS][PARTITIONS]
  threadgroup float *inverses; // [ROWS]
};
INLINE float largest(float x) {
#pragma unroll
  for (int apart = 16; apart >= 1; apart /= 2) x = max(x, simd_shuffle_xor(x, (ushort)apart));
  return x;
}
INLINE float added(float x) {
#pragma unroll
  for (int apart = 16; apart >= 1; apart /= 2) x += simd_shuffle_xor(x, (ushort)apart);
  return x;
}
INLINE void take_ends(Shares shares, device atomic_uint *records, int heads, int first, int last, int simd, int lane) {
  const bool there = lane >= first && lane <= last;
  for (int r = simd; r < heads; r += SIMDS) {
    float top = NEVER, sum = 0.0f;
    if (there) {
      device atomic_uint *ends = records + lane * RECORD + ROWS * D + 2 * r;
      const uint top_bits = look(ends), sum_bits = look(ends + 1);
      top = take(ends, top_bits), sum = take(ends + 1, sum_bits);
    }
    const float most = largest(top), fade = there ? fade_of(top, most) : 0.0f;
    const float inverse = 1.0f / added(there ? sum * fade : 0.0f);
    if (there) shares.fades[r * PARTITIONS + lane] = fade;
    if (lane == 0) shares.inverses[r] = inverse;
  }
}

// Partitions `first` to `last` become `numbers` of `out`, rows of D behind each other.
INLINE void take_values(device float *out, Shares shares, device atomic_uint *records, int numbers, int first, int last, int thread_index) {
  float o[MINE];
#pragma unroll
  for (int m = 0; m < MINE; m++) o[m] = 0.0f;
  for (int p = first; p <= last; p += AT_ONCE) {
    uint bits[MINE][AT_ONCE];
#pragma unroll
    for (int k = 0; k < MINE * AT_ONCE; k++) {
      const int m = k / AT_ONCE, j = k % AT_ONCE, i = thread_index + m * THREADS;
      bits[m][j] = i < numbers && p + j <= last ? look(records + (p + j) * RECORD + i) : 0;
    }
#pragma unroll
    for (int k = 0; k < MINE * AT_ONCE; k++) {
      const int m = k / AT_ONCE, j = k % AT_ONCE, i = thread_index + m * THREADS;
      if (i >= numbers || p + j > last) continue;
      o[m] = fma(take(records + (p + j) * RECORD + i, bits[m][j]), shares.fades[i / D * PARTITIONS + p + j], o[m]);
    }
  }
#pragma unroll
  for (int m = 0; m < MINE; m++) {
    const int i = thread_index + m * THREADS;
    if (i < numbers) out[i] = o[m] * shares.inverses[i / D];
  }
}

kernel void attention_decode(device float *out [[buffer(0)]], device atomic_uint *partial [[buffer(1)]],
                             device const float *q [[buffer(2)]], device const cached4 *cache [[buffer(3)]],
                             device const int *block_tables [[buffer(4)]], device const int *context_lens [[buffer(5)]],
                             device const int *count [[buffer(6)]],
                             uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                             uint lane_index [[thread_index_in_simdgroup]], uint simd_index [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 rows[SIMDS * MERGED_ROWS * PIECES];
  threadgroup float2 ends[SIMDS * WIDE_ROWS];
  threadgroup float fades[ROWS * PARTITIONS];
  threadgroup float inverses[ROWS];
  threadgroup uint before;
  Board board;
  board.o = rows, board.ends = ends;
  const int b = (int)group.z, partition = (int)group.y, head = (int)group.x / PARTS, part = (int)group.x % PARTS;
  if (b >= count[0]) return;
  const int context = context_lens[b], seen = first_seen(context - 1);
  const int first = max(seen, partition * PARTITION), past = min(context, (partition + 1) * PARTITION);
  if (first >= past) return;
  const int row = head * G + part * ROWS, heads = min(ROWS, G - part * ROWS), simd = (int)simd_index;
  const Lane lane = lane_of(lane_index);

  float4 queries[WIDE_ROWS][EACH];
  load_queries(queries, q + ((ulong)b * H + row) * D, lane, heads);
  Sums sums;
  sums.top = NEVER, sums.sum = 0.0f;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int e = 0; e < EACH; e++) sums.o[r][e] = float4(0.0f);
  attend(sums, queries, cache, block_tables + (ulong)b * M, head, first, past, simd, lane);
  gather_sides(sums);

  const int first_partition = seen / PARTITION, last_partition = (context - 1) / PARTITION;
  const bool alone = PARTITIONS == 1 || first_partition == last_partition;
  device atomic_uint *counter = partial + ((ulong)b * (K * PARTS) + group.x) * AREA, *records = counter + 32;
  out += ((ulong)b * H + row) * D;
  put_ends(board, sums, simd, lane);
  for (int base = 0; base < heads; base += MERGED_ROWS) {
    if (base > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    put_rows(board, sums, base, simd, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = (int)thread_index; i < min(MERGED_ROWS, heads - base) * PIECES; i += THREADS) {
      const int r = base + i / PIECES, piece = i % PIECES;
      const Merged all = merge(board, r, base, piece);
      if (alone) ((device float4 *)(out + r * D))[piece] = all.o * (1.0f / all.sum);
      else put_record(records + partition * RECORD, all, r, piece);
    }
  }
  if (alone || !is_last(counter, &before, last_partition - first_partition + 1, thread_index)) return;
  Shares shares;
  shares.fades = fades, shares.inverses = inverses;
  take_ends(shares, records, heads, first_partition, last_partition, simd, lane.number);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  take_values(out, shares, records, heads * D, first_partition, last_partition, (int)thread_index);
}
