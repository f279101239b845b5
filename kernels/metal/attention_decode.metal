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
//   alike         [B] int32, if CASCADE      leading tokens of sequence b that lie in the same blocks as those of sequence b - 1: whole
//                                            blocks that both have filled. 0 for the first; a smaller number is never wrong
//
// Beside attention.h's constants: PARTITION, the keys of one, a multiple of 32; SIMDS, SIMD groups of a threadgroup, 1 to 16; CASCADE; and
// SPREAD, how many threadgroups a launch should keep where sequences share.
// PARTITIONS = ceil(M * S / PARTITION), at most 32; PARTS = ceil(H / K / (D <= 128 ? 8 : 4)), ROWS = ceil(H / K / PARTS).
// Launch: grid (K * PARTS, B, PARTITIONS); threads 32 * SIMDS.
//
// A threadgroup takes a sequence, a partition of its keys, and the ROWS query heads of a KV head: one reading serves them all. (More than
// eight heads, or four wide ones, are several parts that read the same keys, side by side, so that all but the first find them in a cache.)
// Tiles of KEYS keys make SIMDS strands: tile t is in strand t % SIMDS. A strand has sums of its own; each SIMD group takes one.
//
// Where sequences share blocks, up to MOST of them are a unit: the threadgroup of the first takes the partition for all of them, and those
// of the others have nothing to do. Here, too, a SIMD group takes one strand of one sequence; `abreast` strands are done at the same time,
// and the others after them. A tile that all have in common is brought to threadgroup memory once, by all threads, and meets all sequences
// there; behind those, each SIMD group reads its own sequence's. Only the reading is shared: a strand's sums are what they are for a
// sequence alone. Which sequences these are, shared_reads.h says.
//   - Registers: a unit needs about as many as a sequence alone. Alone, a tile's keys and values are both on their way. In a unit few of
//     them are, and what its sequences have been put together to takes their place (FITS).
//   - Threadgroup memory: tiles lie where strands are put together.
//   - Time: a unit takes as long as its sequences one after the other would, less what they wait for memory.
//
// In a tile, KEY_LANES lanes go along D, four numbers each, or twice four; 32 / KEY_LANES keys lie side by side in a SIMD group, STEPS such
// follow each other, and all of them are loaded before they are used. So each lane has the parts of STEPS * ROWS scores. They are summed by
// halving: a lane hands over one half of its parts and keeps the other, so that 31 shuffles make 32 scores, and each lane ends with SCORES
// of them, all of one row, whose exponentials nobody else computes (where rows are few, several lanes do the same). A score's weight goes
// back to the lanes of D by one more shuffle.
//
// Where a sequence's keys lie in several partitions, each threadgroup leaves a record and counts; the last of a sequence's part to count
// puts the records together (records.h), and zeros back. Only partitions with keys count; where there is one of them, its threadgroup
// writes `out` at once.
//
// Order of the arithmetic: float32, fma. A score is four (or eight) products of a lane in order, then lanes KEY_LANES / 2, ..., 2, 1 apart.
// A lane adds its weights, and the weighted values of its side, keys ascending; sides, 16, 8, ... apart, are added behind the last tile.
// Strands are put together ascending, each under the top so far; then partitions, whoever is last; sums of partitions by fixed pairs of
// lanes. Partitions and tiles are counted from the sequence's first token, and parts without keys add zeros: bits depend neither on the
// other sequences nor on where a sequence stands. attention_prefill multiplies by simdgroup_matrix, in another order: its bits differ.
//
// Shared prefixes by log-sum-exp are Hydragen's (arXiv:2402.05099); there the prefix is one piece of the sum. Here the pieces are those
// that are there anyway, so that nothing depends on the company.
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
constant constexpr int HALF = PARTIALS / 2; // at least 2
constant constexpr int SCORES = PARTIALS <= KEY_LANES ? 1 : PARTIALS / KEY_LANES; // a lane's scores
constant constexpr int SHARE = KEY_LANES / WIDE_ROWS; // lanes of a side that share a row's scores
constant constexpr int ALIKE = SHARE <= STEPS ? 1 : SHARE / STEPS; // lanes that hold the same score
constant constexpr int PARTITIONS = (M * S + PARTITION - 1) / PARTITION;
constant constexpr int MERGED_ROWS = D >= 256 ? 1 : 256 / D; // at once: 8 KiB of threadgroup memory
constant constexpr int THREADS = 32 * SIMDS;
constant constexpr int BOARD = SIMDS * MERGED_ROWS * PIECES; // float4 in which SIMD groups put rows for each other
constant constexpr int TILE = KEYS * PIECES; // pieces
constant constexpr int REGISTERS = sizeof(cached4) / 4; // of a piece
constant constexpr int ABREAST = BOARD * 4 / (TILE * REGISTERS) / 2; // strands whose keys and values have room where the board is
// What threads have put together for n sequences may take the room of a tile's values.
#define FITS(n) ((n) <= SIMDS && (n) * ROWS * D <= THREADS * STEPS * EACH * REGISTERS)
constant constexpr int MOST = !CASCADE || ABREAST < 1 ? 1 : FITS(16) ? 16 : FITS(8) ? 8 : FITS(4) ? 4 : FITS(2) ? 2 : 1; // of a unit
constant constexpr int MERGED = (MOST * ROWS * PIECES + THREADS - 1) / THREADS; // pieces that a thread puts together
constant constexpr int BROUGHT = MOST > 1 ? (ABREAST * TILE + THREADS - 1) / THREADS : 1; // pieces that it brings to the others at a time
constant constexpr int RECORD = ROWS * (D + 2); // words
constant constexpr int AREA = 32 + PARTITIONS * RECORD; // words of a sequence's part; 32, that the count has a line of a cache to itself
constant constexpr int MINE = (ROWS * D + THREADS - 1) / THREADS; // numbers that a thread merges over the partitions
constant constexpr int AT_ONCE = MINE >= 32 ? 1 : 32 / MINE; // partitions of which a thread has words on their way

