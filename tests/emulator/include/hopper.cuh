// The functions of kernels/cuda/include/hopper.cuh in plain C++, for the emulator; that file documents them.
//
// Not modelled: asynchrony. A copy is done by the thread that requests it, and a product at once; an access to their memory without having
// waited for the barrier is still reported as a race.
#pragma once
#include "gpu.cuh"

// A barrier's word: the parity of the phase in bit 63; from bit 48 the arrivals that a phase needs, from bit 32 those it still needs; below,
// the expected bytes that have not arrived, as a signed number.
DEVICE u64 emulated_end_phase(u64 word) {
  if ((word >> 32 & 0xFFFF) || (u32)word) return word;
  return (word ^ 1ull << 63) | (word >> 48 & 0x7FFF) << 32;
}
DEVICE void emulated_change(u64 *barrier, u32 arrivals, s64 bytes) {
  __threadfence_block();
  u64 current = atomicAdd(barrier, 0ull), before;
  do {
    before = current;
    const u64 changed = ((before >> 32) - arrivals) << 32 | (u32)((u32)before + (u32)bytes);
    current = atomicCAS(barrier, before, emulated_end_phase(changed));
  } while (current != before);
  __threadfence_block();
}

DEVICE void barrier_init(u64 *barrier, u32 arrivals) { *barrier = (u64)arrivals << 48 | (u64)arrivals << 32; }
DEVICE void barriers_ready() {}
DEVICE void copies_ready() {}
DEVICE void barrier_arrive(u64 *barrier) { emulated_change(barrier, 1, 0); }
DEVICE void barrier_arrive_expecting(u64 *barrier, u32 bytes) { emulated_change(barrier, 1, bytes); }
DEVICE void barrier_wait(u64 *barrier, u32 parity) {
  while (atomicAdd(barrier, 0ull) >> 63 == parity) __nanosleep(1);
  __threadfence_block();
}

DEVICE void copy_bulk(void *shared, const void *global, u32 bytes, u64 *barrier) {
  cuda_expect(shared, 16, true, "copy_bulk");
  cuda_expect(global, 16, false, "copy_bulk's source");
  for (u32 i = 0; i < bytes / 16; i++) ((uint4 *)shared)[i] = ((const uint4 *)global)[i];
  emulated_change(barrier, 0, -(s64)bytes);
}

template <int REGISTERS> DEVICE void more_registers() {}
template <int REGISTERS> DEVICE void fewer_registers() {}

DEVICE void warpgroup_begin() {}
DEVICE void warpgroup_end() {}

DEVICE u64 matrix_descriptor(const void *shared, u32 number_stride, u32 token_stride) {
  return (u64)shared | (u64)(number_stride >> 4) << 48 | (u64)(token_stride >> 4) << 56;
}

#define EMULATED_WARPGROUP_MMA(name, mma)                                                                                  \
  template <int TILES> DEVICE void name(float (&c)[TILES][4], const u32 (&a)[4], u64 b) {                                   \
    const unsigned char *first = (const unsigned char *)(b & 0xFFFFFFFFFFFFull) + threadIdx.x % 32 * 4;                    \
    for (int tile = 0; tile < TILES; tile++) {                                                                              \
      const unsigned char *at = first + (b >> 56) * 16 * tile;                                                              \
      mma(c[tile], a, *(const u32 *)at, *(const u32 *)(at + (b >> 48 & 255) * 16));                                         \
    }                                                                                                                       \
  }
EMULATED_WARPGROUP_MMA(warpgroup_mma_bf16, mma_bf16)
EMULATED_WARPGROUP_MMA(warpgroup_mma_f16, mma_f16)

// b as rows: number n of token k is in core matrix (k / 8, n / 8), eight numbers of a token side by side.
#define EMULATED_WARPGROUP_MMA_ROWS(name, mma)                                                                             \
  template <int TILES> DEVICE void name(float (&c)[TILES][4], const u32 (&a)[4], u64 b) {                                   \
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;                                                                \
    for (int tile = 0; tile < TILES; tile++) {                                                                              \
      u32 words[2];                                                                                                         \
      for (int half = 0; half < 2; half++) {                                                                                \
        const u16 *core = (const u16 *)((const unsigned char *)(b & 0xFFFFFFFFFFFFull) + (b >> 56) * 16 * tile + (b >> 48 & 255) * 16 * half); \
        words[half] = core[2 * t * 8 + g] | (u32)core[(2 * t + 1) * 8 + g] << 16;                                           \
      }                                                                                                                     \
      mma(c[tile], a, words[0], words[1]);                                                                                  \
    }                                                                                                                       \
  }
EMULATED_WARPGROUP_MMA_ROWS(warpgroup_mma_rows_bf16, mma_bf16)
EMULATED_WARPGROUP_MMA_ROWS(warpgroup_mma_rows_f16, mma_f16)
