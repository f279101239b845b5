// The machine's words: what a kernel needs of an NVIDIA GPU (sm_80 and later) beyond CUDA C itself, one small function for each.
//
// Kernels contain no PTX of their own and include no header of CUDA, so that a compiler is all they need. tests/emulator has a file of the
// same name that says in plain C++ what each of these functions means; kernels run there unchanged.
//
// Matrices of `mma_*` are spread over the 32 lanes of a warp as PTX has it (m16n8k16 and m16n8k32, .row.col). With g = lane / 4 and
// t = lane % 4:
//
//   16-bit A [16, 16]   a[0] row g, columns 2t, 2t+1; a[1] row g+8, the same; a[2] row g, columns 2t+8, 2t+9; a[3] row g+8, the same
//   16-bit B [16, 8]    b0 rows 2t, 2t+1 of column g; b1 rows 2t+8, 2t+9
//   8-bit  A [16, 32]   a[0] row g, columns 4t..4t+3; a[1] row g+8, the same; a[2] row g, columns 4t+16..4t+19; a[3] row g+8, the same
//   8-bit  B [32, 8]    b0 rows 4t..4t+3 of column g; b1 rows 4t+16..4t+19
//   C [16, 8]           c[0], c[1] row g, columns 2t, 2t+1; c[2], c[3] row g+8, the same
//
// The lower half of a word is the earlier number.
#pragma once

typedef signed char s8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long s64;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define ALL_LANES 0xFFFFFFFFu

// Shared memory whose size the launch gives, on a border of 128 bytes; one a kernel. Fixed shared memory is `static __shared__`.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

// --- numbers: to nearest, ties to even

DEVICE u32 pack_bf16(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
DEVICE u32 pack_f16(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
DEVICE float2 unpack_bf16(u32 both) { return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u)); }
DEVICE float f16_to_float(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
DEVICE float2 unpack_f16(u32 both) { return make_float2(f16_to_float((u16)both), f16_to_float((u16)(both >> 16))); }
DEVICE float bf16_to_float(u16 half) { return __uint_as_float((u32)half << 16); }
DEVICE u16 float_to_bf16(float value) { return (u16)pack_bf16(value, 0.0f); }
DEVICE u16 float_to_f16(float value) { return (u16)pack_f16(value, 0.0f); }

// 2^x to within 2 units in the last place, 0 of -inf; numbers too small to be normal count as 0.
DEVICE float fast_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// --- matrices: c += a b, accumulated in float32 or int32

DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_s8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = c + a b: for a c that many products begin with, and that would have to be copied otherwise.
DEVICE void mma_s8_from(int (&d)[4], const int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// Four matrices of 8 rows of 16 bytes out of shared memory: lane l gives the place of row l % 8 of matrix l / 8, and gets from each matrix
// the word t of row g (its 16-bit numbers 2t and 2t + 1), or, transposed, the numbers (2t, g) and (2t + 1, g). Places are 16-byte aligned.
DEVICE void load_matrices(u32 (&r)[4], const void *shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)__cvta_generic_to_shared(shared_row)) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], const void *shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)__cvta_generic_to_shared(shared_row)) : "memory");
}

// --- copies from global to shared memory that go on behind the thread's back. 16 bytes, aligned on both sides.
//
// A thread's copies since its last `copy_commit` are a group; `copy_wait<N>` waits until at most N of its own groups are on their way.
// What other threads have copied is there for all after their wait and a barrier.

DEVICE void copy_16(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
// Zeros where `there` is false; `global` is not read then.
DEVICE void copy_16_or_zero(void *shared, const void *global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               : : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory"); }

// --- loads

// Read once and by nobody else: past the first-level cache. For weights.
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

// --- blocks of threads that hand over to each other

// So many more at `*counter`, and how many were there before. Whatever this block of threads wrote before is seen by whoever counts after
// it: call it in one thread, behind a __syncthreads. The last to come puts the counter back to 0 for the next launch.
DEVICE u32 arrive(u32 *counter, u32 more = 1) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(more) : "memory");
  return before;
}
