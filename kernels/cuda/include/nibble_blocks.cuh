// What the headers of blocks of 32 weights with four bits each share. NIBBLES_AT, if a format defines it: the first of a block's last 16
// bytes, whose low nibbles are elements 0 to 15, high nibbles 16 to 31.
#pragma once
#include "step_weights.cuh"

#ifdef NIBBLES_AT
constexpr int BLOCK = 32, FILE_BLOCK_BYTES = NIBBLES_AT + 16, CHUNKS = 1;
constexpr int STEPS_AHEAD = 16;  // 4 KiB a warp
typedef uint2 Chunk;
DEVICE constexpr int last_step(int) { return 0; }
DEVICE constexpr int file_chunk(int) { return NIBBLES_AT; }
#endif
