// What attention_prefill does with the scores of a tile, and at the end of a tile, a partition and a section.
#pragma once
#include "prefill_work.cuh"

constexpr int SECTION_BYTES = D <= 128 ? 0 : 16 * WARPS * VALUES * 4;
constexpr int COLUMN_UNROLL = D <= 128 ? COLUMNS : 1;  // full where the sums must be registers
// Columns of `out` that are read before they are written: a read waits for the write before it. At D = 128 two would spill.
constexpr int AT_ONCE = D <= 64 ? 4 : D <= 128 ? 1 : 2;

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

// Scores become weights.
DEVICE void weigh(float (&s)[TILE / 8][4], RowState &state, int start, const WarpRows &rows) {
  cap_scores(s);
  if (start < first_visible(rows.high) || start + TILE > rows.low + 1) mask(s, start, rows.position);
  softmax(s, state);
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
    for (int first = 0; first < COLUMNS; first += AT_ONCE) {
      float2 *at = (float2 *)(row + first * 8 + column), old[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) old[i] = any && first + i < COLUMNS ? at[i * 4] : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < AT_ONCE && first + i < COLUMNS; i++) {
        const float x = fmaf(section.o(first + i, 2 * r), scales.next, old[i].x * scales.old);
        const float y = fmaf(section.o(first + i, 2 * r + 1), scales.next, old[i].y * scales.old);
        at[i * 4] = make_float2(x * inverse, y * inverse);
      }
    }
  }
}

// After the tile at `start`: the end of its partition and of its section, where it is the last of them.
DEVICE void end_tile(SectionState &section, RowState &state, float (&max)[2], float (&sum)[2], bool &any, const Work &work, float *out,
                     const float *head_sinks, int start, const WarpRows &rows) {
  const bool last = start + TILE > rows.high;
  if ((start + TILE) % PARTITION == 0 || last) merge_partition(section, state);
  if ((start + TILE) % SECTION == 0 || last) {
    merge_section(section, max, sum, any, work, out, head_sinks, last);
    reset_section(section);
    any = true;
  }
}
