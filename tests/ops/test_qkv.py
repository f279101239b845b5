"""Queries, and keys and values in the cache: kernels against the reference for every kind of layer, and each row on its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.ops.inputs import FORMATS_AND_VARIANTS, VARIANTS, by_kernel, device_bytes, file_rows, int32, numbers, packed, realized
from tinyvllm.backends import registry
from tinyvllm.batch import NO_SLOT, PACKED_KV, Batch, KVLayout, LayerCache
from tinyvllm.bridge import alias
from tinyvllm.ops.norm import Norm
from tinyvllm.ops.qkv import QKV, append_kv, norm_qkv_rope_store
from tinyvllm.quant.formats import Activations, Layout, activations_of, formats_in
from tinyvllm.quant.kv import pack_blocks, unpack_blocks
from tinyvllm.quant.layouts import MixedWeight, PackedWeight, pack_panels
from tinyvllm.quant.random_rows import packable_width

P, S, E = 4, 8, 64  # the last block is the scratch block
SCRATCH = (P - 1) * S
# Results are about 1. Where x or the cache is rounded, a last bit before may tip a number to its neighbour.
_BY_ROUNDING = {Activations.FLOAT32: 2e-5, Activations.BFLOAT16: 4e-3, Activations.INT8: 2e-2}
TOLERANCE = {format: _BY_ROUNDING[activations_of(format, Layout.PANELS)] for format in formats_in(Layout.PANELS)}
CACHE_TOLERANCE = {"float32": 0.0, "float16": 4e-3, "bfloat16": 4e-2, "int8": 6e-2, "fp8_e4m3": 0.3, "int4": 0.8}


@dataclass(frozen=True)
class LayerKind:
    """H query heads, K key/value heads of D, R rotary dims (0: positions are learned), and the parts that only some models have."""

    H: int = 4
    K: int = 2
    D: int = 16
    R: int = 16
    norm: str = "RMS"
    bias: bool = False
    qk_norm: bool = False
    parts: int = 3
    value_norm: bool = False
    cache: str = "float32"


KINDS = {
    "llama": LayerKind(),
    "qwen2": LayerKind(bias=True, cache="bfloat16"),
    "qwen3": LayerKind(D=32, R=32, qk_norm=True, cache="float16"),
    "phi, a part rotated": LayerKind(H=2, K=2, D=48, R=16),
    "an int8 cache": LayerKind(cache="int8"),
    "an fp8 cache": LayerKind(cache="fp8_e4m3", D=48, R=48),
    "an int4 cache": LayerKind(cache="int4", D=64, R=64, qk_norm=True),
    "gemma4": LayerKind(D=32, R=32, qk_norm=True, value_norm=True, cache="bfloat16"),
    "values that are keys": LayerKind(D=48, R=48, qk_norm=True, parts=2, value_norm=True),
    "values that are keys in an int4 cache": LayerKind(D=64, R=64, qk_norm=True, parts=2, value_norm=True, cache="int4"),
    "keys of another layer": LayerKind(D=48, R=48, qk_norm=True, parts=1, value_norm=True, cache="int8"),
    "gpt2": LayerKind(H=4, K=4, R=0, norm="LAYER", bias=True),
}


def batch_of(slots: list[int], rows: int) -> Batch:
    """A batch as far as this op looks at it."""
    none = int32(0)
    return Batch(none, none, int32(*slots), none, none, none, int32(rows), none, none, none, none, 1, 0, 1)


def cache_of(v: LayerKind) -> LayerCache:
    if v.cache in PACKED_KV:
        layout = KVLayout(PACKED_KV[v.cache], v.K, S, v.D)
        pool = Tensor(pack_blocks(layout.format, numbers(P, 2, v.K, S, v.D, seed=9))).contiguous().realize()
        return LayerCache(pool, alias(pool), layout)
    pool = Tensor(numbers(P, 2, v.K, S, v.D, seed=9)).cast(getattr(dtypes, v.cache)).contiguous().realize()
    return LayerCache(pool, alias(pool))


def contents(v: LayerKind, cache: LayerCache) -> np.ndarray:
    """float32 [P - 1, 2, K, S, D], without the scratch block."""
    if cache.packed is None:
        return cache.keys.float().numpy()[: P - 1]
    return unpack_blocks(cache.packed.format, cache.keys.numpy()[: P - 1], v.K, S, v.D)


def width(format: str) -> int:
    return max(packable_width(part, E) for part in format.split("+"))


def mixed(v: LayerKind, format: str, E: int) -> MixedWeight:
    heads = zip(format.split("+"), (v.H, v.K, v.K)[: v.parts], strict=True)
    return MixedWeight(tuple(packed(part, count * v.D, E, seed=i) for i, (part, count) in enumerate(heads)))


@functools.cache
def layer(v: LayerKind, format: str) -> tuple[Norm, QKV]:
    """`format`: of all heads, or those of q, k and v with + between them."""
    E = width(format)
    norm = Norm(v.norm, realized(numbers(E)), 1e-5, realized(numbers(E, seed=1)) if v.norm == "LAYER" else None)
    q_norm, k_norm = (realized(numbers(v.D, seed=seed)) if v.qk_norm else None for seed in (2, 3))
    rows = (v.H + (v.parts - 1) * v.K) * v.D
    weight = packed(format, rows, E) if "+" not in format else mixed(v, format, E)
    k_norm = k_norm if v.parts > 1 else None
    return norm, QKV(weight, realized(numbers(rows)) if v.bias else None, q_norm, k_norm, 1e-6, v.parts, v.value_norm)


def run(v: LayerKind, format: str, x: np.ndarray, slots: list[int], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """q of the rows that count, and the pool without its scratch block, both float32."""
    norm, qkv = layer(v, format)
    angles = realized(numbers(64, v.R, seed=4)[slots]) if v.R else None  # any numbers do for a rotation; the slot is used as the position
    q, cache = norm_qkv_rope_store(realized(x), norm, qkv, angles, cache_of(v), batch_of(slots, rows))
    Tensor.realize(q, *cache)
    return q.numpy()[:rows], contents(v, cache)


def compare(monkeypatch, v: LayerKind, format: str, variant: str) -> None:
    slots, used = [17, 2, 11, 0, 23, SCRATCH, SCRATCH], 5
    x = numbers(len(slots), width(format))
    results = []
    for which in (variant, "ref"):
        monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_qkv_rope_store={which}")
        registry.forget_choices()
        results.append(run(v, format, x, slots, used))
        assert registry.choices()[0].variant == which
    (q, pool), (want_q, want_pool) = results
    tolerance = max(TOLERANCE[part] for part in format.split("+"))
    np.testing.assert_allclose(q, want_q, atol=tolerance)
    np.testing.assert_allclose(pool, want_pool, atol=tolerance + CACHE_TOLERANCE[v.cache])
    before = contents(v, cache_of(v))
    changed = {b * S + s for b, _, _, s, _ in np.argwhere(pool != before)}
    assert changed == (set(slots[:used]) if v.parts > 1 else set()), "the batch's slots and no other"


@pytest.mark.parametrize("name", KINDS)
def test_kinds_equal_their_reference(monkeypatch, name):
    compare(monkeypatch, KINDS[name], "BF16" if name == "qwen2" else "F32", VARIANTS[0])


@pytest.mark.parametrize(("format", "variant"), [pair for pair in FORMATS_AND_VARIANTS if pair != ("F32", VARIANTS[0])])
def test_formats_and_variants_equal_their_reference(monkeypatch, format, variant):
    compare(monkeypatch, LayerKind(), format, variant)


def test_values_that_are_keys_of_another_format_than_queries(monkeypatch):
    compare(monkeypatch, KINDS["values that are keys"], "Q4_K+Q6_K", VARIANTS[0])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("format", ["Q4_K+Q4_K+Q6_K", "BF16+Q5_0+Q4_0"])
def test_parts_of_several_formats_equal_their_reference(monkeypatch, name, format):
    """As converters write them: v has more bits than q and k."""
    compare(monkeypatch, KINDS[name], format, VARIANTS[0])


def test_parts_have_the_bits_of_one_matrix(monkeypatch):
    monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_qkv_rope_store={VARIANTS[0]}")
    v, slots = KINDS["qwen2"], [17, 2, 11]
    norm, parts = layer(v, "Q8_0+Q8_0+Q8_0")
    rows = np.concatenate([file_rows("Q8_0", part.O, E, seed=i) for i, part in enumerate(parts.weight.parts)])
    whole = PackedWeight(device_bytes(pack_panels("Q8_0", rows)), "Q8_0", len(rows), E)
    found = []
    for weight in (parts.weight, whole):
        x, angles = realized(numbers(3, E)), realized(numbers(64, v.R, seed=4)[slots])
        q, cache = norm_qkv_rope_store(x, norm, replace(parts, weight=weight), angles, cache_of(v), batch_of(slots, 3))
        Tensor.realize(q, *cache)
        found.append((q.numpy(), cache.keys.float().numpy()))
    np.testing.assert_array_equal(found[0][0].view(np.uint32), found[1][0].view(np.uint32))
    np.testing.assert_array_equal(found[0][1][: P - 1], found[1][1][: P - 1])


@pytest.mark.parametrize("format", ["F32", "BF16", "Q8_0"])
def test_a_row_has_the_same_bits_in_any_batch(monkeypatch, format):
    monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_qkv_rope_store={VARIANTS[0]}")
    x, slots = numbers(24, E), list(range(23, -1, -1))
    q, pool = run(LayerKind(), format, x, slots, 24)
    for start, T in ((0, 1), (3, 5), (7, 16)):
        some, cache = run(LayerKind(), format, x[start : start + T], slots[start : start + T], T)
        np.testing.assert_array_equal(some.view(np.uint32), q[start : start + T].view(np.uint32))
        for slot in slots[start : start + T]:
            np.testing.assert_array_equal(cache[slot // S, :, :, slot % S], pool[slot // S, :, :, slot % S])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16"])
def test_append_kv_rounds_as_its_reference(monkeypatch, cache, variant):
    v, slots = LayerKind(K=3, cache=cache), [5, 23, 8, SCRATCH]
    k, v_ = (realized(numbers(len(slots), v.K, v.D, seed=seed)) for seed in (0, 1))

    def op() -> np.ndarray:
        written = append_kv(k, v_, cache_of(v), batch_of(slots, 3))
        Tensor.realize(*written)
        return written.keys.float().numpy()[: P - 1]

    got, want = (by_kernel(monkeypatch, "kv_append", which, op) for which in (variant, "ref"))
    np.testing.assert_array_equal(got, want)
    assert not np.array_equal(got, cache_of(v).keys.float().numpy()[: P - 1])


EXTREMES = {
    "a NaN": lambda row: row.put(3, np.nan),
    "an infinity": lambda row: row.put(5, -np.inf),
    "zeros": lambda row: row.fill(0),
    "too small to scale": lambda row: np.multiply(row, 1e-34, out=row),
    "the largest float32": lambda row: row.put(7, -3.4e38),
    "one far above the others": lambda row: row.put(0, 1e6),
    "halves, which round to even": lambda row: np.copyto(row, np.r_[127, np.arange(len(row) - 1) + 0.5]),
}


@pytest.mark.parametrize("variant", ["ref", *VARIANTS])
@pytest.mark.parametrize("cache", PACKED_KV)
def test_packed_bytes_are_those_of_the_definition(monkeypatch, cache, variant):
    """Also of rows with the numbers that have to be taken care of, and each row has the bytes that it has alone."""
    v = LayerKind(K=2, D=48, cache=cache)
    rows = np.concatenate([numbers(2, len(EXTREMES), v.K, v.D, seed=5), 30 * numbers(2, 4, v.K, v.D, seed=6)], axis=1)
    for t, change in enumerate(EXTREMES.values()):
        change(rows[t % 2, t, t % v.K])
    slots = np.random.default_rng(1).permutation((P - 1) * S)[: rows.shape[1]].tolist()
    want = numbers(P, 2, v.K, S, v.D, seed=9)
    for t, slot in enumerate(slots):
        want[slot // S, :, :, slot % S] = rows[:, t]
    packed = pack_blocks(PACKED_KV[cache], want)

    def op(chosen: list[int]) -> np.ndarray:
        k, v_ = (realized(side[chosen]) for side in rows)
        written = append_kv(k, v_, cache_of(v), batch_of([slots[t] for t in chosen], len(chosen)))
        Tensor.realize(*written)
        return written.keys.numpy()[: P - 1]

    np.testing.assert_array_equal(by_kernel(monkeypatch, "kv_append", variant, lambda: op(list(range(len(slots))))), packed[: P - 1])
    read = unpack_blocks(PACKED_KV[cache], packed, v.K, S, v.D)
    at = [(slots[t] // S, t % 2, t % v.K, slots[t] % S) for t in range(len(EXTREMES))]
    assert [bool(np.isnan(read[i]).all()) for i in at] == [name in ("a NaN", "an infinity") for name in EXTREMES]
    assert not read[at[2]].any() and not read[at[3]].any() and np.isfinite(read[at[4]]).all()


@pytest.mark.parametrize("variant", ["ref", *VARIANTS])
@pytest.mark.parametrize("cache", ["float32", "int4"])
def test_rows_without_a_slot_are_not_stored(monkeypatch, cache, variant):
    """Only the reference stores them, in the scratch block."""
    v, slots = LayerKind(K=2, D=48, cache=cache), [S + 3, NO_SLOT, 5, NO_SLOT]
    rows = numbers(2, len(slots), v.K, v.D, seed=5)

    def stored(chosen: list[int]) -> np.ndarray:
        k, v_ = (realized(np.ascontiguousarray(side[chosen])) for side in rows)
        written = append_kv(k, v_, cache_of(v), batch_of([slots[t] for t in chosen], len(chosen)))
        Tensor.realize(*written)
        return written.keys.numpy()[: P - 1]

    every, some = (by_kernel(monkeypatch, "kv_append", variant, lambda chosen=chosen: stored(chosen)) for chosen in ([0, 1, 2, 3], [0, 2]))
    np.testing.assert_array_equal(every, some)


def test_odd_head_dimensions_go_to_the_reference(monkeypatch):
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    registry.forget_choices()
    v, slots = LayerKind(D=8, R=8), [3, 1]
    q, pool = run(v, "F32", numbers(2, E), slots, 2)
    assert {(c.stem, c.variant) for c in registry.choices()} == {("norm_qkv_rope_store", "ref"), ("kv_append", "ref")}
    assert all("head dimension in multiples of 16; the model has 8" in c.why for c in registry.choices())
    norm, qkv = layer(v, "F32")
    x = norm(Tensor(numbers(2, E))).numpy() @ qkv.weight.dense().numpy().T
    np.testing.assert_allclose(pool[0, 1, :, slots].reshape(2, -1), x[:, -v.K * v.D :], atol=1e-5)
    assert q.shape == (2, v.H, v.D)