static_assert(PARTITION % 32 == 0, "attention_decode: PARTITION must be a multiple of 32");
static_assert(PARTITIONS <= 32, "attention_decode: more than 32 partitions, PARTITION must be larger");
static_assert(SIMDS >= 1 && SIMDS <= 16, "attention_decode: SIMDS must be 1 to 16");

#include "shared_reads.h"
#include "records.h"

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

// This lane's pieces of a step's key, or value; `rows` are of the tile's keys.
INLINE void load_far(thread cached4 (&pieces)[EACH], device const cached4 *side, uint rows, int step, thread const Lane &lane) {
  device const cached4 *row = side + simd_shuffle(rows, (ushort)(step * SIDES + lane.side));
#pragma unroll
  for (int e = 0; e < EACH; e++) pieces[e] = row[piece_of(lane, e)];
}
INLINE void load_near(thread cached4 (&pieces)[EACH], threadgroup const cached4 *tile, int step, thread const Lane &lane) {
#pragma unroll
  for (int e = 0; e < EACH; e++) pieces[e] = tile[(step * SIDES + lane.side) * PIECES + piece_of(lane, e)];
}

// This lane's part of a score.
INLINE float part_of(thread const float4 (&query)[EACH], thread const cached4 (&key)[EACH]) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const float4 q = query[e], k = wide4(key[e]);
    sum = fma(q.w, k.w, fma(q.z, k.z, fma(q.y, k.y, fma(q.x, k.x, sum))));
  }
  return sum;
}

// The lane's half of two parts, with the other lane's part of it.
INLINE float halved(float low, float high, bool upper, int apart) {
  return (upper ? high : low) + simd_shuffle_xor(upper ? low : high, (ushort)apart);
}

