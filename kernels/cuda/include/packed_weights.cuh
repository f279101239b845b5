// What packed formats share: blocks in tiles and in files, and four numbers of a matrix.
#pragma once
#include "step_weights.cuh"

#ifdef QUANTIZED
#if QUANTIZED
constexpr int STEPS_OF_BLOCK = BLOCK / 32;
constexpr int CHUNK_BYTES = 32 * sizeof(Chunk), BLOCK_BYTES = CHUNKS * CHUNK_BYTES, STEP_BYTES = BLOCK_BYTES / STEPS_OF_BLOCK;
constexpr int RECORD_BYTES = WORDS * 8 * sizeof(RecordWord);  // of a block of sixteen rows

static_assert(BLOCK % 32 == 0 && STEPS_OF_BLOCK <= 8 && STEPS_AHEAD % STEPS_OF_BLOCK == 0, "weights: a block is 1, 2, 4 or 8 steps");

// A lane's chunks of a block, and a record for its g, in shared or global memory.
struct ChunksAt {
  const u8 *bytes;
  __device__ __forceinline__ Chunk operator[](int i) const { return *(const Chunk *)(bytes + i * CHUNK_BYTES); }
};
struct RecordAt {
  const RecordWord *words;
  __device__ __forceinline__ u32 operator[](int i) const { return words[8 * i]; }
};

// Which lane, as t, has column `column` of the matrix, and four numbers from it on, a multiple of 4.
DEVICE int lane_with(int column);
template <class Chunks, class Record> DEVICE float4 four_numbers(const Chunks &chunk, const Record &record, int row, int column);

DEVICE float4 read_tile(const u8 *table, int rows, int width, int row, int column) {
  const s64 block = (s64)(row / 16) * (width / BLOCK) + column / BLOCK, blocks = (s64)((rows + 15) / 16) * (width / BLOCK);
  const int g = row % 8, t = lane_with(column);
  const u8 *record = table + blocks * BLOCK_BYTES + block * RECORD_BYTES;
  return four_numbers(ChunksAt{table + block * BLOCK_BYTES + (4 * g + t) * (int)sizeof(Chunk)}, RecordAt{(const RecordWord *)record + g},
                      row, column);
}

// A row's block in a file, as if it were both row g and row g + 8. Blocks begin at any byte.
struct FileBlock {
  const u8 *bytes;
  __device__ __forceinline__ u32 word(int at) const {
    const u8 *p = bytes + at;
    return p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
  }
};
// Bytes 4t..4t+3 of the run at `at`, and from its byte 16 on.
DEVICE void read_chunk(uint2 &chunk, FileBlock block, int at) { chunk.x = chunk.y = block.word(at); }
DEVICE void read_chunk(uint4 &chunk, FileBlock block, int at) {
  chunk.x = chunk.y = block.word(at);
  chunk.z = chunk.w = block.word(at + 16);
}
struct FileChunks {
  FileBlock block;
  int t;
  __device__ __forceinline__ Chunk operator[](int i) const {
    Chunk chunk;
    read_chunk(chunk, block, file_chunk(i) + 4 * t);
    return chunk;
  }
};
struct FileRecord {
  FileBlock block;
  __device__ __forceinline__ u32 operator[](int i) const {
    const u8 *p = block.bytes + file_word(i);
    if (file_word_bytes(i) == 1) return p[0] * 0x101u;
    if (file_word_bytes(i) == 2) return (p[0] | (u32)p[1] << 8) * 0x10001u;
    return block.word(file_word(i));
  }
};
DEVICE float4 read_row(const u8 *table, int width, int row, int column) {
  const FileBlock block = {table + ((s64)row * (width / BLOCK) + column / BLOCK) * FILE_BLOCK_BYTES};
  return four_numbers(FileChunks{block, lane_with(column)}, FileRecord{block}, row, column);
}
#if FLOAT_QUANTS
template <class Chunks, class Record> DEVICE float4 four_numbers(const Chunks &chunk, const Record &record, int row, int column) {
  const bool upper = row % 16 / 8;
  const float2 scales = row_scales(record);
  const float scale = upper ? scales.y : scales.x;
  const float4 v = four_values(chunk, upper, column);
  return make_float4(scale * v.x, scale * v.y, scale * v.z, scale * v.w);
}
#endif
#endif
#endif
