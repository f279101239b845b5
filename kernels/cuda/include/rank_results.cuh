// What ranks that divide contexts know of a decode, in their places (meeting.cuh): for each partition of 256 keys and query head the weighted
// values, the largest score and the sum of the weights, as at the end of a partition in one GPU.
//
//   values  [ENTRIES, H, D] float32      entry b M + i: partition i of the rank, of sequence b of a launch
//   ends    [ENTRIES, H, 2] float32      maximum and sum
//
// A launch has at most SEQUENCES: the others take turns.
#pragma once
#include "attention.cuh"

constexpr int ENTRIES = PLACE / (H * (D + 2));
constexpr int SEQUENCES = ENTRIES / M;
static_assert(S == PARTITION && SEQUENCES > 0, "rank_results: a block is a partition of each rank, and PLACE has room for a sequence");

DEVICE s64 values_at(int entry, int head) { return ((s64)entry * H + head) * D; }
DEVICE s64 ends_at(int entry, int head) { return (s64)ENTRIES * H * D + ((s64)entry * H + head) * 2; }
