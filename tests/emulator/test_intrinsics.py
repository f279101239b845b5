"""Every CUDA intrinsic of the emulator gives what numpy gives."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate_source
from tests.emulator.running import run

LANES = np.arange(32)
WORDS = np.array([0, 1, 2, 3, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678] * 4, np.uint32) + LANES.astype(np.uint32) * np.uint32(
    0x01010101
)


def lanes(expression: str, x: np.ndarray, out: type = np.uint32, block: int = 32, **options: int) -> np.ndarray:
    """What each thread gets for `expression` of its x and its number t."""
    names = {np.uint32: "u32", np.int32: "int", np.float32: "float", np.uint64: "u64", np.int64: "s64", np.uint16: "u16"}
    y = np.zeros(len(x), out)
    kernel = f"{names[out]} *out, const {names[x.dtype.type]} *in) {{ int t = threadIdx.x; auto x = in[t]; out[t] = {expression}; }}"
    run(kernel, y, x, block=block, **options)
    return y


@pytest.mark.parametrize(
    ("word", "source"),
    [
        ("__shfl_sync(ALL_LANES, x, 5)", np.full(32, 5)),
        ("__shfl_sync(ALL_LANES, x, t + 3)", (LANES + 3) % 32),
        ("__shfl_sync(ALL_LANES, x, 2, 8)", LANES // 8 * 8 + 2),
        ("__shfl_up_sync(ALL_LANES, x, 3)", np.where(LANES >= 3, LANES - 3, LANES)),
        ("__shfl_up_sync(ALL_LANES, x, 1, 4)", np.where(LANES % 4 >= 1, LANES - 1, LANES)),
        ("__shfl_down_sync(ALL_LANES, x, 7)", np.where(LANES + 7 < 32, LANES + 7, LANES)),
        ("__shfl_down_sync(ALL_LANES, x, 2, 16)", np.where(LANES % 16 + 2 < 16, LANES + 2, LANES)),
        ("__shfl_xor_sync(ALL_LANES, x, 9)", LANES ^ 9),
        ("__shfl_xor_sync(ALL_LANES, x, 8, 8)", np.where((LANES ^ 8) < LANES // 8 * 8 + 8, LANES ^ 8, LANES)),
    ],
)
@pytest.mark.parametrize("kind", [np.uint32, np.int32, np.float32, np.uint64])
def test_shuffles(word: str, source: np.ndarray, kind: type) -> None:
    x = (LANES * 3 + 1).astype(kind) * kind(1 << 33 if kind is np.uint64 else 1)
    assert np.array_equal(lanes(word, x, kind, seed=3), x[source])


def test_votes_and_matches() -> None:
    x = (LANES % 5).astype(np.uint32)
    odd = np.uint32(sum(1 << i for i in LANES if x[i] & 1))
    assert (lanes("__ballot_sync(ALL_LANES, x & 1)", x) == odd).all()
    assert (lanes("__any_sync(ALL_LANES, x == 4) * 2 + __any_sync(ALL_LANES, x == 5)", x) == 2).all()
    assert (lanes("__all_sync(ALL_LANES, x < 5) * 2 + __all_sync(ALL_LANES, x < 4)", x) == 2).all()
    match = [sum(1 << int(i) for i in LANES[x == x[lane]]) for lane in LANES]
    assert np.array_equal(lanes("__match_any_sync(ALL_LANES, x)", x), np.array(match, np.uint32))
    # half a warp each, at the same time
    halves = lanes("t < 16 ? __ballot_sync(0xFFFFu, x & 1) : __ballot_sync(0xFFFF0000u, x & 1)", x)
    assert np.array_equal(halves, np.where(LANES < 16, odd & 0xFFFF, odd & 0xFFFF0000))


def test_reductions() -> None:
    signed = WORDS.view(np.int32)
    for name, ufunc in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
        assert (lanes(f"__reduce_{name}_sync(ALL_LANES, x)", WORDS) == ufunc.reduce(WORDS, dtype=np.uint32)).all()
        assert (lanes(f"__reduce_{name}_sync(ALL_LANES, x)", signed, np.int32) == ufunc.reduce(signed, dtype=np.int32)).all()
    for name, ufunc in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        assert (lanes(f"__reduce_{name}_sync(ALL_LANES, x)", WORDS) == ufunc.reduce(WORDS)).all()


def test_block_votes() -> None:
    x = np.arange(70, dtype=np.uint32)
    assert (lanes("__syncthreads_count(x % 3 == 0)", x, block=70) == 24).all()
    assert (lanes("__syncthreads_or(x == 69) * 2 + __syncthreads_or(x == 70)", x, block=70) == 2).all()
    assert (lanes("__syncthreads_and(x < 70) * 2 + __syncthreads_and(x < 69)", x, block=70) == 2).all()


def test_bits() -> None:
    x, signed = WORDS, WORDS.view(np.int32)
    text = [f"{v:032b}" for v in x]
    assert lanes("__popc(x)", x).tolist() == [t.count("1") for t in text]
    assert lanes("__clz(x)", x).tolist() == [len(t) - len(t.lstrip("0")) for t in text]
    assert lanes("__ffs(x)", x).tolist() == [len(t) - len(t.rstrip("0")) + 1 if "1" in t else 0 for t in text]
    assert lanes("__brev(x)", x).tolist() == [int(t[::-1], 2) for t in text]
    wide = x.astype(np.uint64)
    assert np.array_equal(lanes("__umulhi(x, 0x9E3779B9u)", x), (wide * 0x9E3779B9 >> 32).astype(np.uint32))
    assert np.array_equal(lanes("__mulhi(x, -77)", signed, np.int32), (signed.astype(np.int64) * -77 >> 32).astype(np.int32))
    both = wide << 32 | np.uint64(0xCAFEBABE)
    assert np.array_equal(lanes("__funnelshift_l(0xCAFEBABEu, x, 37)", x), (both << 5 >> 32).astype(np.uint32))
    assert np.array_equal(lanes("__funnelshift_r(0xCAFEBABEu, x, 7)", x), (both >> 7).astype(np.uint32))
    assert np.array_equal(lanes("__byte_perm(x, 0x80FF0102u, 0xF741)", x), _permuted(x))
    assert np.array_equal(lanes("__float_as_uint(__uint_as_float(x))", x), x)


def _permuted(x: np.ndarray) -> np.ndarray:
    y = np.uint32(0x80FF0102)
    return (x >> 8 & 255) | (y & 255) << 8 | (y >> 24) << 16 | np.uint32(0xFF000000)


def test_dot_products_of_bytes() -> None:
    x = WORDS
    a, b = x.view(np.int8).reshape(-1, 4).astype(int), np.array([0x80, 0xFF, 0x7F, 3], np.uint8).view(np.int8).astype(int)
    assert np.array_equal(lanes("__dp4a((int)x, 0x037FFF80, 5)", x, np.int32), a @ b + 5)
    assert np.array_equal(lanes("__dp4a(x, 0x037FFF80u, 5u)", x), x.view(np.uint8).reshape(-1, 4).astype(int) @ (b & 255) + 5)
    halves = x.view(np.int16).reshape(-1, 2).astype(int)
    assert np.array_equal(lanes("__dp2a_lo((int)x, 0x037FFF80, 5)", x, np.int32), halves @ b[:2] + 5)


def test_conversions_to_whole_numbers() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, np.nan, np.inf, 1e-9, -7.4, 7.6, 2147483520.0, 5e9, -1.0, 100.0] * 2, np.float32)
    near = np.clip(np.where(np.isnan(x), 0, np.rint(x.astype(np.float64))), -(2**31), 2**31 - 1).astype(np.int64)
    assert np.array_equal(lanes("__float2int_rn(x)", x, np.int32), near.astype(np.int32))
    down = np.clip(np.where(np.isnan(x), 0, np.trunc(x.astype(np.float64))), 0, 2**32 - 1).astype(np.int64)
    assert np.array_equal(lanes("__float2uint_rz(x)", x, np.uint32), down.astype(np.uint32))


def test_only_fmaf_fuses() -> None:
    x = np.float32(1) + LANES.astype(np.float32) * np.float32(2**-12)
    squares = x.astype(np.float64) ** 2
    assert np.array_equal(lanes("x * x - 1.0f", x, np.float32), x * x - np.float32(1))
    assert np.array_equal(lanes("fmaf(x, x, -1.0f)", x, np.float32), (squares - 1).astype(np.float32))


def test_mathematics() -> None:
    x = np.linspace(0.1, 5, 32, dtype=np.float32)
    for word, function in (
        ("expf", np.exp),
        ("exp2f", np.exp2),
        ("logf", np.log),
        ("log2f", np.log2),
        ("sinf", np.sin),
        ("tanhf", np.tanh),
    ):
        assert np.allclose(lanes(f"{word}(x)", x, np.float32), function(x.astype(np.float64)), rtol=1e-6, atol=1e-6)
    assert np.array_equal(lanes("1.0f / sqrtf(x)", x, np.float32), np.float32(1) / np.sqrt(x))
    assert np.allclose(lanes("rsqrtf(x) * __fdividef(x, 2.0f)", x, np.float32), np.sqrt(x) / 2)
    assert np.isinf(lanes("INFINITY", x, np.float32)).all()


FLOATS = np.concatenate([
    np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1, 0x00800000, 0x7F7FFFFF, 0x477FEFFF, 0x477FF000, 0x33000000,
              0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x387FFFFF, 0x38800000, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000],
             np.uint32),
    np.random.default_rng(1).integers(0, 2**32, 4000, np.uint32),
    np.random.default_rng(2).integers(0x32000000, 0x48000000, 1978, np.uint32),
])  # fmt: skip


def test_16_bit_floats_round_to_nearest_even() -> None:
    x = FLOATS.view(np.float32)
    y = np.zeros(len(x), np.uint32)
    text = "u32 *out, const float *in) {{ int t = blockIdx.x * blockDim.x + threadIdx.x; out[t] = {}(in[t], 1.0f); }}"
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    run(text.format("pack_f16"), y, x, grid=len(x) // 1000, block=1000)
    assert (y >> 16 == 0x3C00).all()
    got = (y & 0xFFFF).astype(np.uint16).view(np.float16)
    assert np.array_equal(got, half, equal_nan=True) and np.array_equal(np.signbit(got)[~np.isnan(x)], np.signbit(half)[~np.isnan(x)])
    run(text.format("pack_bf16"), y, x, grid=len(x) // 1000, block=1000)
    number, bits = ~np.isnan(x), FLOATS.astype(np.uint64)
    want = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    assert np.array_equal((y & 0xFFFF)[number], want[number]) and np.isnan(((y & 0xFFFF) << 16).view(np.float32)[~number]).all()


def test_16_bit_floats_widen() -> None:
    x = np.arange(1 << 16, dtype=np.uint16)
    y, z = np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.float32)
    run(
        "float *a, float *b, const u16 *in) { int t = blockIdx.x * blockDim.x + threadIdx.x; "
        "a[t] = unpack_f16(in[t] << 16).y; b[t] = bf16_to_float(in[t]); }",
        y, z, x, outs=2, grid=64, block=1024,
    )  # fmt: skip
    assert np.array_equal(y, x.view(np.float16).astype(np.float32), equal_nan=True)
    assert np.array_equal(z, (x.astype(np.uint32) << 16).view(np.float32), equal_nan=True)


def test_fast_exp2_knows_no_subnormals() -> None:
    x = np.array([0, 1, -1, 0.5, -126, -126.5, -149, -np.inf, np.inf, np.nan, 127.5, 128, 1e-40, -3.25, 10, -10] * 2, np.float32)
    with np.errstate(over="ignore"):
        want = np.exp2(x)
    want[want < np.finfo(np.float32).tiny] = 0
    assert np.allclose(lanes("fast_exp2(x)", x, np.float32), want, rtol=3e-7, atol=0, equal_nan=True)


LANE_TEXT = "int l = threadIdx.x, g = l / 4, t = l % 4;"


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_matrices_of_16_bit_floats(name: str) -> None:
    rng = np.random.default_rng(7)
    a, b, c = rng.normal(size=(16, 16)), rng.normal(size=(16, 8)), rng.normal(size=(16, 8)).astype(np.float32)
    bits = (
        (lambda x: x.astype(np.float16).view(np.uint16))
        if name == "f16"
        else (lambda x: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    )
    wide = (lambda x: x.view(np.float16).astype(np.float32)) if name == "f16" else (lambda x: (x.astype(np.uint32) << 16).view(np.float32))
    a, b = np.ascontiguousarray(bits(a)), np.ascontiguousarray(bits(b))
    out = c.copy()
    run(
        f"""float *c, const u16 *a, const u16 *b) {{ {LANE_TEXT}
        auto two = [](u16 x, u16 y) {{ return (u32)x | (u32)y << 16; }};
        u32 fa[4] = {{two(a[g * 16 + 2 * t], a[g * 16 + 2 * t + 1]), two(a[(g + 8) * 16 + 2 * t], a[(g + 8) * 16 + 2 * t + 1]),
                     two(a[g * 16 + 2 * t + 8], a[g * 16 + 2 * t + 9]), two(a[(g + 8) * 16 + 2 * t + 8], a[(g + 8) * 16 + 2 * t + 9])}};
        float fc[4] = {{c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]}};
        mma_{name}(fc, fa, two(b[2 * t * 8 + g], b[(2 * t + 1) * 8 + g]), two(b[(2 * t + 8) * 8 + g], b[(2 * t + 9) * 8 + g]));
        c[g * 8 + 2 * t] = fc[0], c[g * 8 + 2 * t + 1] = fc[1], c[(g + 8) * 8 + 2 * t] = fc[2], c[(g + 8) * 8 + 2 * t + 1] = fc[3]; }}""",
        out, a, b,
    )  # fmt: skip
    want = c
    for k in range(16):  # float32, k ascending
        want = want + wide(a)[:, k : k + 1] * wide(b)[k : k + 1]
    assert np.array_equal(out, want)


@pytest.mark.parametrize("columns", [16, 32])
def test_matrices_of_bytes(columns: int) -> None:
    """Of 16 columns with a sum that the products start from."""
    product = "mma_s8(fc, fa, fb[0], fb[1])" if columns == 32 else "int d[4]; mma_s8_half_from(d, fc, fa[0], fa[1], fb[0])"
    rng = np.random.default_rng(8)
    a, b = rng.integers(-128, 128, (16, 32), np.int8), rng.integers(-128, 128, (8, 32), np.int8)  # b: by column
    c = rng.integers(-(1 << 20), 1 << 20, (16, 8), np.int32)
    out = c.copy()
    run(
        f"""int *c, const u32 *a, const u32 *b) {{ {LANE_TEXT}
        u32 fa[4] = {{a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]}};
        int fc[4] = {{c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]}};
        u32 fb[2] = {{b[g * 8 + t], b[g * 8 + t + 4]}};
        {product}; int *r = {"fc" if columns == 32 else "d"};
        c[g * 8 + 2 * t] = r[0], c[g * 8 + 2 * t + 1] = r[1], c[(g + 8) * 8 + 2 * t] = r[2], c[(g + 8) * 8 + 2 * t + 1] = r[3]; }}""",
        out, a, b,
    )  # fmt: skip
    assert np.array_equal(out, c + a[:, :columns].astype(np.int32) @ b[:, :columns].T.astype(np.int32))


@pytest.mark.parametrize("transposed", [False, True])
def test_loading_of_matrices(transposed: bool) -> None:
    x = np.arange(32 * 8, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros((32, 4), np.uint32)
    run(
        f"""uint4 *out, const uint4 *in) {{ DYNAMIC_SHARED(all); uint4 *rows = (uint4 *)all; int l = threadIdx.x;
        rows[3 * l] = in[l]; __syncwarp(); u32 r[4]; load_matrices{"_transposed" if transposed else ""}(r, rows + 3 * l);
        out[l] = make_uint4(r[0], r[1], r[2], r[3]); }}""",
        out, x, shared=32 * 48,
    )  # fmt: skip
    matrices = x.transpose(0, 2, 1) if transposed else x
    want = np.ascontiguousarray(matrices).view(np.uint32).reshape(4, 32).T
    assert np.array_equal(out, want)


def test_copies_arrive() -> None:
    x = np.arange(8 * 32 * 4, dtype=np.uint32)
    text = """uint4 *out, const uint4 *in) { static __shared__ uint4 ring[3][32]; int t = threadIdx.x;
        for (int i = 0; i < 2; i++) { copy_16(&ring[i][t], in + i * 32 + t); copy_commit(); }
        for (int i = 0; i < 8; i++) {
          if (i + 2 < 8) copy_16_or_zero(&ring[(i + 2) % 3][t], in + (i + 2) * 32 + t, i != 3);
          copy_commit(); copy_wait<2>(); __syncwarp();
          out[i * 32 + t] = ring[i % 3][31 - t]; __syncwarp();
        } }"""
    want = x.reshape(8, 32, 4)[:, ::-1].copy()
    want[5] = 0
    for seed in range(4):
        out = np.zeros_like(x)
        run(text, out, x, seed=seed)
        assert np.array_equal(out.reshape(8, 32, 4), want)


def test_atomics() -> None:
    start = np.array([5, 1000, 0, 7, 0xFF, 0xF0F0F0F0, 0, 3], np.uint32)
    out = start.copy()
    olds = np.zeros(96, np.uint32)
    run(
        """u32 *c, u32 *olds) { u32 t = threadIdx.x; olds[t] = atomicAdd(c, 1u); atomicMin(c + 1, t + 3); atomicMax(c + 2, t);
        atomicOr(c + 3, 1u << t % 20); atomicAnd(c + 4, ~(t % 4)); atomicXor(c + 5, 1u << t % 32); atomicInc(c + 6, 9u);
        if (t == 3) atomicCAS(c + 7, 3u, 99u); }""",
        out, olds, outs=2, block=96, seed=5,
    )  # fmt: skip
    assert out.tolist() == [101, 3, 95, 7 | (1 << 20) - 1, 0xFC, 0xF0F0F0F0 ^ 0xFFFFFFFF, 6, 99]
    assert sorted(olds) == list(range(5, 101)) and olds.tolist() != sorted(olds)
    signed, wide, real = np.array([-5, -5], np.int32), np.array([1 << 40], np.uint64), np.zeros(1, np.float32)
    run(
        """int *s, u64 *w, float *r) { int t = threadIdx.x; atomicMin(s, 3 - t); atomicMax(s + 1, 3 - t);
        atomicMax(w, (u64)t << 50); atomicAdd(r, 0.5f); }""",
        signed, wide, real, outs=3,
    )  # fmt: skip
    assert signed.tolist() == [-28, 3] and wide[0] == 31 << 50 and real[0] == 16


def test_places_and_extents() -> None:
    out = np.zeros((3, 2, 4, 2, 3, 2), np.uint32)  # grid z y x, block z y x
    text = """u32 *out) { u32 b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        u32 t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; dim3 d = blockDim;
        out[b * d.x * d.y * d.z + t] = blockIdx.z << 20 | blockIdx.y << 16 | blockIdx.x << 12
          | threadIdx.z << 8 | threadIdx.y << 4 | threadIdx.x; }"""
    from tests.emulator.emulate import Memory

    emulate_source(
        f'typedef unsigned u32;\nextern "C" __global__ void k({text}', "k", (4, 2, 3), (2, 3, 2), 0, [out.ctypes.data],
        [Memory(out.ctypes.data, out.nbytes, "out")], seed=2,
    )  # fmt: skip
    z = np.indices(out.shape)
    assert np.array_equal(out, z[0] << 20 | z[1] << 16 | z[2] << 12 | z[3] << 8 | z[4] << 4 | z[5])


def test_16_bit_classes_of_generated_code() -> None:
    """As tinygrad's CUDARenderer writes: vectors of half, bit casts, operators, scalars as arguments."""
    text = """#define INFINITY (__int_as_float(0x7f800000))
#define NAN (__int_as_float(0x7fffffff))
template <class T, class F> __device__ __forceinline__ T tg_bitcast(F v) { union U { F f; T t; }; U u; u.f = v; return u.t; }
#include <cuda_fp16.h>
#include <cuda_bf16.h>
struct __align__(8) half4 { half x, y, z, w; };
__device__ half4 make_half4(half x, half y, half z, half w) { half4 r={x, y, z, w}; return r; }
extern "C" __global__ void __launch_bounds__(16) r_4(half* data0, nv_bfloat16* data1, const half* data2, const int n) {
  __shared__ __align__(16) half buf0[64];
  int lidx0 = threadIdx.x; /* 16 */
  half4 val0 = (*((half4*)((data2+(lidx0<<2)))));
  *((half4*)((buf0+(lidx0<<2)))) = make_half4((val0.x*val0.x),hsqrt(val0.y),
    ((half)(((float)(val0.z))+2.0f)),((val0.w<((half)(0.0f)))?((half)(n)):val0.w));
  __syncthreads();
  half val1 = (*(buf0+((lidx0<<2)^4)));
  *(data0+lidx0) = (val1+(*(buf0+((lidx0<<2)+1))));
  *(data1+lidx0) = ((nv_bfloat16)(tg_bitcast<unsigned short>((half)(val0.w))));
  *(data1+16+lidx0) = ((nv_bfloat16)(n*lidx0)) + hexp2(((nv_bfloat16)(1.0f)));
}"""
    from tests.emulator.emulate import Memory

    x = np.random.default_rng(3).uniform(0, 2, 64).astype(np.float16)
    y, z = np.zeros(16, np.float16), np.zeros(32, np.uint16)
    memory = [Memory(a.ctypes.data, a.nbytes, name) for a, name in ((y, "y"), (z, "z"), (x, "x"))]
    emulate_source(text, "r_4", (1, 1, 1), (16, 1, 1), 0, [*(m.address for m in memory), 3], memory)
    rows = x.reshape(16, 4)
    squares = rows[:, 0] * rows[:, 0]
    assert np.array_equal(y, squares[np.arange(16) ^ 1] + np.sqrt(rows[:, 1]))
    last = (z[16:].astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(last, np.arange(16) * 3 + 2)
