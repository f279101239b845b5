// PTX instructions that only Hopper has (sm_90a): barriers in shared memory that count bytes, bulk copies, products of warpgroups.
// tests/emulator has a file of the same name that defines them in plain C++.
//
// A barrier is a word of shared memory with phases of parity 0, 1, 0, ...; a phase ends when the number of arrivals given to `barrier_init`
// and all expected bytes have arrived.
//
// A warpgroup is four consecutive warps, the first a multiple of four. In `warpgroup_mma_*`, c += a b with 64 rows of a and N tokens: every
// warp holds its sixteen rows of a and c as mma.m16n8k16 has them (gpu.cuh), c [N / 8] such tiles. b is in shared memory in core matrices
// of 8 tokens by 8 numbers, 128 bytes, token by token.
#pragma once
#include "gpu.cuh"

DEVICE u32 shared_address(const void *shared) { return (u32)__cvta_generic_to_shared(shared); }

// --- barriers

DEVICE void barrier_init(u64 *barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// In each thread that has copied (copy_wait, gpu.cuh), before a __syncthreads after which products read the copies.
DEVICE void copies_ready() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
// In the thread that initialized them: copies see them from here on, other threads after the next __syncthreads.
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" : : : "memory"); }
DEVICE void barrier_arrive(u64 *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(barrier)) : "memory");
}
// Arrives, and prolongs the phase until that many more bytes have been copied.
DEVICE void barrier_arrive_expecting(u64 *barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Waits until the phase of this parity is over. The phase before a barrier's first one, of parity 1, counts as over.
DEVICE void barrier_wait(u64 *barrier, u32 parity) {
  asm volatile("{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n@!over bra again;\n}"
               :
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
}

// --- copies: `bytes` and both addresses are multiples of 16; the barrier counts the bytes when they have arrived

DEVICE void copy_bulk(void *shared, const void *global, u32 bytes, u64 *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// --- registers of the warpgroup's threads: a multiple of 8

template <int REGISTERS> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS)); }
template <int REGISTERS> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS)); }

// --- products: `warpgroup_begin` after the last change of c or a; c and a may be accessed again after `warpgroup_end`

DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
DEVICE void warpgroup_end() { asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : : : "memory"); }

// The descriptor of b: its first core matrix, and the distances in bytes to the next 8 numbers and to the next 8 tokens. In
// `warpgroup_mma_rows_*` it is the numbers of a token that are columns of c, and the product sums over tokens: then the distances are those
// to the next 8 tokens and to the next 8 numbers.
DEVICE u64 matrix_descriptor(const void *shared, u32 number_stride, u32 token_stride) {
  return (u64)((shared_address(shared) & 0x3FFFF) >> 4) | (u64)(number_stride >> 4) << 16 | (u64)(token_stride >> 4) << 32;
}

// clang-format off
#define NUMBERED_8  "%0,%1,%2,%3,%4,%5,%6,%7"
#define NUMBERED_16 NUMBERED_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NUMBERED_32 NUMBERED_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NUMBERED_64 NUMBERED_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NUMBERED_96 NUMBERED_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define CHANGED_8(i)  "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]), "+f"(c[i + 1][0]), "+f"(c[i + 1][1]), "+f"(c[i + 1][2]), "+f"(c[i + 1][3])
#define CHANGED_16(i) CHANGED_8(i), CHANGED_8(i + 2)
#define CHANGED_32(i) CHANGED_16(i), CHANGED_16(i + 4)
#define CHANGED_64(i) CHANGED_32(i), CHANGED_32(i + 8)
#define CHANGED_96(i) CHANGED_64(i), CHANGED_32(i + 16)
// clang-format on

// `tokens` / 2 numbers of c in a lane, which the operands after them follow. `rows`: 1 if b is read as rows.
#define WARPGROUP_MMA_OF(name, type, tokens, numbers, a0, a1, a2, a3, b0, rows)                               \
  DEVICE void name(float (&c)[tokens / 8][4], const u32(&a)[4], u64 b) {                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32." type "." type " {" NUMBERED_##numbers \
                 "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b0 ", 1, 1, 1, " #rows ";"                    \
                 : CHANGED_##numbers(0)                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                       \
  }
#define WARPGROUP_MMAS_OF(name, rows_name, type)                   \
  WARPGROUP_MMA_OF(name, type, 64, 32, 32, 33, 34, 35, 36, 0)      \
  WARPGROUP_MMA_OF(name, type, 128, 64, 64, 65, 66, 67, 68, 0)     \
  WARPGROUP_MMA_OF(name, type, 192, 96, 96, 97, 98, 99, 100, 0)    \
  WARPGROUP_MMA_OF(rows_name, type, 64, 32, 32, 33, 34, 35, 36, 1) \
  WARPGROUP_MMA_OF(rows_name, type, 128, 64, 64, 65, 66, 67, 68, 1)

WARPGROUP_MMAS_OF(warpgroup_mma_bf16, warpgroup_mma_rows_bf16, "bf16")
WARPGROUP_MMAS_OF(warpgroup_mma_f16, warpgroup_mma_rows_f16, "f16")
