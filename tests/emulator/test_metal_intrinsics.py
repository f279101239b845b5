"""Metal's functions in the emulator against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import Arrays, emulate_source
from tests.emulator.metal import check_record, signatures
from tests.emulator.metal_snippets import run
from tinyvllm.backends.kernel import Kernel

LANES = np.arange(32)
NAMES = {np.uint32: "uint", np.int32: "int", np.float32: "float", np.float16: "half", np.uint16: "ushort", np.uint64: "ulong"}


def evaluate(expression: str, x: np.ndarray, out: type | None = None, **options: int) -> np.ndarray:
    """The value of `expression` in each thread, of its x and its index."""
    out = out or x.dtype.type
    y = np.zeros(len(x), out)
    text = f"device {NAMES[out]} *out, device const {NAMES[x.dtype.type]} *in) {{ auto x = in[index]; out[index] = {expression}; }}"
    run(text, y, x, block=len(x), **options)
    return y


def halves(seed: int = 0, count: int = 1024) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, count).astype(np.uint16)


def close(got: np.ndarray, expected: np.ndarray, rtol: float = 1e-6) -> None:
    assert np.allclose(got, expected, rtol=rtol, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize(
    ("call", "source"),
    [
        ("simd_shuffle(x, 5)", np.full(32, 5)),
        ("simd_shuffle(x, ushort((lane + 3) % 32))", (LANES + 3) % 32),
        ("simd_shuffle_xor(x, 9)", LANES ^ 9),
        ("simd_shuffle_up(x, 3)", np.where(LANES >= 3, LANES - 3, LANES)),
        ("simd_shuffle_down(x, 7)", np.where(LANES + 7 < 32, LANES + 7, LANES)),
        ("simd_shuffle_rotate_up(x, 3)", (LANES - 3) % 32),
        ("simd_shuffle_rotate_down(x, 3)", (LANES + 3) % 32),
        ("simd_shuffle_and_fill_up(x, in[0], 3)", np.maximum(LANES - 3, 0)),
        ("simd_shuffle_and_fill_down(x, in[31], 3)", np.minimum(LANES + 3, 31)),
        ("simd_broadcast(x, 30)", np.full(32, 30)),
        ("simd_broadcast_first(x)", np.full(32, 0)),
        ("quad_broadcast(x, 2)", LANES // 4 * 4 + 2),
        ("quad_shuffle_xor(x, 1)", LANES ^ 1),
    ],
)
@pytest.mark.parametrize("kind", [np.uint32, np.float32, np.float16])
def test_shuffles(call: str, source: np.ndarray, kind: type) -> None:
    x = (LANES * 3 + 1).astype(kind)
    assert np.array_equal(evaluate(call, x, seed=3), x[source])


def test_shuffles_of_vectors() -> None:
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    run("device float4 *out, device const float4 *in) { out[index] = simd_shuffle_xor(in[index], 4).wzyx; }", y, x)
    assert np.array_equal(y.reshape(32, 4), x.reshape(32, 4)[LANES ^ 4, ::-1])


def test_votes() -> None:
    x = (LANES % 5).astype(np.uint32)
    odd = sum(1 << i for i in LANES if x[i] & 1)
    assert (evaluate("uint((simd_vote::vote_t)simd_ballot(x & 1))", x) == odd).all()
    assert (evaluate("simd_any(x == 4) * 2 + simd_any(x == 5)", x) == 2).all()
    assert (evaluate("simd_all(x < 5) * 2 + simd_all(x < 4)", x) == 2).all()
    assert (evaluate("simd_is_first()", x) == (LANES == 0)).all()


def test_reductions() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-1000, 1000, 64).astype(np.int32)
    for name, ufunc in (("sum", np.add), ("min", np.minimum), ("max", np.maximum), ("and", np.bitwise_and), ("or", np.bitwise_or),
                        ("xor", np.bitwise_xor)):  # fmt: skip
        assert np.array_equal(evaluate(f"simd_{name}(x)", x), np.repeat([ufunc.reduce(x[:32]), ufunc.reduce(x[32:])], 32))
    floats = rng.standard_normal(32).astype(np.float32)
    close(evaluate("simd_sum(x)", floats), np.full(32, floats.sum()), 1e-5)
    assert (evaluate("simd_max(x)", floats) == floats.max()).all() and (evaluate("simd_min(x)", floats) == floats.min()).all()
    assert (evaluate("quad_max(x)", floats) == np.repeat(floats.reshape(8, 4).max(1), 4)).all()
    small = np.arange(32, dtype=np.int32)
    assert np.array_equal(evaluate("simd_prefix_exclusive_sum(x)", small), np.cumsum(small) - small)
    assert np.array_equal(evaluate("simd_prefix_inclusive_sum(x)", small), np.cumsum(small))
    whole = np.arange(32, dtype=np.float16)  # a half's sum is rounded to a half at every step: sums from 2048 on lose their last bit
    assert (evaluate("simd_sum(x)", whole) == np.float16(496)).all()


def test_collectives_skip_lanes_that_have_returned() -> None:
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    run("device float *out, device const float *in) { if (lane >= 20) return; out[index] = simd_sum(in[index]); }", y, x, seed=2)
    assert (y[:20] == 20).all() and (y[20:] == 0).all()


def test_arithmetic() -> None:
    x = np.random.default_rng(2).uniform(0.1, 3.0, 64).astype(np.float32)
    for name in ("exp2", "exp", "log", "log2", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "rint"):
        expected = getattr(np, name)(x.astype(np.float64))
        for word in (f"{name}(x)", f"fast::{name}(x)", f"precise::{name}(x)", f"{name}(float2(x, 1.0f)).x"):
            close(evaluate(word, x), expected)
    close(evaluate("rsqrt(x)", x), 1 / np.sqrt(x))
    close(evaluate("pow(x, 2.5f)", x), x**2.5)
    assert np.array_equal(evaluate("clamp(x, 0.5f, 1.0f)", x), np.clip(x, np.float32(0.5), 1))
    assert np.array_equal(evaluate("min(x, NAN) + max(NAN, x)", x), x + x)
    assert np.array_equal(evaluate("select(x, -x, x > 1.0f)", x), np.where(x > 1, -x, x))
    exact = x.astype(np.float64) * x - 1
    assert np.array_equal(evaluate("fma(x, x, -1.0f)", x), exact.astype(np.float32))
    assert not np.array_equal(evaluate("x * x - 1.0f", x), exact.astype(np.float32)), "only fma() fuses"
    assert np.array_equal(evaluate("fast::exp2(-x * 70.0f)", x) == 0, np.exp2(-x.astype(np.float64) * 70) < 2.0**-126)


def test_bits() -> None:
    x = np.concatenate([[0, 1, 0x80000000, 0xFFFFFFFF], np.random.default_rng(3).integers(0, 1 << 32, 60)]).astype(np.uint32)
    text = [f"{v:032b}" for v in x]
    assert evaluate("popcount(x)", x).tolist() == [t.count("1") for t in text]
    assert evaluate("clz(x)", x).tolist() == [len(t) - len(t.lstrip("0")) for t in text]
    assert evaluate("ctz(x)", x).tolist() == [len(t) - len(t.rstrip("0")) for t in text]
    assert evaluate("reverse_bits(x)", x).tolist() == [int(t[::-1], 2) for t in text]
    assert np.array_equal(evaluate("mulhi(x, x)", x), (x.astype(np.uint64) ** 2 >> np.uint64(32)).astype(np.uint32))
    assert np.array_equal(evaluate("rotate(x, 8u)", x), x << 8 | x >> 24)
    assert np.array_equal(evaluate("extract_bits(x, 5u, 7u)", x), x >> 5 & 127)
    assert np.array_equal(evaluate("as_type<uint>(ushort2(as_type<ushort2>(x).yx))", x), x << 16 | x >> 16)


def test_half_arithmetic_rounds_once_and_to_even() -> None:
    with np.errstate(all="ignore"):
        a, b = halves(4).view(np.float16), halves(5).view(np.float16)
        for word, expected in (("a + b", a + b), ("a * b", a * b), ("a / b", a / b), ("a * b + a", a * b + a)):
            got = np.zeros(1024, np.float16)
            buffers = "device half *out, device const half *x, device const half *y"
            run(f"{buffers}) {{ half a = x[index], b = y[index]; out[index] = {word}; }}", got, a, b, block=1024)
            assert np.array_equal(got, expected, equal_nan=True), word
        floats = np.random.default_rng(6).integers(0, 1 << 32, 1024, dtype=np.uint32).view(np.float32)
        floats[:512] = (floats[:512].view(np.uint32) & 0x0FFFFFFF | 0x30000000).view(np.float32)  # many in the range of a half
        assert np.array_equal(evaluate("half(x)", floats, np.float16), floats.astype(np.float16), equal_nan=True)
        fused = evaluate("fma(x, x, half(0.0009765625f))", a[:256])
        assert np.array_equal(fused, (a[:256].astype(np.float64) ** 2 + 2.0**-10).astype(np.float16), equal_nan=True)


def test_16_bit_conversions_of_gpu_h() -> None:
    floats = np.random.default_rng(7).integers(0, 1 << 32, 1024, dtype=np.uint32)
    nan = (floats & 0x7FFFFFFF) > 0x7F800000
    rounded = ((floats.astype(np.uint64) + 0x7FFF + (floats >> 16 & 1)) >> np.uint64(16)).astype(np.uint16)
    got = evaluate("float_to_bf16(x)", floats.view(np.float32), np.uint16)
    assert np.array_equal(got[~nan], rounded[~nan]) and ((got[nan] & 0x7FFF) > 0x7F80).all()
    assert np.array_equal(evaluate("as_type<ushort>(bfloat(x))", floats.view(np.float32), np.uint16)[~nan], rounded[~nan])
    words = halves(8)
    assert np.array_equal(evaluate("bf16_to_float(x)", words, np.float32).view(np.uint32), words.astype(np.uint32) << 16)
    expected = words.view(np.float16).astype(np.float32)
    assert np.array_equal(evaluate("f16_to_float(x)", words, np.float32), expected, equal_nan=True)
    pairs = floats.view(np.uint16).reshape(-1, 2)
    low = evaluate("bf16_pair_to_float(x).x", floats, np.float32).view(np.uint32)
    assert np.array_equal(low, pairs[:, 0].astype(np.uint32) << 16)
    again = evaluate("float_to_bf16_pair(bf16_pair_to_float(x).x, bf16_pair_to_float(x).y)", floats)
    quiet = ((pairs & 0x7FFF) <= 0x7F80).all(1)
    assert np.array_equal(again[quiet], floats[quiet])


def test_vectors() -> None:
    x = np.arange(8, dtype=np.float32)
    body = """device float *out, device const packed_float3 *in, device const uchar4 *bytes, device const half4 *halves) {
      float3 three = in[0];
      float4 v = float4(three, 9.0f);
      v.yz = v.zy;
      v.w += 1.0f;
      v *= 2.0f;
      uint4 whole = uint4(bytes[1]) << 1u;
      out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v[3];
      out[4] = dot(v, float4(halves[1]));
      out[5] = whole.x + whole.w;
      out[6] = all(v == v) && any(v > float4(19.0f)) && !all(v > float4(19.0f));
      out[7] = float2(int2(v.xy) / 2).y + packed_float3(three)[2];
    }"""
    y = np.zeros(8, np.float32)
    run(body, y, x[1:4].copy(), np.arange(8, dtype=np.uint8), x.astype(np.float16), block=1)
    assert y.tolist() == [2, 6, 4, 20, 2 * 4 + 6 * 5 + 4 * 6 + 20 * 7, 2 * (4 + 7), 1, 3 + 3]


@pytest.mark.parametrize("transposed", ["false", "true"])
def test_matrices(transposed: str) -> None:
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((8, 24)).astype(np.float32), rng.standard_normal((24, 8)).astype(np.float16)
    c = np.zeros((8, 8), np.float32)
    stored = np.ascontiguousarray(b.T) if transposed == "true" else b
    place = "ulong2(i, 0), true" if transposed == "true" else "ulong2(0, i), false"
    run(
        f"""device float *out, device const float *a, device const half *b) {{
          simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), x;
          simdgroup_half8x8 y;
          for (uint i = 0; i < 24; i += 8) {{
            simdgroup_load(x, a, 24, ulong2(i, 0));
            simdgroup_load(y, b, {24 if transposed == "true" else 8}, {place});
            simdgroup_multiply_accumulate(sum, x, y, sum);
          }}
          sum.thread_elements()[0] += 100.0f * matrix_row(lane) + matrix_column(lane);
          sum.thread_elements()[1] += 100.0f * matrix_row(lane) + matrix_column(lane) + 1;
          simdgroup_store(sum, out, 8);
        }}""",
        c, a, stored, seed=5,
    )  # fmt: skip
    expected = a.astype(np.float64) @ b.astype(np.float64) + 100 * np.arange(8)[:, None] + np.arange(8)
    assert np.abs(c - expected).max() < 1e-4
    threads = np.zeros((8, 8), np.float32)
    run("device float *out) { simdgroup_float8x8 m(3.0f), t; simdgroup_multiply(t, m, m); simdgroup_store(t, out); }", threads)
    assert np.array_equal(threads, np.eye(8, dtype=np.float32) * 9)


def test_atomics() -> None:
    y = np.array([0, 100, 100, 0, 0xFFFFFFFF, 0, 7, 0], np.uint32)
    run(
        """device atomic_uint *out) {
          atomic_fetch_add_explicit(&out[0], 2, memory_order_relaxed);
          atomic_fetch_sub_explicit(&out[1], 1, memory_order_relaxed);
          atomic_fetch_min_explicit(&out[2], index + 3, memory_order_relaxed);
          atomic_fetch_max_explicit(&out[3], index, memory_order_relaxed);
          atomic_fetch_and_explicit(&out[4], ~index, memory_order_relaxed);
          atomic_fetch_or_explicit(&out[5], index, memory_order_relaxed);
          uint old = atomic_load_explicit(&out[6], memory_order_relaxed);
          while (!atomic_compare_exchange_weak_explicit(&out[6], &old, old + index, memory_order_relaxed, memory_order_relaxed)) {}
          if (index == 40) atomic_store_explicit(&out[7], 9, memory_order_relaxed);
        }""",
        y, block=64,
    )  # fmt: skip
    assert y.tolist() == [128, 36, 3, 63, 0xFFFFFFC0, 63, 7 + 63 * 32, 9]


def test_grid_positions() -> None:
    y = np.zeros((6, 24, 4), np.int32)
    text = """kernel void k(device int4 *out, uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
      uint3 place [[thread_position_in_threadgroup]], uint3 threads [[threads_per_threadgroup]], uint3 at [[thread_position_in_grid]],
      uint3 all [[threads_per_grid]], uint index [[thread_index_in_threadgroup]], ushort simds [[simdgroups_per_threadgroup]],
      constant int &plus [[buffer(1)]]) {
        out[(group.x + groups.x * group.y) * 24 + index] = int4(at.x + all.x * at.y, place.z * threads.y * threads.x, simds, plus);
      }"""
    held = Arrays([y, np.array([5], np.int32)], 1)
    emulate_source(f"#include <metal_stdlib>\nusing namespace metal;\n{text}", "k", (3, 2, 1), (4, 3, 2), 0, held.addresses, held.memory,
                   language="metal")  # fmt: skip
    held.copy_back()
    for group in range(6):
        for index in range(24):
            x, row, z = index % 4, index // 4 % 3, index // 12
            at = (group % 3 * 4 + x) + 12 * (group // 3 * 3 + row)
            assert y[group, index].tolist() == [at, z * 12, 1, 5]


def test_the_arguments_of_a_kernel_must_match_its_signature() -> None:
    text = "#define MORE device const int *rows,\nkernel void k(device float *out, MORE device const half *in [[buffer(2)]]) {}"
    signature = signatures(text)[0]
    assert [(p.index, p.read_only) for p in signature.parameters] == [(0, False), (1, True), (2, True)]
    check_record(Kernel("k", "metal", "apple7", (), 1, 2), text)
    for outs, ins in ((2, 1), (1, 1), (0, 3)):
        with pytest.raises(AssertionError, match="buffer"):
            check_record(Kernel("k", "metal", "apple7", (), outs, ins), text)
