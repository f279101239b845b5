"""The tables of limits: every shape that a kernel cannot run is declared, with a reason in words.

The oracle below states each condition once more as plain arithmetic, so that a rule that is lost or changed fails here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tinyvllm.backends.cuda import limits as cuda_limits
from tinyvllm.backends.cuda.plan import GPU
from tinyvllm.backends.limits import ShapeFacts, at_most, between, first_reason, less_than, multiple_of, power_of_two
from tinyvllm.backends.registry import BACKENDS, STEMS
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout

SHARED = 64 << 10  # bytes that a block of threads has on the pretended GPU, where not all heads fit
KINDS = ("CPU", "CUDA", "METAL")
LAYOUTS = {"CPU": Layout.PANELS, "CUDA": Layout.TILES, "METAL": Layout.ROWS}
EXPERTS = ("norm_route", "experts_gate_up_silu", "experts_down")
MATRICES = {"norm_qkv_rope_store": 3, "norm_gate_up_silu": 2, "experts_gate_up_silu": 2}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(cuda_limits, "gpu_of", lambda placement: GPU(132, SHARED, 100 << 10))


def supported(kind: str, stem: str) -> ShapeFacts:
    """A shape that every backend's kernel runs."""
    return ShapeFacts(
        Placement(kind), inputs=256, outputs=64, format="BF16", layout=LAYOUTS[kind],
        matrices=MATRICES.get(stem, 1) if kind == "METAL" else 1, norm="RMS", head_dim=64, query_heads=8, kv_heads=2, block_size=16,
        block_bytes=4096, cache_format="BF16", cache_elements=1 << 20, cache_bytes=2 << 20, vocabulary=1000,
    )  # fmt: skip


CHANGES = {
    "inputs": (32, 48, 64, 256, 288, 2048),
    "outputs": (16, 20, 24, 64),
    "format": ("BF16", "Q8_0", "Q4_K", "Q5_0+Q5_0+Q8_0", "Q5_0+Q5_0+Q6_K"),
    "layout": tuple(Layout),
    "matrices": (1, 2, 3, 4),
    "norm": ("RMS", "LAYER"),
    "head_dim": (8, 16, 24, 32, 48, 64, 128, 192, 240, 256, 264, 272, 288, 512, 528),
    "query_heads": (2, 64, 66, 128, 130),
    "block_size": (4, 8, 12, 16, 48, 256, 512),
    "block_bytes": (4, 8, 16, 24, 4096),
    "cache_format": ("F32", "F16", "BF16", "KV_INT8", "KV_INT4"),
    "cache_elements": ((1 << 34) - 1, 1 << 34),
    "cache_bytes": ((64 << 30) - 1, 64 << 30),
    "vocabulary": (1 << 18, (1 << 18) + 1),
    "experts": (128, 1024, 1025),
    "ungrouped": (False, True),
    "drafts": (0, 3),
}