// A step's parts of scores, already halved once. Part i is of row i / STEPS and step i % STEPS, and meets part i + HALF: of another row,
// or, where there is one row, of another step.
INLINE void add_parts(thread float (&parts)[HALF], thread const float4 (&queries)[WIDE_ROWS][EACH], thread const cached4 (&key)[EACH],
                      int step, thread const Lane &lane) {
  const bool upper = lane.along & KEY_LANES / 2;
  if (WIDE_ROWS == 1) {
    const float part = part_of(queries[0], key);
    parts[step % HALF] = step < HALF ? part : halved(parts[step % HALF], part, upper, KEY_LANES / 2);
    return;
  }
#pragma unroll
  for (int r = 0; r < WIDE_ROWS / 2; r++)
    parts[r * STEPS + step] = halved(part_of(queries[r], key), part_of(queries[r + WIDE_ROWS / 2], key), upper, KEY_LANES / 2);
}

INLINE void score(thread float (&scores)[SCORES], thread float (&parts)[HALF], thread const Lane &lane) {
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

INLINE void weigh(thread Sums &sums, thread const float (&weights)[SCORES], thread const cached4 (&value)[EACH], int step,
                  thread const Lane &lane) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float weight = simd_shuffle(weights[step % SCORES], (ushort)(lane.side * KEY_LANES + holder_of(r, step)));
#pragma unroll
    for (int e = 0; e < EACH; e++) sums.o[r][e] = fma(float4(weight), wide4(value[e]), sums.o[r][e]);
  }
}

INLINE void begin(thread Sums &sums) {
  sums.top = NEVER, sums.sum = 0.0f;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int e = 0; e < EACH; e++) sums.o[r][e] = float4(0.0f);
}

// A strand's first tile from `tile` on.
INLINE int first_tile(int strand, int tile) { return tile + (strand + SIMDS - tile % SIMDS) % SIMDS; }

// All tiles of keys first to past - 1 that are in a strand. Keys and values of a tile are on their way together.
INLINE void attend(thread Sums &sums, thread const float4 (&queries)[WIDE_ROWS][EACH], device const cached4 *cache,
                   device const int *table, int head, int first, int past, int strand, thread const Lane &lane) {
  const int from = first_tile(strand, first / KEYS);
  if (from * KEYS >= past) return;
  uint rows = look_up(table, head, from * KEYS, lane, first, past);
  for (int start = from * KEYS; start < past; start += SIMDS * KEYS) {
    cached4 keys[STEPS][EACH], values[STEPS][EACH];
#pragma unroll
    for (int step = 0; step < STEPS; step++) load_far(keys[step], cache, rows, step, lane);
#pragma unroll
    for (int step = 0; step < STEPS; step++) load_far(values[step], cache + VALUES * PIECES, rows, step, lane);
    rows = look_up(table, head, start + SIMDS * KEYS, lane, first, past);
    float parts[HALF], scores[SCORES];
#pragma unroll
    for (int step = 0; step < STEPS; step++) add_parts(parts, queries, keys[step], step, lane);
    score(scores, parts, lane);
    soften(scores, sums, lane, start, first, past);
#pragma unroll
    for (int step = 0; step < STEPS; step++) weigh(sums, scores, values[step], step, lane);
  }
}

// As attend, with half a tile's keys or values at a time: a unit has no registers for more.
INLINE void attend_sparingly(thread Sums &sums, thread const float4 (&queries)[WIDE_ROWS][EACH], device const cached4 *cache,
                             device const int *table, int head, int first, int past, int strand, thread const Lane &lane) {
  for (int start = first_tile(strand, first / KEYS) * KEYS; start < past; start += SIMDS * KEYS) {
    const uint rows = look_up(table, head, start, lane, first, past);
    float parts[HALF], scores[SCORES];
    cached4 pieces[STEPS / 2][EACH];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      if (step % (STEPS / 2) == 0)
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++) load_far(pieces[i], cache, rows, step + i, lane);
      add_parts(parts, queries, pieces[step % (STEPS / 2)], step, lane);
    }
    score(scores, parts, lane);
    soften(scores, sums, lane, start, first, past);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      if (step % (STEPS / 2) == 0)
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++) load_far(pieces[i], cache + VALUES * PIECES, rows, step + i, lane);
      weigh(sums, scores, pieces[step % (STEPS / 2)], step, lane);
    }
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
  threadgroup float2 *ends; // [SIMDS][WIDE_ROWS]: top, sum; then by what the rows before, and the SIMD group's, are to be multiplied
  threadgroup float2 *totals; // [MOST][WIDE_ROWS]: top, sum of all strands so far
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

