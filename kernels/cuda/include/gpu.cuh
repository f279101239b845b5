// All PTX instructions that kernels use beyond CUDA C (sm_80 and later), one small function for each.
//
// Kernels contain no PTX of their own and include no CUDA header, so they need nothing but a compiler. tests/emulator has a file of the
// same name that defines each of these functions in plain C++; kernels run there unchanged.
//
// Matrices of `mma_*` are spread over the 32 lanes of a warp as PTX defines it (m16n8k16 and m16n8k32, .row.col). With g = lane / 4 and
// t = lane % 4:
//
//   16-bit A [16, 16]   a[0] row g, columns 2t, 2t+1; a[1] row g+8, the same; a[2] row g, columns 2t+8, 2t+9; a[3] row g+8, the same
//   16-bit B [16, 8]    b0 rows 2t, 2t+1 of column g; b1 rows 2t+8, 2t+9
//   8-bit  A [16, 32]   a[0] row g, columns 4t..4t+3; a[1] row g+8, the same; a[2] row g, columns 4t+16..4t+19; a[3] row g+8, the same
//   8-bit  B [32, 8]    b0 rows 4t..4t+3 of column g; b1 rows 4t+16..4t+19
//   C [16, 8]           c[0], c[1] row g, columns 2t, 2t+1; c[2], c[3] row g+8, the same
//
// The lower half of a word holds the earlier number.
#pragma once

typedef signed char s8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long s64;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define ALL_LANES 0xFFFFFFFFu

// Shared memory whose size is given at launch, 128-byte aligned; one per kernel. Shared memory of a fixed size is `static __shared__`.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

// --- conversions: to nearest, ties to even

DEVICE u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE u32 pack_f16(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE float2 unpack_bf16(u32 pair) { return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)); }
DEVICE float f16_to_float(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
DEVICE float2 unpack_f16(u32 pair) { return make_float2(f16_to_float((u16)pair), f16_to_float((u16)(pair >> 16))); }
DEVICE float bf16_to_float(u16 half) { return __uint_as_float((u32)half << 16); }
DEVICE u16 float_to_bf16(float value) { return (u16)pack_bf16(value, 0.0f); }
DEVICE u16 float_to_f16(float value) { return (u16)pack_f16(value, 0.0f); }

// Products of the numbers of two pairs, rounded once; subnormal numbers are not flushed.
DEVICE u32 multiply_bf16(u32 a, u32 b) {
  u32 pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(0x80008000u));
  return pair;
}

// 2^x to within 2 units in the last place; 0 for -inf; subnormal inputs and results are 0.
DEVICE float fast_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// --- matrices: c += a b, accumulated in float32 or int32

DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_s8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = c + a b: for a c that many products start from and that would otherwise have to be copied.
DEVICE void mma_s8_from(int (&d)[4], const int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// d = c + a b for 16 columns: m16n8k16, of which a and b are a[0], a[1] and b0 of the instruction for 32.
DEVICE void mma_s8_half_from(int (&d)[4], const int (&c)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// Four matrices of 8 rows of 16 bytes from shared memory: lane l passes the address of row l % 8 of matrix l / 8, and gets from each matrix
// word t of row g (its 16-bit numbers 2t and 2t + 1), or, transposed, the numbers (2t, g) and (2t + 1, g). Addresses are 16-byte aligned.
DEVICE void load_matrices(u32 (&r)[4], const void *shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((u32)__cvta_generic_to_shared(shared_row))
               : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], const void *shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((u32)__cvta_generic_to_shared(shared_row))
               : "memory");
}

// --- asynchronous copies from global to shared memory: 16 bytes, aligned on both sides
//
// A thread's copies since its last `copy_commit` form a group; `copy_wait<N>` waits until at most N of its own groups are pending. What
// other threads have copied is visible after their wait and a barrier.

DEVICE void copy_16(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
// Writes zeros if not `valid`; `global` is then not read.
DEVICE void copy_16_or_zero(void *shared, const void *global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory"); }

// --- loads

// For data that is read once, by one thread (weights): bypasses the L1 cache.
DEVICE uint4 load_once(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE uint2 load_once(const uint2 *p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
DEVICE u32 load_once(const u32 *p) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
DEVICE u16 load_once(const u16 *p) {
  u16 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

// --- synchronization between thread blocks

// Adds `more` to `*counter` and returns its old value. What this thread block wrote before is visible to every thread block that arrives
// later. Call it in one thread, after a __syncthreads. The last block to arrive resets the counter to 0 for the next launch.
DEVICE u32 arrive(u32 *counter, u32 more = 1) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(more) : "memory");
  return before;
}

// --- memory of the host that several GPUs share

// What this thread wrote before, to any memory, is visible to all GPUs and the host before what it writes after.
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }
DEVICE void store_release(u32 *word, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}
DEVICE u32 load_acquire(const u32 *word) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// Reads what another GPU has written: from memory, past the caches of this one.
DEVICE float load_fresh(const float *p) {
  float v;
  asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DEVICE float4 load_fresh(const float4 *p) {
  float4 v;
  asm volatile("ld.volatile.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
// Between two looks at a word that another GPU will write.
DEVICE void pause() { asm volatile("nanosleep.u32 100;" : : : "memory"); }

// --- the kernels before and after this one in a step

// Waits until the kernel before this one has ended and what it wrote is visible. Every thread calls it once, before it returns, writes, or
// reads what any kernel of a step writes: only constants (weights) may be read earlier. A thread that did not wait could end before a kernel
// two places back has. Nothing before Hopper, where kernels of a step do not overlap.
DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// Lets the next kernel begin, once every block of threads has called this or has ended: near the end of a block's work. Called at the
// beginning it made steps up to 10% longer, for a reason that is not known (decision 75).
DEVICE void begin_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}
