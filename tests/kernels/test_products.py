"""The CPU kernels that multiply with packed weights, against float64 sums over the very numbers they see: x and weights as rounded."""

from __future__ import annotations

import numpy as np
import pytest

from tests.formats import sampled_formats
from tests.in_turn import in_turn
from tests.kernels.calling import aligned, call
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernels_folder
from tinyvllm.quant import codecs
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16
from tinyvllm.quant.formats import FORMATS as TABLE
from tinyvllm.quant.formats import Activations, Layout, activations_of, packed_in
from tinyvllm.quant.layouts import pack_panels, unpack_panels
from tinyvllm.quant.random_rows import packable_width, random_rows

FORMATS = sampled_formats(Layout.PANELS)
_NEEDS = {"avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}, "avx2": {"avx2", "fma", "f16c"}, "neon": {"asimd"}, "plain": set()}
TARGETS = [t for t, needs in _NEEDS.items() if (kernels_folder() / f"cpu/include/lanes_{t}.h").is_file() and needs <= cpu_features()]
TOLERANCE = 2e-6  # of the sum of the absolute products: float32 sums of at most a few thousand


# --- what the kernels read


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    out = aligned(shape, np.float32)
    out[...] = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return out


def pack(weight: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """float32 [O, I] -> (panels uint8, the float64 [O, I] that they represent): random ones where rounding takes a search."""
    O, I = weight.shape
    padded = np.zeros((-(-O // 16) * 16, I), np.float32)
    padded[:O] = weight
    if not TABLE[format].is_rounded_quickly:
        panels = pack_panels(format, random_rows(format, O, I, float(weight.std())))
        out = aligned(panels.shape, np.uint8)
        out[...] = panels
        return out, unpack_panels(format, panels, O, I).astype(np.float64)
    if format in ("Q8_0", "Q4_0"):
        panels, values = _pack_blocks(padded.reshape(-1, 16, I // 32, 32), 127 if format == "Q8_0" else 7)
        values = values.reshape(-1, I)
    elif format == "BF16":
        bits = f32_to_bf16(padded)
        panels, values = bits.reshape(-1, 16, I // 2, 2).transpose(0, 2, 1, 3), bf16_to_f32(bits)
    elif format in packed_in(Layout.PANELS):
        panels = pack_panels(format, codecs.pack(format, padded.reshape(-1, TABLE[format].elements)).reshape(len(padded), -1))
        values = unpack_panels(format, panels, len(padded), I)
    else:
        values = padded.astype(np.float16 if format == "F16" else np.float32)
        panels = values.reshape(-1, 16, I).transpose(0, 2, 1)
    raw = np.ascontiguousarray(panels).view(np.uint8).reshape(-1)
    out = aligned(raw.shape, np.uint8)
    out[...] = raw
    return out, values[:O].astype(np.float64)


def _pack_blocks(blocks: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [panels, 16, blocks, 32] -> (bytes, values)."""
    scale = (np.abs(blocks).max(-1) / most).astype(np.float16)
    q = np.clip(np.rint(blocks / np.maximum(scale[..., None].astype(np.float32), 1e-9)), -most - 1, most).astype(np.int32)
    values = q * scale[..., None].astype(np.float64)
    q = (q + most + 1).astype(np.uint8)
    if most == 7:
        q = q[..., :16] | q[..., 16:] << 4
    words = q.reshape(*q.shape[:3], -1, 4).transpose(0, 2, 3, 1, 4)  # [panels, blocks, words, 16, 4]
    scales = np.ascontiguousarray(scale.transpose(0, 2, 1)).view(np.uint8)
    return np.concatenate([scales, words.reshape(*words.shape[:2], -1)], -1), values


def prepared(x: np.ndarray, format: str) -> np.ndarray:
    """float32 [T, I] -> float64 [T, I]: what a row of x is after its rounding."""
    activations = activations_of(format, Layout.PANELS)
    if activations is Activations.BFLOAT16:
        return bf16_to_f32(f32_to_bf16(x)).astype(np.float64)
    if activations is Activations.FLOAT32:
        return x.astype(np.float64)
    blocks = x.reshape(len(x), -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    q = np.rint(blocks * np.where(most > 0, np.float32(127) / np.maximum(most, np.float32(1e-30)), np.float32(0)))
    return (q * (most / np.float32(127)).astype(np.float64)).reshape(x.shape)


def scratch(T: int, I: int) -> np.ndarray:
    """Room for T prepared rows of any format."""
    return aligned((-(-T // 16) * 16 * (4 * I + 128),), np.uint8)


def one(value: int) -> np.ndarray:
    return np.array([value], np.int32)


def poison(*shape: int) -> np.ndarray:
    return aligned(shape, np.float32)


def close(got: np.ndarray, want: np.ndarray, size: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Off by at most `tolerance` of `size`, the sums of absolute products."""
    off = np.abs(got - want) / (size + 1e-30)
    assert off.max(initial=0) < tolerance, f"off by {off.max():.2e} at {np.unravel_index(off.argmax(), off.shape)}"


# --- matmul


def matmul_kernel(I: int, O: int, format: str, target: str, bias: int = 0, residual: int = 0, activation: int = 0) -> Kernel:
    defines = (("I", I), ("O", O), ("WEIGHT", format), ("BIAS", bias), ("RESIDUAL", residual), ("ACTIVATION", activation))
    return Kernel("matmul", "cpu", target, defines, 2, 3 + bias + residual)


def matmul(kernel: Kernel, x: np.ndarray, panels: np.ndarray, *more: np.ndarray, rows: int | None = None, threads: int = 2) -> np.ndarray:
    defines = dict(kernel.defines)
    out = poison(len(x), int(defines["O"]))
    call(kernel, out, scratch(len(x), int(defines["I"])), x, panels, *more, one(len(x) if rows is None else rows), threads=threads)
    return out


@pytest.mark.parametrize(("format", "target"), in_turn(FORMATS, TARGETS))
@pytest.mark.parametrize("I, O, full", [(32, 1, 1), (96, 48, 0), (1120, 131, 1)])
def test_matmul(I: int, O: int, full: int, format: str, target: str) -> None:
    """`full` adds bias, gelu and residual."""
    I = packable_width(format, I)
    weight, bias = numbers(O, I), numbers(O)
    panels, values = pack(weight, format)
    kernel = matmul_kernel(I, O, format, target, full, full, full)
    for T in (1, 2, 3, 5, 7, 12, 13, 30):
        x, residual = numbers(T, I), numbers(T, O, seed=1)
        seen = prepared(x, format)
        want, size = seen @ values.T, np.abs(seen) @ np.abs(values).T + full
        if full:
            y = want + bias
            gelu = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
            want, size = gelu + residual, size + np.abs(residual)
        close(matmul(kernel, x, panels, *[bias, residual][: 2 * full]), want, size)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_after_the_last_are_unchanged(target: str) -> None:
    panels, _ = pack(numbers(40, 64), "BF16")
    for rows in (0, 1, 6):
        out = matmul(matmul_kernel(64, 40, "BF16", target), numbers(7, 64), panels, rows=rows)
        assert np.isfinite(out[:rows]).all() and (out[rows:].view(np.uint32) == 0xFFFFFFFF).all()


@pytest.mark.parametrize(("format", "target"), in_turn(FORMATS, TARGETS))
def test_a_row_has_the_same_bits_in_any_batch(format: str, target: str) -> None:
    I, O, most = 256, 70, 512 if target != "plain" else 130
    panels, _ = pack(numbers(O, I), format)
    kernel, x = matmul_kernel(I, O, format, target), numbers(most, I)
    want = matmul(kernel, x, panels)
    for T in (1, 2, 4, 5, 8, 13, 16, 29, 130):
        for threads in (1, 2, 3):
            start = (7 * T + threads) % (most - T + 1)
            got = matmul(kernel, np.ascontiguousarray(x[start : start + T]), panels, threads=threads)
            assert (got.view(np.uint32) == want[start : start + T].view(np.uint32)).all(), f"T={T}, {threads} threads"


@pytest.mark.parametrize(("format", "target"), in_turn(FORMATS, TARGETS))
def test_matmul_passes_on_what_is_not_finite(format: str, target: str) -> None:
    I = packable_width(format, 96)
    panels, _ = pack(numbers(16, I), format)
    kernel, x = matmul_kernel(I, 16, format, target), numbers(4, I)
    x[1, 70], x[2, 3], x[3] = np.nan, np.inf, 0
    out = matmul(kernel, x, panels)
    assert np.isfinite(out[0]).all() and not np.isfinite(out[1:3]).any() and (out[3] == 0).all()


# Format -> where the integers are in a block of a file.
_QUANTS = {
    "Q8_0": (2, 34),
    "Q4_0": (2, 18),
    "Q5_0": (2, 22),
    "Q2_K": (16, 80),
    "Q3_K": (0, 96),
    "Q4_K": (16, 144),
    "Q5_K": (16, 176),
    "Q6_K": (0, 192),
}


@pytest.mark.parametrize(("format", "target"), in_turn(_QUANTS, TARGETS))
def test_the_largest_integers_do_not_overflow(format: str, target: str) -> None:
    """All integers of the weights at their limits, and all of x at 127 or -127: sums of 16 bits would be the first to fail."""
    I, O, (start, end) = 512, 16, _QUANTS[format]
    rows = random_rows(format, O, I, 1.0).copy()
    quants = rows.reshape(O, I // TABLE[format].elements, -1)[..., start:end]
    quants[:8], quants[8:] = 0xFF if format != "Q8_0" else 0x7F, 0 if format != "Q8_0" else 0x80
    raw = pack_panels(format, rows)
    panels = aligned(raw.shape, np.uint8)
    panels[...] = raw
    values = unpack_panels(format, panels, O, I).astype(np.float64)
    x = np.sign(numbers(8, I))
    x[0], x[1], x[2] = 1, -1, np.tile([1, -1], I // 2)
    for T in (1, 3, 8):
        close(
            matmul(matmul_kernel(I, O, format, target), x[:T].copy(), panels),
            x[:T].astype(np.float64) @ values.T,
            np.abs(x[:T]) @ np.abs(values).T,
        )


_WITHOUT = ("-mno-avx512bf16", "-mno-avx512vnni", "-mno-avx512vbmi")


@pytest.mark.parametrize("format", ["BF16", "Q8_0", "Q6_K", "INT4_G32"])
@pytest.mark.parametrize(
    "target, feature, flags", [("avxvnni", "avx_vnni", ()), ("avx512", "avx512dq", _WITHOUT)], ids=["avxvnni", "avx512"]
)
def test_variants_with_fewer_or_more_dot_products_have_the_bits_of_avx2(
    target: str, feature: str, flags: tuple[str, ...], format: str
) -> None:
    if feature not in cpu_features():
        pytest.skip(f"needs a processor with {feature}")
    panels, _ = pack(numbers(40, 256), format)
    for T in (1, 5, 26):
        x, results = numbers(T, 256), []
        for variant, extra in ((target, flags), ("avx2", ())):
            results.append(poison(T, 40))
            call(matmul_kernel(256, 40, format, variant), results[-1], scratch(T, 256), x, panels, one(T), extra=extra)
        assert (results[0].view(np.uint32) == results[1].view(np.uint32)).all(), f"T={T}"


# --- the fused ones: norms ahead of the product, and what is done with its results


def normed(x: np.ndarray, norm: np.ndarray, norm_bias: np.ndarray | None, eps: float) -> np.ndarray:
    """float32 [T, E] -> float32 [T, E]: RMS norm, or layer norm where there is a bias."""
    x = x.astype(np.float64)
    if norm_bias is not None:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * norm
    return (y if norm_bias is None else y + norm_bias).astype(np.float32)


# A normed row may fall to the other side of a rounding than the oracle's: one step of a bfloat16 or an int8, of one product in E
_BY_ROUNDING = {Activations.FLOAT32: 4e-6, Activations.BFLOAT16: 4e-4, Activations.INT8: 1e-3}
FUSED_TOLERANCE = {format: _BY_ROUNDING[activations_of(format, Layout.PANELS)] for format in FORMATS}


@pytest.mark.parametrize(("bias", "format", "target"), in_turn([(0, "F32"), (1, "F16"), (0, "BF16"), (1, "Q8_0"), (0, "Q4_0")], TARGETS))
def test_norm_gate_up_silu(bias: int, format: str, target: str) -> None:
    E, F, eps = 96, 80, 1e-5
    weight, norm, biases = numbers(2 * F, E), numbers(E), numbers(2 * F)
    panels, values = pack(weight, format)
    defines = (("E", E), ("F", F), ("WEIGHT", format), ("HALF", "BOTH"), ("BIAS", bias), ("EPS", eps))
    kernel = Kernel("norm_gate_up_silu", "cpu", target, defines, 2, 4 + bias)
    for T in (1, 5, 14):
        x = numbers(T, E)
        seen = prepared(normed(x, norm, None, eps), format)
        y, size = seen @ values.T + bias * biases, np.abs(seen) @ np.abs(values).T + 1
        gate, up = y[:, :F], y[:, F:]
        out = poison(T, F)
        call(kernel, out, scratch(T, E), x, norm, panels, *[biases] * bias, one(T))
        close(out, gate / (1 + np.exp(-gate)) * up, size[:, :F] * size[:, F:], FUSED_TOLERANCE[format])


@pytest.mark.parametrize(("F", "format", "target"), in_turn([(80, "BF16"), (80, "Q4_0"), (1296, "BF16"), (1296, "Q4_K")], TARGETS))
def test_a_gated_row_has_the_same_bits_in_any_batch(F: int, format: str, target: str) -> None:
    """Also with 81 panels: few rows then take several pairs of gate's panels before those of up, the last pair a half one."""
    E, most = 256 if format == "Q4_K" else 96, 125
    panels, _ = pack(numbers(2 * F, E), format)
    kernel = Kernel(
        "norm_gate_up_silu", "cpu", target, (("E", E), ("F", F), ("WEIGHT", format), ("HALF", "BOTH"), ("BIAS", 0), ("EPS", 1e-5)), 2, 4
    )
    x, norm, want = numbers(most, E), numbers(E), poison(most, F)
    call(kernel, want, scratch(most, E), x, norm, panels, one(most))
    for T, threads in ((1, 2), (3, 1), (13, 3), (40, 2)):
        out = poison(T, F)
        call(kernel, out, scratch(T, E), np.ascontiguousarray(x[-T:]), norm, panels, one(T), threads=threads)
        assert (out.view(np.uint32) == want[-T:].view(np.uint32)).all(), f"T={T}, {threads} threads"


def rotated(y: np.ndarray, angles: np.ndarray, R: int) -> np.ndarray:
    """float64 [T, heads, D], float32 [T, R] -> float64 [T, heads, D]."""
    half = R // 2
    cosine, sine = angles[:, None, :half], angles[:, None, half:]
    a, b = y[..., :half], y[..., half:R]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, y[..., R:]], -1)


def rms(y: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return y / np.sqrt((y**2).mean(-1, keepdims=True) + eps) * weight


CACHES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
HEADS = [  # H, K, D, R, layer norm, bias, qk norm, cache, weights
    (4, 2, 64, 64, 0, 0, 0, "BF16", "BF16"),
    (3, 1, 80, 32, 1, 1, 0, "F16", "F16"),
    (2, 2, 32, 0, 1, 0, 0, "F32", "F32"),
    (4, 1, 128, 128, 0, 1, 1, "F32", "Q8_0"),
    (5, 5, 48, 48, 0, 0, 1, "BF16", "Q4_0"),
]


def qkv(case: tuple, target: str, x: np.ndarray, slots: np.ndarray, pool: np.ndarray, threads: int = 2) -> tuple:
    """Run the kernel; (q, the float64 [T, H + 2 K, D] that it should have made, the sizes of its sums)."""
    H, K, D, R, layer, bias, qk_norm, cache, format = case
    (T, E), S, eps = x.shape, pool.shape[3], 1e-6
    weight, norm, norm_bias, biases = numbers((H + 2 * K) * D, E), numbers(E), numbers(E, seed=1), numbers((H + 2 * K) * D)
    q_norm, k_norm, angles = numbers(D), numbers(D, seed=1), np.cos(numbers(T, max(R, 1)))
    panels, values = pack(weight, format)
    sizes = (("E", E), ("H", H), ("K", K), ("D", D), ("S", S), ("R", R), ("MAIN", H + 2 * K), ("SECOND", 0), ("WEIGHT", format))
    defines = (*sizes, ("CACHE_TYPE", cache), ("NORM", layer), ("BIAS", bias), ("QK_NORM", qk_norm), ("EPS", eps), ("QK_EPS", eps))
    ins = [x, norm, *[norm_bias] * layer, panels, *[biases] * bias, *[q_norm, k_norm] * qk_norm, *([angles] if R else []), slots, one(T)]
    q = poison(T, H, D)
    call(Kernel("norm_qkv_rope_store", "cpu", target, defines, 4, len(ins)), q, pool, pool, scratch(T, E), *ins, threads=threads)

    seen = prepared(normed(x, norm, norm_bias if layer else None, eps), format)
    y = (seen @ values.T + bias * biases).reshape(T, H + 2 * K, D)
    size = (np.abs(seen) @ np.abs(values).T + 1).reshape(y.shape)
    if qk_norm:
        size[:, : H + K] /= np.sqrt((y[:, : H + K] ** 2).mean(-1, keepdims=True)) / 4
        y[:, :H], y[:, H : H + K] = rms(y[:, :H], q_norm, eps), rms(y[:, H : H + K], k_norm, eps)
    if R:
        y[:, : H + K] = rotated(y[:, : H + K], angles, R)
    return q, y, size.max(-1, keepdims=True)


@pytest.mark.parametrize(("case", "target"), in_turn([(case,) for case in HEADS], TARGETS))
def test_norm_qkv_rope_store(case: tuple, target: str) -> None:
    H, K, D, *_, cache, format = case
    S, P, E = 8, 5, 64
    for T in (1, 6, 13):
        pool = aligned((P, 2, K, S, D), CACHES[cache])
        before = pool.copy()
        slots = np.random.default_rng(T).permutation(P * S)[:T].astype(np.int32)
        q, want, size = qkv(case, target, numbers(T, E), slots, pool)
        close(q, want[:, :H], size[:, :H], FUSED_TOLERANCE[format])
        stored = pool[slots // S, :, :, slots % S]  # [T, 2, K, D]
        got = (bf16_to_f32(stored) if cache == "BF16" else stored).astype(np.float64).reshape(T, 2 * K, D)
        step = {"F32": 0, "F16": 2**-11, "BF16": 2**-8}[cache]
        close(got, want[:, H:], size[:, H:] + np.abs(want[:, H:]) * step / FUSED_TOLERANCE[format], FUSED_TOLERANCE[format])
        pool[slots // S, :, :, slots % S] = before[slots // S, :, :, slots % S]
        assert (pool.view(np.uint8) == before.view(np.uint8)).all(), "another slot was written"


@pytest.mark.parametrize("target", TARGETS)
def test_qkv_has_the_same_bits_in_any_batch(target: str) -> None:
    case, S, most = HEADS[3], 16, 100
    K, D = case[1], case[2]
    x, slots = numbers(most, 64), np.arange(most, dtype=np.int32)
    pools = [aligned((7, 2, K, S, D), np.float32, 0) for _ in range(2)]
    # the angles are drawn by shape: only the same T compares; threads and the order of slots differ
    want, _, _ = qkv(case, target, x, slots, pools[0], threads=1)
    got, _, _ = qkv(case, target, x, slots[::-1].copy(), pools[1], threads=3)
    assert (got.view(np.uint32) == want.view(np.uint32)).all()
    rows = [pool.transpose(0, 3, 1, 2, 4).reshape(-1, 2, K, D)[:most] for pool in pools]
    assert (rows[0] == rows[1][::-1]).all()


@pytest.mark.parametrize(
    ("V", "layer", "format", "target"),
    in_turn([(331, 0, "BF16"), (64, 1, "F32"), (17, 0, "F16"), (48, 1, "Q8_0"), (131, 0, "Q4_0")], TARGETS),
)
def test_norm_head(V: int, layer: int, format: str, target: str) -> None:
    E, T, N, count, eps = 64, 9, 6, 4, 1e-5
    x, norm, norm_bias = numbers(T, E), numbers(E), numbers(E, seed=1)
    panels, values = pack(numbers(V, E), format)
    index = np.array([8, 0, 3, 3, 100, 100], np.int32)
    defines = (("E", E), ("V", V), ("N", N), ("WEIGHT", format), ("NORM", layer), ("EPS", eps))
    kernel = Kernel("norm_head", "cpu", target, defines, 3, 5 + layer)
    logits, best = poison(N, V), np.full(N, 77, np.int32)
    call(kernel, logits, best, scratch(N, E), x, norm, *[norm_bias] * layer, panels, index, one(count))
    seen = prepared(normed(x[index[:count]], norm, norm_bias if layer else None, eps), format)
    close(logits[:count], seen @ values.T, np.abs(seen) @ np.abs(values).T, FUSED_TOLERANCE[format])
    assert (logits[count:].view(np.uint32) == 0xFFFFFFFF).all() and (best[count:] == 77).all()
    assert (best[:count] == logits[:count].argmax(-1)).all()


@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_logit(target: str) -> None:
    """Weights of one column: x is one after its norm, so the logits are that column."""
    E, V = 32, 150
    columns = np.tile(numbers(V), (6, 1))
    columns[0, [20, 149]] = 50  # the lowest index of equals
    columns[1, [149]] = 50  # in the short panel
    columns[2, [3]] = np.nan
    columns[3] = -np.inf
    columns[4, [70, 71]] = np.inf
    columns[5] = -np.inf
    columns[5, 9] = -1e30
    defines = (("E", E), ("V", V), ("N", 1), ("WEIGHT", "F32"), ("NORM", 0), ("EPS", 0.0))
    found = []
    for column in columns:
        weight = np.zeros((-(-V // 16) * 16, E), np.float32)
        weight[:V, 0] = column
        panels = np.ascontiguousarray(weight.reshape(-1, 16, E).transpose(0, 2, 1))
        norm = aligned((E,), np.float32, 0)
        norm[0] = 1
        best = one(77)
        ins = [aligned((1, E), np.float32, 1), norm, panels, one(0), one(1)]
        call(Kernel("norm_head", "cpu", target, defines, 3, 5), poison(1, V), best, scratch(1, E), *ins)
        found.append(int(best[0]))
    assert found == [20, 149, -1, -1, 70, 9]
