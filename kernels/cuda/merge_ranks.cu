// out[b] = what the newest token of sequence b attends to, from the partitions of all ranks: the end of a decode where WORLD ranks divide
// contexts
//
//   out           [T, H, D] float32   rows of the sequences `first` to `first` + B - 1; those from `count` on are not touched
//   turns, site0... meeting.cuh: in the places of this turn are the results of attention_decode_ranks.cu (rank_results.cuh)
//   shared        [1] uint32          meeting.cuh
//   context_lens  [B] int32           tokens in all ranks, the same in all of them
//   count         [1] int32           number of sequences, the same in all ranks
//   sinks         [H] float32, if SINKS   attention.cuh
//   first, B      integers: the first sequence of this launch, and how many it has at most
//
// Partitions are merged as in one GPU, by their number in the sequence: a section of them at a time, ascending, then the sections. So a row
// has the bits that it has there. Constants: those of attention.cuh and meeting.cuh.
//
// Launch: grid (BLOCKS, 1, 1), 256 threads, no dynamic shared memory. BLOCKS = ceil(B H D / 1024), at most 64; the same in all ranks. Unit of
// work: a thread has four columns of a row at a time.
#include "meeting.cuh"
#include "rank_results.cuh"

constexpr int FOURS = D / 4, SECTION_PARTITIONS = SECTION / PARTITION, LOADS = 8;
static_assert(LOADS % WORLD == 0, "merge_ranks: each load is of one rank");

// The places of this turn, by rank.
struct Places {
  const float *of[WORLD];
};

// Four columns of merged partitions.
struct Sums {
  float4 o;
  float max, sum;
};
DEVICE Sums nothing() { return {make_float4(0.0f, 0.0f, 0.0f, 0.0f), MINUS_INFINITY, 0.0f}; }

DEVICE void add(Sums &sums, float4 o, float max, float sum);
DEVICE void add_partitions(Sums &sums, const Places &places, int entry, int head, int column, int base, int from, int to);
DEVICE Sums sums_of_row(const Places &places, int b, int head, int column, int context);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    merge_ranks(float *out, u32 *turns, SITE_ARGUMENTS const u32 *shared, const int *context_lens, SINKS_ARGUMENT const int *count,
                int first, int B) {
  await_previous();
  u8 *const sites[WORLD] = SITES;
  const u32 turn = turns[0];
  const int sequences = min(B, count[0] - first);
  if (sequences <= 0) return;
  Places places;
#pragma unroll
  for (int r = 0; r < WORLD; r++) places.of[r] = (const float *)place_of(sites[r], turn);
  meet(sites, shared, turn);
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < sequences * H * FOURS; i += gridDim.x * THREADS) {
    const int column = i % FOURS, head = i / FOURS % H, b = i / (FOURS * H);
    const Sums sums = sums_of_row(places, b, head, column, context_lens[first + b]);
    const float inverse = 1.0f / with_sink(sums.sum, sums.max, SINKS_POINTER, head);
    const float4 o = make_float4(sums.o.x * inverse, sums.o.y * inverse, sums.o.z * inverse, sums.o.w * inverse);
    ((float4 *)out)[((s64)(first + b) * H + head) * FOURS + column] = o;
  }
  end_rounds(turns, turn, 1);
}

DEVICE Sums sums_of_row(const Places &places, int b, int head, int column, int context) {
  const int begin = first_visible(context - 1) / PARTITION, last = (context - 1) / PARTITION;
  Sums all = nothing(), sums = all;
#pragma unroll 1
  for (int from = begin; from <= last;) {
    const int to = min(last, from / SECTION_PARTITIONS * SECTION_PARTITIONS + SECTION_PARTITIONS - 1);
    sums = nothing();
#pragma unroll 1
    for (int base = from & -LOADS; base <= to; base += LOADS) add_partitions(sums, places, b * M, head, column, base, from, to);
    if (from != begin || to != last) add(all, sums.o, sums.max, sums.sum);
    from = to + 1;
  }
  return begin / SECTION_PARTITIONS == last / SECTION_PARTITIONS ? sums : all;
}

// The partitions `base` to base + LOADS - 1, of those from `from` to `to`; the entries of the sequence begin with `entry`. LOADS is a multiple
// of WORLD, and base of LOADS, so that each load's rank is a constant.
DEVICE void add_partitions(Sums &sums, const Places &places, int entry, int head, int column, int base, int from, int to) {
  float4 next[LOADS];
  float max[LOADS], sum[LOADS];
#pragma unroll
  for (int j = 0; j < LOADS; j++) {
    const int at = entry + min(base + j, to) / WORLD;
    const float *place = places.of[j % WORLD], *ends = place + ends_at(at, head);
    next[j] = load_fresh((const float4 *)(place + values_at(at, head)) + column);
    max[j] = load_fresh(ends), sum[j] = load_fresh(ends + 1);
  }
#pragma unroll
  for (int j = 0; j < LOADS; j++)
    if (base + j >= from && base + j <= to) add(sums, next[j], max[j], sum[j]);
}

DEVICE void add(Sums &sums, float4 o, float max, float sum) {
  const MergeScales scales = merge_scales_of(sums.max, max);
  sums.max = scales.max;
  sums.sum = fmaf(sum, scales.next, sums.sum * scales.old);
  sums.o = make_float4(fmaf(o.x, scales.next, sums.o.x * scales.old), fmaf(o.y, scales.next, sums.o.y * scales.old),
                       fmaf(o.z, scales.next, sums.o.z * scales.old), fmaf(o.w, scales.next, sums.o.w * scales.old));
}
