// Eight scales and eight minimums of six bits in twelve bytes, as Q4_K and Q5_K store them.
#pragma once
#include "gpu.h"

struct RunPair {  // scales and minimums of two runs of 32 columns
  float scale[2], minimum[2];
};
// Runs 2 g and 2 g + 1 of a block: its first 16 bytes are d, dmin and the twelve bytes.
INLINE RunPair run_pair_of(uint4 head, int g) {
  const int down = 16 * (g & 1);
  const uint first = head.y >> down, second = head.z >> down, rest = head.w >> down;
  const uint scales = g < 2 ? first & 0x3F3Fu : (rest & 0x0F0Fu) | (first & 0xC0C0u) >> 2;
  const uint minimums = g < 2 ? second & 0x3F3Fu : (rest >> 4 & 0x0F0Fu) | (second & 0xC0C0u) >> 2;
  const float2 d = f16_pair_to_float(head.x);
  RunPair runs;
  runs.scale[0] = d.x * (float)(scales & 0xFFu), runs.scale[1] = d.x * (float)(scales >> 8 & 0xFFu);
  runs.minimum[0] = d.y * (float)(minimums & 0xFFu), runs.minimum[1] = d.y * (float)(minimums >> 8 & 0xFFu);
  return runs;
}
