// caches = the blocks of all other ranks that the rows of prompts see: before attention_prefill.cu where WORLD ranks divide contexts
//
//   turns, site0...  meeting.cuh: the sites of all ranks; this one writes its blocks into its own
//   cache0...     [P, BLOCK] bytes    the blocks of each rank, under the numbers that they have in its pool: the pool itself of this rank, with
//                                     this step's keys and values, which is read; the others are written
//   shared        [1] uint32          meeting.cuh
//   before        not read: what must have run before
//   block_tables  [B, M] int32        of blocks of all ranks together
//   context_lens  [B] int32           tokens in all ranks
//   query_starts  [B + 1] int32       first row of each sequence
//   chunks        [2] int32           first sequence of several rows, number of those
//
// All but the blocks are the same in all ranks. BLOCK_WORDS is a block's size in units of 16 bytes; M, S, WINDOW as in attention.cuh.
//
// Launch: grid (64, 1, 1), 256 threads, no dynamic shared memory. Unit of work: a piece of PIECE words of a block that some row sees. A round
// takes as many pieces of each rank as fit a place. Blocks pass through the place and not straight from the pool: of that the other GPU
// would have to map each layer, and through the host it could not be read at all.
#include "meeting.cuh"

#define CACHE_ARGUMENTS EACH_RANK(float4 *cache),

constexpr int LOADS = 4, PIECE = LOADS * THREADS, PIECES = (BLOCK_WORDS + PIECE - 1) / PIECE;  // words; of a block
constexpr int MOST = ROOM / PIECE;                                                             // pieces of a round
static_assert(MOST > 0, "gather_blocks: PLACE has no room for a piece");

// The inputs that describe the rows.
struct Steps {
  const int *tables, *contexts, *starts, *chunks;
};

// The blocks that rows of a sequence see: `count` of its table from `first` on.
struct Seen {
  int first, count;
};

// A piece of a block: words `first` to `first` + size - 1 of block `number`.
struct Piece {
  int number, first, size;
};

DEVICE int units_of(const Steps &steps);
DEVICE Piece piece_of(const Steps &steps, int unit);
template <bool FRESH> DEVICE void copy_piece(float4 *to, const float4 *from, int size);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gather_blocks(u32 *turns, SITE_ARGUMENTS CACHE_ARGUMENTS const u32 *shared, const void *before, const int *block_tables,
                  const int *context_lens, const int *query_starts, const int *chunks) {
  await_previous();
  u8 *const sites[WORLD] = SITES;
  float4 *const caches[WORLD] = {EACH_RANK(cache)};
  const Steps steps = {block_tables, context_lens, query_starts, chunks};
  const u32 turn = turns[0];
  const int units = units_of(steps), rounds = (units + MOST - 1) / MOST;
  for (int round = 0; round < rounds; round++) {
    const int start = round * MOST, size = min(MOST, units - start);
    float4 *own = place_of(sites[RANK], turn + round);
    for (int v = blockIdx.x; v < size; v += gridDim.x) {
      const Piece piece = piece_of(steps, start + v);
      copy_piece<false>(own + v * PIECE, caches[RANK] + (s64)piece.number * BLOCK_WORDS + piece.first, piece.size);
    }
    meet(sites, shared, turn + round);
    for (int v = blockIdx.x; v < size; v += gridDim.x) {
      const Piece piece = piece_of(steps, start + v);
#pragma unroll
      for (int r = 0; r < WORLD; r++) {
        if (r == RANK) continue;
        float4 *to = caches[r] + (s64)piece.number * BLOCK_WORDS + piece.first;
        copy_piece<true>(to, place_of(sites[r], turn + round) + v * PIECE, piece.size);
      }
    }
  }
  end_rounds(turns, turn, rounds);
}

// --- pieces

DEVICE Seen seen_by(const Steps &steps, int b) {
  const int context = steps.contexts[b], position = context - (steps.starts[b + 1] - steps.starts[b]);
  const int first = WINDOW > 0 ? max(0, position - WINDOW + 1) / (S * WORLD) : 0;
  return {first, (context - 1) / (S * WORLD) + 1 - first};
}

DEVICE int units_of(const Steps &steps) {
  int blocks = 0;
  for (int i = 0; i < steps.chunks[1]; i++) blocks += seen_by(steps, steps.chunks[0] + i).count;
  return blocks * PIECES;
}

DEVICE Piece piece_of(const Steps &steps, int unit) {
  int b = steps.chunks[0], left = unit / PIECES;
  Seen seen = seen_by(steps, b);
  for (; left >= seen.count; seen = seen_by(steps, ++b)) left -= seen.count;
  const int first = unit % PIECES * PIECE;
  return {steps.tables[(s64)b * M + seen.first + left], first, min(PIECE, BLOCK_WORDS - first)};
}

// All loads of a thread are under way before the first store: what another GPU has written takes a microsecond or two.
template <bool FRESH> DEVICE void copy_piece(float4 *to, const float4 *from, int size) {
  float4 words[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int at = min((int)(i * THREADS + threadIdx.x), size - 1);
    words[i] = FRESH ? load_fresh(from + at) : from[at];
  }
#pragma unroll
  for (int i = 0; i < LOADS; i++)
    if ((int)(i * THREADS + threadIdx.x) < size) to[i * THREADS + threadIdx.x] = words[i];
}