// What a thread has put together: pieces of rows, all its sequences' rows in turn; and the ends of one row of one sequence.
struct Merged {
  float4 o[MERGED];
  float top, sum;
};
struct Item {
  int member, row, piece;
};
INLINE Item item_of(thread const Unit &unit, int thread_index, int m) {
  const int i = thread_index + m * THREADS, line = i / PIECES;
  Item item;
  item.member = line & (slots_of(unit) - 1), item.row = line >> unit.shift, item.piece = i % PIECES;
  return item;
}

INLINE void clear(thread Merged &all) {
  all.top = NEVER, all.sum = 0.0f;
#pragma unroll
  for (int m = 0; m < MERGED; m++) all.o[m] = float4(0.0f);
}

// A row's ends, by a thread of its own, over `count` strands; behind it the board says what to multiply by.
INLINE void merge_ends(thread Merged &all, Board board, thread const Unit &unit, int count, int thread_index) {
  const int member = thread_index / WIDE_ROWS, row = thread_index % WIDE_ROWS;
  if (member >= unit.size) return;
  for (int s = 0; s < count; s++) {
    threadgroup float2 *place = ends_of(board, s * slots_of(unit) + member, row);
    const float2 ends = *place;
    const float top = max(all.top, ends.x), before = fade_of(all.top, top), fade = fade_of(ends.x, top);
    all.sum = fma(ends.y, fade, all.sum * before), all.top = top;
    *place = float2(before, fade);
  }
  board.totals[thread_index] = float2(all.top, all.sum);
}

