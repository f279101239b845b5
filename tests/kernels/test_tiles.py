"""Products and attention by AMX's tiles: the shipped kernels, the instructions emulated in C (emulated_tiles.h), and compiled as is."""

from __future__ import annotations

import errno
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.calling import FOLDER, TILE_LANES, aligned, call, real_tiles
from tests.kernels.samples import SAMPLES
from tests.kernels.test_attention import Shape, decode, make, prefill, same
from tests.kernels.test_products import close, matmul, matmul_kernel, numbers, one, pack, poison, prepared, scratch
from tests.kernels.test_slices import check_ranks
from tinyvllm.backends.cpu import tiles
from tinyvllm.backends.cpu.compile import _ALONE, _COMMON
from tinyvllm.backends.cpu.toolchain import CPU_TARGETS, cpu_features, provide_compiler
from tinyvllm.backends.cpu.variants import cpu_variants
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_text
from tinyvllm.quant.codecs import bf16_to_f32
from tinyvllm.quant.random_rows import packable_width

_MISSING = TILE_LANES - cpu_features()
emulated = pytest.mark.skipif(bool(_MISSING), reason=f"the lanes next to the emulated tiles need {', '.join(sorted(_MISSING))}")

on_amx = pytest.mark.skipif(bool(cpu_variants().get("amx", "another architecture")), reason="no AMX here, or no leave to use it")


@emulated
@pytest.mark.parametrize("I, O, full", [(32, 1, 0), (96, 33, 0), (1120, 131, 1)])
def test_bf16_agrees_with_exact_sums(I: int, O: int, full: int) -> None:
    weight, bias = numbers(O, I), numbers(O)
    panels, values = pack(weight, "BF16")
    for T in (1, 7, 16, 17, 33, 70):
        x, residual = numbers(T, I), numbers(T, O, seed=1)
        seen = prepared(x, "BF16")
        want, size = seen @ values.T, np.abs(seen) @ np.abs(values).T
        if full:
            want, size = want + bias + residual, size + np.abs(bias) + np.abs(residual)
        close(matmul(matmul_kernel(I, O, "BF16", "amx", full, full), x, panels, *[bias, residual][: 2 * full]), want, size)


@emulated
def test_bf16_adds_as_the_manual_says() -> None:
    """Within 32 columns the first and the second numbers of pairs apart, each fused from 0, then both, then the sum so far."""
    I, O, T = 64, 16, 3
    panels, values = pack(numbers(O, I), "BF16")
    defines = (("E", I), ("V", O), ("WEIGHT", "BF16"), ("NORM", 0), ("EPS", 0.0))  # one accumulator over all columns
    x, logits = np.sign(numbers(T, I)), poison(T, O)  # their norm changes nothing
    index = np.arange(T, dtype=np.int32)
    call(Kernel("norm_head", "cpu", "amx", defines, 3, 5), logits, one(0), scratch(T, I), x, numbers(I), panels, index, one(T))
    seen = prepared(x * numbers(I), "BF16")
    sums = np.zeros((T, O), np.float32)
    for start in range(0, I, 32):
        parts = np.zeros((2, T, O), np.float32)
        for k in range(start, start + 32):  # a product is exact in float64, and its sum with a float32 here
            parts[k % 2] = seen[:, k, None] * values[None, :, k] + parts[k % 2].astype(np.float64)
        sums += parts[0] + parts[1]
    np.testing.assert_array_equal(logits, sums)


@emulated
def test_bf16_takes_subnormals_for_zero() -> None:
    panels, _ = pack(np.full((16, 32), bf16_to_f32(np.array([0x0040], np.uint16))[0], np.float32), "BF16")
    out = matmul(matmul_kernel(32, 16, "BF16", "amx"), aligned((2, 32), np.float32, 2.0), panels)
    assert (out == 0).all()


@emulated
@pytest.mark.parametrize("format", ["BF16", "Q4_K", "Q8_0"])
def test_a_row_has_the_same_bits_in_any_batch(format: str) -> None:
    I, O, most = 256, 70, 130
    panels, _ = pack(numbers(O, I), format)
    kernel, x = matmul_kernel(I, O, format, "amx"), numbers(most, I)
    want = matmul(kernel, x, panels)
    for T, threads in ((1, 2), (2, 1), (8, 2), (9, 3), (16, 1), (29, 2), (33, 3), (97, 2)):
        got = matmul(kernel, np.ascontiguousarray(x[-T:]), panels, threads=threads)
        assert (got.view(np.uint32) == want[-T:].view(np.uint32)).all(), f"T={T}, {threads} threads"


