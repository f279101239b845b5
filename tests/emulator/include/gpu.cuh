// The functions of kernels/cuda/include/gpu.cuh in plain C++, for the emulator; that file documents them.
#pragma once

typedef signed char s8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long s64;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__ __attribute__((unused))
#define ALL_LANES 0xFFFFFFFFu
#ifdef __APPLE__
#define DYNAMIC_SHARED(name) extern unsigned char name[] __asm__("_gpu_dynamic") __attribute__((aligned(128)))
#else
#define DYNAMIC_SHARED(name) extern unsigned char name[] __asm__("gpu_dynamic") __attribute__((aligned(128)))
#endif

// --- conversions

DEVICE u32 pack_bf16(float low, float high) { return cuda_to_bf16(low) | (u32)cuda_to_bf16(high) << 16; }
DEVICE u32 pack_f16(float low, float high) { return cuda_to_f16(low) | (u32)cuda_to_f16(high) << 16; }
DEVICE float2 unpack_bf16(u32 pair) { return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)); }
DEVICE float f16_to_float(u16 half) { return cuda_from_f16(half); }
DEVICE float2 unpack_f16(u32 pair) { return make_float2(f16_to_float((u16)pair), f16_to_float((u16)(pair >> 16))); }
DEVICE float bf16_to_float(u16 half) { return __uint_as_float((u32)half << 16); }
DEVICE u16 float_to_bf16(float value) { return cuda_to_bf16(value); }
DEVICE u16 float_to_f16(float value) { return cuda_to_f16(value); }
DEVICE u32 multiply_bf16(u32 a, u32 b) {
  const float2 x = unpack_bf16(a), y = unpack_bf16(b);
  return pack_bf16(x.x * y.x, x.y * y.y);
}
DEVICE float fast_exp2(float x) { return cuda_exp2_flushed(x); }

// --- matrices

#define EMULATED_MMA(name, type, vector, product, flag)                                                               \
  DEVICE void name(type(&c)[4], const u32(&a)[4], u32 b0, u32 b1, EMULATED_LINE) {                                    \
    vector sum = product(flag, (vector){c[0], c[1], c[2], c[3]}, (EmulatedU4){a[0], a[1], a[2], a[3]}, b0, b1, line); \
    c[0] = sum.x, c[1] = sum.y, c[2] = sum.z, c[3] = sum.w;                                                           \
  }
EMULATED_MMA(mma_bf16, float, EmulatedF4, cuda_mma_16, true)
EMULATED_MMA(mma_f16, float, EmulatedF4, cuda_mma_16, false)
EMULATED_MMA(mma_s8, int, EmulatedS4, cuda_mma_8, false)

DEVICE void mma_s8_from(int (&d)[4], const int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATED_LINE) {
  for (int i = 0; i < 4; i++) d[i] = c[i];
  mma_s8(d, a, b0, b1, line);
}

DEVICE void mma_s8_half_from(int (&d)[4], const int (&c)[4], u32 a0, u32 a1, u32 b, EMULATED_LINE) {
  const u32 a[4] = {a0, a1, 0, 0};
  mma_s8_from(d, c, a, b, 0, line);
}

DEVICE void load_matrices(u32 (&r)[4], const void *shared_row, EMULATED_LINE) {
  EmulatedU4 v = cuda_load_matrices(false, shared_row, line);
  r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
}
DEVICE void load_matrices_transposed(u32 (&r)[4], const void *shared_row, EMULATED_LINE) {
  EmulatedU4 v = cuda_load_matrices(true, shared_row, line);
  r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
}

// --- copies

DEVICE void copy_16(void *shared, const void *global) { cuda_copy(shared, global); }
DEVICE void copy_16_or_zero(void *shared, const void *global, bool valid) { cuda_copy(shared, valid ? global : 0); }
DEVICE void copy_commit() { cuda_copy_commit(); }
template <int N> DEVICE void copy_wait() { cuda_copy_wait(N); }

// --- loads

DEVICE uint4 load_once(const uint4 *p) {
  cuda_expect(p, 16, false, "load_once");
  return *p;
}
DEVICE uint2 load_once(const uint2 *p) {
  cuda_expect(p, 8, false, "load_once");
  return *p;
}
DEVICE u32 load_once(const u32 *p) {
  cuda_expect(p, 4, false, "load_once");
  return *p;
}
DEVICE u16 load_once(const u16 *p) {
  cuda_expect(p, 2, false, "load_once");
  return *p;
}

// --- synchronization between thread blocks

DEVICE u32 arrive(u32 *counter, u32 more = 1) {
  __threadfence();
  u32 before = atomicAdd(counter, more);
  __threadfence();
  return before;
}

// --- memory of the host that several GPUs share

DEVICE void fence_system() { __threadfence(); }
DEVICE void store_release(u32 *word, u32 value) { cuda_store_word(word, value); }
DEVICE u32 load_acquire(const u32 *word) { return cuda_load_word(word); }
DEVICE float load_fresh(const float *p) { return *(const volatile float *)p; }
DEVICE float4 load_fresh(const float4 *p) { return *p; }
DEVICE void pause() { cuda_pause(); }

// --- the kernels before and after this one in a step

DEVICE void await_previous() { cuda_await_previous(); }
DEVICE void begin_next() {}
