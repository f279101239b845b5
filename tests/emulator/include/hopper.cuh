// What the functions of kernels/cuda/include/hopper.cuh mean, for the emulator; the file of that name says what they are for.
//
// Not modelled: that copies and products go on behind the thread's back. A copy is done by the thread that asks for it, and a product where
// it is asked for; who reads or writes their memory without having met the barrier is a race all the same.
#pragma once
#include "gpu.cuh"

// A barrier's word: parity of the phase in bit 63; arrivals a phase needs from bit 48, those it still needs from bit 32; below, bytes that
// are expected and have not come, as a signed number.
DEVICE u64 emulated_settled(u64 word) {
  if ((word >> 32 & 0xFFFF) || (u32)word) return word;
  return (word ^ 1ull << 63) | (word >> 48 & 0x7FFF) << 32;
}
DEVICE void emulated_change(u64 *barrier, u32 arrivals, s64 bytes) {
  __threadfence_block();
  u64 seen = atomicAdd(barrier, 0ull), before;
  do {
    before = seen;
    const u64 changed = ((before >> 32) - arrivals) << 32 | (u32)((u32)before + (u32)bytes);
    seen = atomicCAS(barrier, before, emulated_settled(changed));
  } while (seen != before);
  __threadfence_block();
}

DEVICE void barrier_init(u64 *barrier, u32 arrivals) { *barrier = (u64)arrivals << 48 | (u64)arrivals << 32; }
DEVICE void barriers_ready() {}
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

DEVICE u64 matrix_place(const void *shared, u32 numbers_apart, u32 tokens_apart) {
  return (u64)shared | (u64)(numbers_apart >> 4) << 48 | (u64)(tokens_apart >> 4) << 56;
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