@emulated
@pytest.mark.parametrize("format", ["Q8_0", "Q4_K", *(pytest.param(name, marks=pytest.mark.long) for name in ("Q6_K", "INT4_G32"))])
def test_integers_have_the_bits_of_dot_products(format: str) -> None:
    I = packable_width(format, 352)
    panels, _ = pack(numbers(40, I), format)
    for T in (5, 9, 26, 33):
        x = numbers(T, I)
        x[T - 1, 3] = np.inf
        tiled, dots = (matmul(matmul_kernel(I, 40, format, target), x, panels) for target in ("amx", "avx512"))
        assert np.isfinite(dots[:-1]).all() and not np.isfinite(dots[-1]).any()
        assert (tiled.view(np.uint32) == dots.view(np.uint32)).all(), f"T={T}"


@emulated
@pytest.mark.parametrize("I, T", [(3072, 40), pytest.param(5632, 200, marks=pytest.mark.long)], ids=["one piece", "two pieces"])
def test_long_rows_have_the_same_bits_in_two_passes(I: int, T: int) -> None:
    """Rows of which half of the columns are multiplied at a time, and the sums of the first half wait in the output."""
    weight, x, residual = numbers(41, I), numbers(T, I), numbers(T, 41, seed=1)
    panels, _ = pack(weight, "BF16")
    kernel = matmul_kernel(I, 41, "BF16", "amx", residual=1)
    got = matmul(kernel, x, panels, residual)
    rows = (0, 15, 16, T - 1)
    alone = [matmul(kernel, np.ascontiguousarray(x[t : t + 1]), panels, np.ascontiguousarray(residual[t : t + 1])) for t in rows]
    assert (got[list(rows)].view(np.uint32) == np.concatenate(alone).view(np.uint32)).all()


@on_amx
@pytest.mark.parametrize("format", ["BF16", "Q8_0", "Q4_K", "Q3_K"])
@pytest.mark.parametrize("T", [1, 9, 33, 130])
def test_the_processor_computes_what_is_emulated(format: str, T: int) -> None:
    I = packable_width(format, 352)
    panels, _ = pack(numbers(40, I), format)
    kernel, x = matmul_kernel(I, 40, format, "amx"), numbers(T, I)
    x[0, 0] = 2.0**-127  # a subnormal
    emulated = matmul(kernel, x, panels)
    with real_tiles():
        got = matmul(kernel, x, panels)
    assert (got.view(np.uint32) == emulated.view(np.uint32)).all()


@on_amx
@pytest.mark.parametrize(
    "shape", [Shape(H=8, K=1, D=64), Shape(H=2, K=2, D=128, window=90), Shape(H=6, K=2, D=80), Shape(H=4, K=2, D=48, S=8)], ids=str
)
def test_the_processor_attends_as_is_emulated(shape: Shape) -> None:
    """Many rows and few, which have keys as another operand."""
    for dtype in ("BF16", "KV_FP8", "KV_INT8", "KV_INT4") if shape.D % 32 == 0 else ("BF16", "KV_FP8", "KV_INT8"):
        case = make(replace(shape, dtype=dtype), [1, 70, 3], [700, 130, 289])
        emulated = prefill(case, "amx"), decode(case, "amx")
        with real_tiles():
            got = prefill(case, "amx"), decode(case, "amx")
        assert same(got[0], emulated[0]) and same(got[1], emulated[1]), dtype


@emulated
@pytest.mark.parametrize("dtype", ["KV_INT8", "KV_INT4"])
@pytest.mark.parametrize("shape", [Shape(H=8, K=1, D=64), Shape(H=2, K=2, D=96, window=90, cap=2.0), Shape(H=6, K=2, D=160, S=8)], ids=str)
def test_attention_by_integers_has_the_bits_of_dot_products(shape: Shape, dtype: str) -> None:
    """Prompts of many rows, of which the last sixteen are not all there, and one that begins after others; the last keys are not a tile."""
    case = make(replace(shape, dtype=dtype), [131, 35, 70], [700, 130, 70])
    assert same(prefill(case, "amx"), prefill(case, "avx512"))