// The strands that SIMD groups have now, `count` for each sequence, behind those that have been. All threads must come along, and meet
// before the board is used again.
INLINE void merge(thread Merged &all, Board board, thread const Sums &sums, thread const Unit &unit, int heads, int count,
                  int thread_index, int simd, thread const Lane &lane) {
  put_ends(board, sums, simd, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  merge_ends(all, board, unit, count, thread_index);
  for (int base = 0; base < heads; base += MERGED_ROWS) {
    if (base > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    put_rows(board, sums, base, simd, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int m = 0; m < MERGED; m++) {
      const Item item = item_of(unit, thread_index, m);
      if (item.row < base || item.row >= min(base + MERGED_ROWS, heads) || item.member >= unit.size) continue;
      for (int s = 0; s < count; s++) {
        const int from = s * slots_of(unit) + item.member;
        const float2 fades = *ends_of(board, from, item.row);
        all.o[m] = fma(row_of(board, from, item.row - base)[item.piece], float4(fades.y), all.o[m] * fades.x);
      }
    }
  }
}

// --- tiles that sequences share

// Tiles that lie in threadgroup memory for a while, one of each strand that is abreast.
struct Near {
  threadgroup cached4 *keys, *values; // [ABREAST][TILE]
};
// The pieces that a thread brings there: where they lie in the cache, and themselves on their way.
struct Brought {
  uint places[BROUGHT];
  cached4 pieces[BROUGHT];
};
#define NOWHERE 0xFFFFFFFFu

// Tile `turn` of each of the strands from `strand` on, as far as they have one that all share.
INLINE void find(thread Brought &brought, device const int *table, thread const Unit &unit, int head, int strand, int tile, int turn,
                 int thread_index) {
#pragma unroll
  for (int i = 0; i < BROUGHT; i++) {
    const int at = thread_index + i * THREADS, own = strand + at / TILE, found = first_tile(own, tile) + turn * SIMDS;
    const bool there = at < unit.abreast * TILE && own < SIMDS && found < unit.common / KEYS;
    const int key = found * KEYS + at % TILE / PIECES;
    brought.places[i] = there ? row_at(table[key / S], head, key) * PIECES + at % PIECES : NOWHERE;
  }
}
INLINE void fetch(thread Brought &brought, device const cached4 *side) {
#pragma unroll
  for (int i = 0; i < BROUGHT; i++)
    if (brought.places[i] != NOWHERE) brought.pieces[i] = side[brought.places[i]];
}
INLINE void bring(thread const Brought &brought, threadgroup cached4 *to, int thread_index) {
#pragma unroll
  for (int i = 0; i < BROUGHT; i++)
    if (thread_index + i * THREADS < ABREAST * TILE) to[thread_index + i * THREADS] = brought.pieces[i];
}

// The tiles that a unit's sequences have in common from `start` on, of the strands from `strand` on; `own` is this SIMD group's, or SIMDS.
// All threads must come along. While a tile's keys are met its values are on their way, and the next one's keys while its values are.
INLINE void attend_together(thread Sums &sums, thread const float4 (&queries)[WIDE_ROWS][EACH], Near near, device const cached4 *cache,
                            device const int *table, thread const Unit &unit, int head, int start, int strand, int own, int thread_index,
                            thread const Lane &lane) {
  const int tile = start / KEYS, end = unit.common / KEYS, place = (own - strand) * TILE;
  Brought brought;
#pragma unroll
  for (int i = 0; i < BROUGHT; i++) brought.pieces[i] = cached4(0);
  find(brought, table, unit, head, strand, tile, 0, thread_index);
  fetch(brought, cache);
  for (int turn = 0; turn * SIMDS < end - tile; turn++) {
    const int at = first_tile(own, tile) + turn * SIMDS;
    const bool mine = own < SIMDS && at < end;
    float parts[HALF], scores[SCORES];
    cached4 pieces[EACH];
    bring(brought, near.keys, thread_index);
    fetch(brought, cache + VALUES * PIECES);
    find(brought, table, unit, head, strand, tile, turn + 1, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (mine) {
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        load_near(pieces, near.keys + place, step, lane);
        add_parts(parts, queries, pieces, step, lane);
      }
      score(scores, parts, lane);
    }
    bring(brought, near.values, thread_index);
    fetch(brought, cache);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (mine) {
      soften(scores, sums, lane, at * KEYS, start, unit.common);
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        load_near(pieces, near.values + place, step, lane);
        weigh(sums, scores, pieces, step, lane);
      }
    }
  }
}

// --- results

// Where one threadgroup's rows go, of whichever sequence: row `row` of a sequence's H, its part's area.
struct Results {
  device float *out;
  device atomic_uint *partial;
  int row, heads, part;
};
INLINE device float *out_of(Results to, int b) { return to.out + ((ulong)b * H + to.row) * D; }
INLINE device atomic_uint *counter_of(Results to, int b) { return to.partial + ((ulong)b * (K * PARTS) + to.part) * AREA; }
INLINE device atomic_uint *records_of(Results to, int b) { return counter_of(to, b) + 32; }

INLINE void put_results(Results to, thread const Merged &all, Board board, Company company, thread const Unit &unit, int partition,
                        int thread_index) {
#pragma unroll
  for (int m = 0; m < MERGED; m++) {
    const Item item = item_of(unit, thread_index, m);
    if (item.row >= to.heads || item.member >= unit.size) continue;
    const int b = unit.b + item.member;
    const float2 total = board.totals[item.member * WIDE_ROWS + item.row];
    if (in_one_partition(company.contexts[b])) ((device float4 *)(out_of(to, b) + item.row * D))[item.piece] = all.o[m] * (1.0f / total.y);
    else put_record(records_of(to, b) + partition * RECORD, all.o[m], total, item.row, item.piece);
  }
}

// Each sequence is counted by a thread of its own; lasts [MOST] says of which this was the last partition.
INLINE void count_results(threadgroup uint *lasts, Results to, Company company, thread const Unit &unit, int thread_index) {
  if (thread_index >= unit.size) return;
  const int b = unit.b + thread_index, context = company.contexts[b], partitions = last_partition(context) - first_partition(context) + 1;
  lasts[thread_index] = partitions > 1 && is_last(counter_of(to, b), partitions);
}

#if CASCADE
#define ALIKE_ARGUMENT device const int *alike [[buffer(7)]],
#define GIVE_ALIKE(company) company.alike = alike
#else
#define ALIKE_ARGUMENT
#define GIVE_ALIKE(company) company.alike = nullptr
#endif

kernel void attention_decode(device float *out [[buffer(0)]], device atomic_uint *partial [[buffer(1)]],
                             device const float *q [[buffer(2)]], device const cached4 *cache [[buffer(3)]],
                             device const int *block_tables [[buffer(4)]], device const int *context_lens [[buffer(5)]],
                             device const int *count [[buffer(6)]], ALIKE_ARGUMENT
                             uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                             uint lane_index [[thread_index_in_simdgroup]], uint simd_index [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 rows[BOARD];
  threadgroup float2 ends[SIMDS * WIDE_ROWS];
  threadgroup float2 totals[MOST * WIDE_ROWS];
  threadgroup float fades[ROWS * PARTITIONS];
  threadgroup float inverses[ROWS];
  threadgroup uint lasts[MOST];
  Board board;
  board.o = rows, board.ends = ends, board.totals = totals;
  Company company;
  company.contexts = context_lens, company.count = count[0];
  GIVE_ALIKE(company);
  const int b = (int)group.y, partition = (int)group.z, start = partition * PARTITION, thread_index = (int)index, simd = (int)simd_index;
  if (b >= company.count) return;
  const int context = context_lens[b], first = max(first_seen(context - 1), start), past = min(context, start + PARTITION);
  if (first >= past) return;
  const Lane lane = lane_of(lane_index);
  const Unit unit = MOST > 1 ? find_unit(company, b, start, lane.number) : alone(b);
  if (unit.b != b) return;
  const int head = (int)group.x / PARTS, part = (int)group.x % PARTS;
  Results to;
  to.out = out, to.partial = partial, to.row = head * G + part * ROWS, to.heads = min(ROWS, G - part * ROWS), to.part = (int)group.x;

  Merged all;
  clear(all);
  float4 queries[WIDE_ROWS][EACH];
  Sums sums;
  if (MOST == 1 || unit.size == 1) {
    load_queries(queries, q + ((ulong)b * H + to.row) * D, lane, to.heads);
    begin(sums);
    attend(sums, queries, cache, block_tables + (ulong)b * M, head, first, past, simd, lane);
    gather_sides(sums);
    merge(all, board, sums, unit, to.heads, SIMDS, thread_index, simd, lane);
  } else {
    Near near;
    near.keys = (threadgroup cached4 *)rows, near.values = near.keys + ABREAST * TILE;
    const int member = member_of(unit, simd), mine = b + min(member, unit.size - 1);
    const int own_first = unit.common / KEYS * KEYS, own_past = min(context_lens[mine], start + PARTITION);
    load_queries(queries, q + ((ulong)mine * H + to.row) * D, lane, to.heads);
    for (int strand = 0; strand < SIMDS; strand += unit.abreast) {
      const int there = min(unit.abreast, SIMDS - strand); // strands
      const int own = member < unit.size && simd >> unit.shift < there ? strand + (simd >> unit.shift) : SIMDS;
      begin(sums);
      attend_together(sums, queries, near, cache, block_tables + (ulong)b * M, unit, head, start, strand, own, thread_index, lane);
      if (own < SIMDS)
        attend_sparingly(sums, queries, cache, block_tables + (ulong)mine * M, head, own_first, own_past, own, lane);
      gather_sides(sums);
      merge(all, board, sums, unit, to.heads, there, thread_index, simd, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  put_results(to, all, board, company, unit, partition, thread_index);
  if (PARTITIONS == 1 || (unit.size == 1 && in_one_partition(context))) return;
  threadgroup_barrier(mem_flags::mem_device); // its records are on their way
  count_results(lasts, to, company, unit, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  Shares shares;
  shares.fades = fades, shares.inverses = inverses;
  for (int i = 0; i < unit.size; i++) {
    if (!lasts[i]) continue;
    const int one = b + i, from = first_partition(context_lens[one]), until = last_partition(context_lens[one]);
    take_ends(shares, records_of(to, one), to.heads, from, until, simd, lane.number);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    take_values(out_of(to, one), shares, records_of(to, one), to.heads * D, from, until, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup); // the next one's shares come where these are
  }
}