def least_shared(f: ShapeFacts) -> int:
    """Bytes of CUDA's smallest block of threads: above 128 features a warp for each sixteen query heads, and a part of a tile."""
    D, warps, packed = f.head_dim, -(-f.query_heads // f.kv_heads // 16), f.cache_format.startswith("KV_")
    row = D // 2 if f.cache_format == "KV_INT4" else D
    if D <= 128:
        return 2 * (4 * (40 * row + 64) if packed else 128 * (2 * D + 16))
    sums, queries = (32 * D, 32 * D) if D > 256 else (64 * D, 32 * D - 2048)
    return warps * (sums + queries) + (40 * row + 64 if packed else 16 * (2 * D + 16))


def runs(kind: str, stem: str, f: ShapeFacts) -> bool:
    """Whether the kernels can run a shape: what the sources of kernels/ need."""
    width = 256 if kind != "CPU" and "_K" in f.format else 32
    inputs, heads, rms, tiles = f.inputs % width == 0, f.head_dim % 16 == 0, f.norm == "RMS", kind != "CUDA" or f.layout is Layout.TILES
    if stem in ("embed", "pack_tiles"):
        return inputs
    if stem == "matmul":
        return inputs and tiles and f.matrices == 1
    if stem == "lora_bias":
        return f.inputs % (32 if kind == "METAL" else 16) == 0 and f.outputs % 16 == 0 and rms
    if stem == "gated_delta":
        return heads and f.outputs % 16 == 0 and (kind == "CPU" or f.head_dim <= 256)
    if stem in EXPERTS and kind == "METAL":
        fits = inputs and f.experts <= 1024 and (rms or stem == "experts_down")
        return fits and {"norm_route": True, "experts_down": f.matrices == 1 and f.outputs % 4 == 0}.get(stem, f.matrices == 2)
    if stem in EXPERTS and kind == "CUDA":
        norm = rms or stem == "experts_down"
        return inputs and norm and f.experts <= 1024 and (stem == "norm_route" or (tiles and f.outputs % 16 == 0 and f.matrices == 1))
    if stem == "norm_route":
        return inputs and rms and f.matrices == 1
    if stem == "experts_gate_up_silu":
        return inputs and rms and f.outputs % 16 == 0 and not f.ungrouped
    if stem == "experts_down":
        return inputs and f.outputs % 16 == 0 and f.matrices == 1 and not f.ungrouped
    if stem == "norm_qkv_rope_store":
        return inputs and tiles and heads and (kind == "CPU" or rms) and (kind != "METAL" or f.matrices == 3)
    if stem == "norm_gate_up_silu":
        return inputs and tiles and rms and (f.outputs % 16 == 0 if kind != "METAL" else f.matrices == 2)
    if stem == "norm_head":
        return inputs and tiles and (kind == "CPU" or rms) and (kind == "METAL" or f.matrices == 1)
    if stem == "kv_append":
        return heads
    if stem == "kv_copy":
        return f.block_bytes % (8 if kind == "CPU" else 16) == 0
    if stem == "sample":
        return kind == "CPU" or f.vocabulary <= 1 << 18
    if stem in ("attention_decode", "attention_prefill"):
        fits = (
            heads
            and 32 <= f.head_dim <= 512
            and (kind == "CPU" or f.head_dim <= 256 or f.head_dim % 32 == 0)
            and (kind == "METAL" or f.cache_format != "KV_INT4" or f.head_dim % 32 == 0)
        )
        if kind != "CPU":
            fits = (
                fits
                and f.block_size in (8, 16, 32, 64, 128, 256)
                and f.query_heads // f.kv_heads <= (64 if kind == "CUDA" and f.head_dim <= 256 else 32)
            )
        if kind == "CUDA":
            fits = fits and f.cache_format != "F32" and f.cache_bytes < 64 << 30
            fits = fits and least_shared(f) <= SHARED
        return fits and (kind != "METAL" or f.cache_elements < 1 << 34)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_say_what_the_kernels_can_run(kind):
    """Each fact changed alone, and each pair of facts."""
    backend = BACKENDS[kind]
    for stem in sorted(backend.stems):
        base = supported(kind, stem)
        assert backend.unsupported(stem, base) is None and runs(kind, stem, base)
        for (a, values), (b, others) in itertools.combinations(CHANGES.items(), 2):
            for x, y in itertools.product(values, others):
                facts = replace(base, **{a: x, b: y})
                reason = backend.unsupported(stem, facts)
                assert (reason is None) == runs(kind, stem, facts), (stem, a, x, b, y, reason)


@pytest.mark.parametrize("kind", KINDS)
def test_every_op_of_a_backend_has_a_row(kind):
    """Also without limits: an op that is missing in the table has no kernel there."""
    lacking = {"CPU": {"pack_tiles"}, "METAL": {"pack_tiles"}, "CUDA": set()}
    assert set(STEMS) - BACKENDS[kind].stems == lacking[kind]


def test_reasons_name_what_is_supported_and_what_the_model_has():
    facts = replace(supported("CUDA", "attention_decode"), head_dim=40, norm="LAYER")
    cuda = BACKENDS["CUDA"]
    assert cuda.unsupported("attention_decode", facts) == "kernel supports head dimension in multiples of 16; the model has 40"
    assert cuda.unsupported("norm_head", facts) == "kernel supports RMSNorm only; the model uses LayerNorm"
    wide = cuda.unsupported("attention_prefill", replace(facts, head_dim=256, query_heads=128))
    assert wide == "kernel needs 98560 bytes of shared memory at head dimension 256; a block of threads has 65536 here"
    assert "tiles only; these BF16 weights are in panels" in str(cuda.unsupported("matmul", replace(facts, layout=Layout.PANELS)))
    assert "KV cache in F16 or BF16 or KV_FP8 or KV_INT8 or KV_INT4; the cache is F32" in str(
        cuda.unsupported("attention_decode", replace(facts, head_dim=64, cache_format="F32"))
    )
    metal = BACKENDS["METAL"]
    stored = replace(supported("METAL", "norm_qkv_rope_store"), matrices=1)
    assert metal.unsupported("norm_qkv_rope_store", stored) == "kernel supports 3 matrices (q, k and v); the weight has 1"


@pytest.mark.parametrize("cache", ["F16", "BF16", "KV_INT8", "KV_INT4", "KV_FP8"])
def test_heads_of_all_sizes_fit_where_a_block_of_threads_has_least(monkeypatch, cache):
    """99 KiB: sm_86, sm_89 and sm_120."""
    monkeypatch.setattr(cuda_limits, "gpu_of", lambda placement: GPU(82, 99 << 10, 100 << 10))
    for D in range(32, 513, 32):
        facts = replace(supported("CUDA", "attention_prefill"), cache_format=cache, head_dim=D, query_heads=128 if D <= 256 else 64)
        assert BACKENDS["CUDA"].unsupported("attention_prefill", facts) is None, D


def test_rules():
    facts = ShapeFacts(Placement("CPU"), inputs=48, block_size=24)
    assert (
        first_reason((multiple_of("inputs", 16), at_most("inputs", 48), less_than("inputs", 49), between("inputs", 48, 48)), facts) is None
    )
    for rule, words in (
        (multiple_of("inputs", 32), "inputs of the weight in multiples of 32"),
        (multiple_of("inputs", lambda f: f.block_size + 1), "in multiples of 25"),
        (at_most("inputs", 47), "up to 47"),
        (less_than("inputs", 48), "below 48"),
        (between("inputs", 49, 64), "from 49 to 64"),
        (power_of_two("block_size", 8, 256), "a power of two from 8 to 256"),
    ):
        assert words in str(rule(facts)), rule(facts)
    with pytest.raises(KeyError):
        multiple_of("imputs", 32)


def test_a_limit_is_declared_in_one_place():
    """No file of a backend except its table has a condition with a reason of its own."""
    for path in (Path(cuda_limits.__file__).parents[1]).rglob("*.py"):
        if path.name != "limits.py":
            assert "kernel supports" not in path.read_text(), path
