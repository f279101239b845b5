// A thread's scratch for attention of many rows of one sequence to one KV head: SPAN query positions, G query heads each.
#pragma once
#include "attention.h"
#include "thread_team.h"

#define SPAN (G >= 128 ? 1 : 128 / G)
#define MAX_ROWS (SPAN * G)
#define THREAD_FLOATS (256 * D + MAX_ROWS * (3 * D + 32))

struct area {                         // a thread's part of the scratch
  float *keys, *values;               // [D, TILE] and [TILE, D]
  query *q;                           // [MAX_ROWS, D]
  float *sums, *out;                  // [MAX_ROWS, D]
  struct query_scale *q_scale;        // [MAX_ROWS]
  float *weight;                      // [MAX_ROWS, 16]
  float *top, *out_top, *out_weight;  // [MAX_ROWS]; out, out_top and out_weight hold the merged partitions before the present one
};

static inline void area_of(struct area *area, float *scratch, int thread) {
  float *a = scratch + (long)thread * THREAD_FLOATS, *rows = a + 256 * D, *ends = rows + MAX_ROWS * 3 * D;
  area->keys = a, area->values = a + 128 * D;
  area->q = (query *)rows, area->q_scale = (struct query_scale *)(ends + MAX_ROWS * 19), area->sums = rows + MAX_ROWS * D,
  area->out = rows + MAX_ROWS * 2 * D;
  area->weight = ends, area->top = ends + MAX_ROWS * 16, area->out_top = ends + MAX_ROWS * 17, area->out_weight = ends + MAX_ROWS * 18;
}

// The first `count` rows of one KV head's queries q: H heads of each position.
static inline void prepare_queries(const struct area *area, const float *q, int count) {
  for (int r = 0; r < count; r++) prepare_query(area->q + r * D, area->q_scale + r, q + r / G * (long)(H * D) + r % G * D);
}