@emulated
@pytest.mark.long
@pytest.mark.parametrize("format", ["BF16", "Q4_K"])
def test_gate_and_up_have_the_bits_of_a_row_alone(format: str) -> None:
    E, F, most = 256, 1296, 50
    panels, _ = pack(numbers(2 * F, E), format)
    defines = (("E", E), ("F", F), ("WEIGHT", format), ("HALF", "BOTH"), ("BIAS", 0), ("EPS", 1e-5))
    x, norm, results = numbers(most, E), numbers(E), []
    for rows in (x, *(np.ascontiguousarray(x[i : i + 1]) for i in (0, 17, 49))):
        results.append(poison(len(rows), F))
        call(
            Kernel("norm_gate_up_silu", "cpu", "amx", defines, 2, 4), results[-1], scratch(len(rows), E), rows, norm, panels, one(len(rows))
        )
    assert np.isfinite(results[0]).all()
    assert (np.concatenate(results[1:]) == results[0][[0, 17, 49]]).all()


@emulated
@pytest.mark.long
@pytest.mark.parametrize("format", ["BF16", "Q4_K"])
def test_the_sums_of_ranks_are_those_of_one_process(format: str) -> None:
    check_ranks(packable_width(format, 352), format, "amx", (2,))


@pytest.mark.parametrize(
    "name, instruction",
    [
        ("matmul BF16", "tdpbf16ps"),
        ("matmul Q4_0", "tdpbssd"),
        ("matmul Q4_K", "tdpbsud"),
        ("attention_prefill BF16", "tdpbf16ps"),
        ("attention_prefill KV_INT8", "tdpbssd"),
        ("attention_prefill KV_INT4", "tdpbsud"),
        ("attention_decode KV_FP8", "tdpbf16ps"),
    ],
)
def test_the_real_instructions_are_compiled(name: str, instruction: str) -> None:
    kernel, _ = SAMPLES[name]("amx")
    flags = [flag for flag in (*_COMMON, *_ALONE) if flag != "-c"]
    command = [provide_compiler(FOLDER), *flags, "--target=x86_64-none-unknown-elf", *CPU_TARGETS["amx"], "-S", "-", "-o", "-"]
    text = subprocess.run(command, input=kernel_text(kernel).encode(), capture_output=True, check=True).stdout.decode()
    for each in (instruction, "ldtilecfg", "tileloadd", "tilestored", "tilerelease"):
        assert f"\t{each}" in text


# --- leave of the system


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the system was asked; it grants nothing."""
    requests: list[int] = []
    monkeypatch.setattr(tiles, "_arch_prctl", lambda request, argument: requests.append(request) or 0)
    monkeypatch.setattr(tiles.sys, "platform", "linux")
    tiles.tiles_refused.cache_clear()
    yield requests
    tiles.tiles_refused.cache_clear()


def test_the_system_is_asked_once(asked: list[int]) -> None:
    assert "it was asked, and did not" in tiles.tiles_refused()
    assert tiles.tiles_refused() and asked == [0x1023, 0x1022]


@pytest.mark.parametrize(
    "error, words", [(errno.EPERM, "a sandbox forbids"), (errno.EINVAL, "before 5.16"), (errno.EIO, "EIO")], ids=["EPERM", "EINVAL", "EIO"]
)
def test_a_refusal_says_why(asked: list[int], monkeypatch: pytest.MonkeyPatch, error: int, words: str) -> None:
    monkeypatch.setattr(tiles, "_arch_prctl", lambda request, argument: error)
    assert tiles.tiles_refused().startswith(tiles.BY_SYSTEM) and words in tiles.tiles_refused()


def test_what_the_system_grants(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def grant(request: int, argument: int) -> int:
        if request == 0x1022:
            tiles.ctypes.c_uint64.from_address(argument).value = 1 << 18 | 3
        return 0

    monkeypatch.setattr(tiles, "_arch_prctl", grant)
    assert tiles.tiles_refused() is None
