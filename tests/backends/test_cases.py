"""The cases of the self-test: their recorded answers are up to date, right kernels pass, and what is wrong is named."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.kernels.answers import PATH, answers
from tinyvllm.backends import cases, registry
from tinyvllm.backends.cases import Case, Site, case_of, inputs, wrong
from tinyvllm.backends.cases.case import FEATURES, Sizes
from tinyvllm.backends.cases.expected import computed_answer
from tinyvllm.backends.collecting import collecting_kernels
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.operands import DrawInputs
from tinyvllm.backends.source import kernel_text
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout, formats_in
from tinyvllm.quant.kv import KV_FORMATS

CPU = Placement("CPU")
VARIANTS = registry.usable_variants(CPU)
PASSING = [Case("embed", "BF16", "panels"), Case("embed", "Q8_0", "rows"), Case("matmul", "Q5_0"), Case("norm_gate_up_silu", "BF16")]
PASSING += [Case("norm_head", "F16"), Case("norm_qkv_rope_store", "Q4_0", cache="F16"), Case("kv_append", cache="BF16"), Case("advance")]
PASSING += [Case("attention_decode", cache="F32", head_dim=64), Case("attention_prefill", cache="BF16", head_dim=48), Case("kv_copy")]
PASSING += [Case("sample"), Case("lora_bias"), Case("gated_delta"), Case("gated_delta", drafts=True)]
PASSING += [Case("sample", features=features, vocabulary=V) for features, V in zip(FEATURES, (300, 301, 1000, 3072) * 2, strict=True)]
PASSING += [Case("attention_decode", cache="BF16", head_dim=64, heads=(14, 2), table_blocks=64)]
PASSING += [Case("attention_prefill", cache="KV_INT8", head_dim=128, heads=(12, 3), table_blocks=3)]
PASSING += [Case("attention_decode", cache="KV_INT8", head_dim=48), Case("attention_prefill", cache="KV_INT4", head_dim=64)]
PASSING += [Case("attention_decode", cache="KV_FP8", head_dim=128), Case("norm_qkv_rope_store", "BF16", cache="KV_INT4")]
PASSING += [Case("attention_decode", cache="BF16", head_dim=64, sinks=True), Case("attention_prefill", cache="F16", head_dim=48, cap=True)]
PASSING += [Case("kv_append", cache=cache) for cache in KV_FORMATS]
PASSING += [Case("attention_decode", cache="KV_INT8", head_dim=512)]
PASSING += [Case("norm_qkv_rope_store", "Q4_K+Q6_K", cache="F16"), Case("norm_qkv_rope_store", "Q4_0+INT4_G128+NF4", cache="KV_INT8")]
PASSING += [Case("embed", format, layout, sizes=Sizes(256, 200, 0.0)) for format, layout in (("BF16", "panels"), ("Q6_K", "rows"))]
PASSING += [Case("matmul", "Q4_K", sizes=Sizes(512, 90, 0.0)), Case("norm_gate_up_silu", "Q8_0", sizes=Sizes(96, 64, 1e-5))]
PASSING += [Case("norm_head", format, sizes=Sizes(256, 200, 1e-6)) for format in ("F32", "BF16", "INT4_G128", "Q6_K")]
PASSING += [Case("norm_qkv_rope_store", format, cache=cache, sizes=Sizes(256, 512, 1e-5, (4, 2), 64))
            for format, cache in (("BF16", "BF16"), ("Q4_K", "F16"), ("Q8_0", "KV_INT8"), ("F16", "KV_INT4"))]  # fmt: skip


@pytest.fixture(scope="module")
def recorded():
    with np.load(PATH, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def test_the_recorded_answers_are_up_to_date(recorded):
    """`python -m tests.kernels.answers` writes them."""
    fresh = answers()
    assert set(fresh) == set(recorded)
    for name, array in fresh.items():
        assert recorded[name].dtype == array.dtype, name
        np.testing.assert_allclose(recorded[name], array, rtol=1e-6, atol=1e-7, err_msg=name)


def test_the_file_is_small():
    kinds = {inputs.numbers_of(format) for layout in Layout for format in formats_in(layout)}
    assert PATH.stat().st_size < 82_000 + 8_000 * len(kinds)


@pytest.mark.parametrize("variant", [VARIANTS[0], "plain"])
@pytest.mark.parametrize("case", PASSING, ids=lambda case: case.name)
def test_a_right_kernel_passes_with_room_to_spare(case, variant, recorded):
    results = cases.run(case, Site(registry.BACKENDS["CPU"], variant, "CPU"))
    assert wrong(case, results, recorded) is None
    for arrays in results:
        for name, got in arrays.items():
            want = recorded[f"{case.answer}/{name}"] if case.is_recorded else computed_answer(case)[name]
            got += np.asarray(0.3 * case.tolerances.get(name, 0) * np.abs(want).max(), got.dtype)
    assert wrong(case, results, recorded) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: y[:, :40], "y has the shape (3, 40), expected (3, 50)"),
        (lambda y: np.where(np.arange(y.size).reshape(y.shape) == 77, np.nan, y), "y of 3 rows is not finite in 1 of 150 numbers"),
        (lambda y: y + np.where(np.arange(y.size).reshape(y.shape) == 77, 0.25, 0), "largest error 0.25 in y of 3 rows, expected at most"),
        (lambda y: np.roll(y, 1, axis=0), "largest error"),
    ],
)
def test_what_is_wrong_is_named(change, words, recorded):
    case, want = Case("matmul", "F32"), recorded["matmul float/y"][:3]
    assert wrong(case, [{"y": want}], recorded) is None
    assert words in (wrong(case, [{"y": want}, {"y": change(want)}], recorded) or "")


@pytest.mark.parametrize(
    ("stem", "facts", "name"),
    [
        ("matmul", {"format": "Q8_0", "layout": "tiles"}, "matmul Q8_0"),
        ("embed", {"format": "BF16", "layout": Layout.PANELS}, "embed BF16 panels"),
        ("norm_qkv_rope_store", {"format": "F16", "layout": "rows", "cache_format": "F16"}, "norm_qkv_rope_store F16 F16"),
        ("norm_qkv_rope_store", {"format": "Q4_K+Q6_K", "layout": "tiles", "cache_format": "F16"}, "norm_qkv_rope_store Q4_K+Q6_K F16"),
        ("norm_head", {"format": "Q4_K+Q6_K", "layout": "tiles"}, "norm_head Q4_K"),
        ("attention_decode", {"cache_format": "BF16", "head_dim": 128}, "attention_decode BF16 D=128"),
        ("attention_decode", {"cache_format": "BF16", "head_dim": 96}, "attention_decode BF16 D=48"),
        ("attention_prefill", {"cache_format": "KV_INT8", "head_dim": 96}, "attention_prefill KV_INT8 D=48"),
        ("attention_prefill", {"cache_format": "KV_INT4", "head_dim": 96}, "attention_prefill KV_INT4 D=64"),
        ("attention_decode", {"cache_format": "BF16", "head_dim": 512}, "attention_decode BF16 D=48"),
        ("attention_decode", {"cache_format": "BF16", "head_dim": 64, "sinks": True}, "attention_decode BF16 D=64 sinks"),
        ("attention_prefill", {"cache_format": "F16", "head_dim": 256, "cap": True}, "attention_prefill F16 D=48 capped"),
        ("advance", {}, "advance"),
        ("sample", {"vocabulary": 3072, "features": "sampled+top_k+top_p"}, "sample sampled+top_k+top_p"),
        ("sample", {"vocabulary": 299, "features": "sampled"}, "sample"),
        ("sample", {"vocabulary": 3072, "features": "sampled+top_p+biased"}, "sample"),
        ("sample", {"vocabulary": 3072}, "sample"),
        ("gated_delta", {"head_dim": 128, "outputs": 128, "drafts": 16}, "gated_delta drafts"),
        ("quantize", {}, None),
    ],
)
def test_the_case_of_a_shape(stem, facts, name):
    case = case_of(stem, ShapeFacts(CPU, **facts))
    assert (case.name if case else None) == name
    assert case_of(stem, None) is None


def test_wide_heads_of_gpus_have_a_case():
    for stem, cache in (("attention_decode", "KV_INT4"), ("attention_prefill", "BF16")):
        case = case_of(stem, ShapeFacts(Placement("CUDA"), cache_format=cache, head_dim=288, query_heads=8, kv_heads=2))
        assert case == Case(stem, cache=cache, head_dim=512) and not case.is_recorded


def test_attention_on_the_cpu_is_tested_with_the_models_own_kernel():
    facts = {"cache_format": "BF16", "head_dim": 64, "block_size": 16, "table_blocks": 40}
    own = case_of("attention_decode", ShapeFacts(CPU, query_heads=32, kv_heads=8, **facts))
    assert own is not None and (own.heads, own.table_blocks) == ((32, 8), 40)
    for at, heads in ((CPU, (8, 8)), (CPU, (8, 1)), (CPU, (512, 128)), (Placement("CUDA"), (32, 8))):  # nothing repeats, or too much
        usual = case_of("attention_decode", ShapeFacts(at, query_heads=heads[0], kv_heads=heads[1], **facts))
        assert usual == own and (usual.heads, usual.table_blocks) == ((4, 2), 0), "verdicts do not depend on it"


def test_draws_on_the_cpu_are_tested_with_the_models_own_kernel():
    case = case_of("sample", ShapeFacts(CPU, vocabulary=3072, features="sampled+top_p"))
    assert case is not None and case.vocabulary == 3072
    lines, logits = Tensor.zeros(1, 12, dtype=dtypes.int32, device="CPU"), Tensor.empty(1, 3072, device="CPU")
    how = DrawInputs(lines, Tensor.empty(1, dtype=dtypes.int32, device="CPU"), 64, sampled=True, top_p=True)
    with collecting_kernels() as tested:
        cases.run(case, Site(registry.BACKENDS["CPU"], VARIANTS[0], "CPU"))
    with collecting_kernels() as own:
        registry.BACKENDS["CPU"].sample(VARIANTS[0], logits, how)
    assert [kernel_text(kernel) for kernel in tested] == [kernel_text(kernel) for kernel in own]
    assert case_of("sample", ShapeFacts(Placement("CUDA"), vocabulary=3072, features="sampled+top_p")) == Case("sample")


def test_a_head_that_differs_from_its_repetition_is_wrong(recorded):
    case = Case("attention_decode", cache="BF16", head_dim=64, heads=(12, 3))
    backend = registry.BACKENDS["CPU"]

    class LastHeadOff(type(backend)):  # type: ignore[misc]
        def attention_decode(self, *arguments):
            out = super().attention_decode(*arguments)
            off = np.zeros((1, 12 * 64), np.float32)
            off[:, -1] = 1e-6
            return out + Tensor(off, device="CPU")

    assert "not finite" in (wrong(case, cases.run(case, Site(LastHeadOff(), VARIANTS[0], "CPU")), recorded) or "")


def test_inputs_are_not_rounded_by_any_product():
    """Blocks of 32 have one sum of squares and contain 127 / 64; so the norm scales by 1, and int8 and bfloat16 hold every number."""
    x = inputs.activations(544).astype(np.float64)
    np.testing.assert_array_equal((x * x).mean(1) + inputs.EPS, 1)
    assert (np.abs(x).reshape(5, -1, 32).max(2) == 127 / 64).all() and (x * 64 == np.rint(x * 64)).all()


def test_numbers_do_not_depend_on_a_library():
    assert inputs.integers(1, 0, 1000, 6).tolist() == [int(n) for n in _splitmix(1, 1000, 6)]


def _splitmix(seed: int, limit: int, count: int) -> list[int]:
    """In Python's integers, from the paper."""
    found, mask = [], (1 << 64) - 1
    for i in range(1, count + 1):
        z = (i * 0x9E3779B97F4A7C15 + (seed << 40)) & mask
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        found.append((z ^ z >> 31) % limit)
    return found


def test_small_products_on_the_cpu_are_tested_with_the_models_own_kernel():
    facts = {"format": "Q8_0", "layout": Layout.PANELS, "inputs": 256, "outputs": 1024}
    own = case_of("norm_gate_up_silu", ShapeFacts(CPU, eps=1e-5, **facts))
    assert own is not None and own.sizes == Sizes(256, 1024, 1e-5) and not own.is_recorded
    assert case_of("matmul", ShapeFacts(CPU, norm="", **facts)).sizes == Sizes(256, 1024, 0.0)
    heads = {"head_dim": 64, "kv_heads": 2, "block_size": 16, "cache_format": "F16"}
    assert case_of("norm_qkv_rope_store", ShapeFacts(CPU, eps=1e-5, **facts | heads)).sizes == Sizes(256, 1024, 1e-5, (12, 2), 64)
    assert case_of("norm_qkv_rope_store", ShapeFacts(CPU, eps=1e-5, **facts | heads | {"block_size": 32})).sizes is None
    assert case_of("embed", ShapeFacts(CPU, **facts)).sizes == Sizes(256, 1024, 0.0)
    assert case_of("embed", ShapeFacts(CPU, scaled=True, **facts)).sizes is None
    for at, other in ((CPU, {"outputs": 4096}), (CPU, {"norm": "LAYER"}), (Placement("CUDA"), {})):  # too many weights, other constants
        usual = case_of("norm_gate_up_silu", ShapeFacts(at, eps=1e-5, **facts | other))
        assert usual == own and usual.sizes is None, "verdicts do not depend on it"


def test_a_model_with_small_products_compiles_no_others_for_its_tests():
    """Of its kernels and those of their cases, each stem has as many codes as the model's products have sizes."""
    normed = {"norm": "RMS", "eps": 1e-5}
    products = (("embed", 2048, {}), ("matmul", 256, {"norm": ""}), ("norm_gate_up_silu", 1024, normed), ("norm_head", 3072, normed))
    needs = [(stem, ShapeFacts(CPU, 256, outputs, "BF16", Layout.PANELS, **more)) for stem, outputs, more in products]
    backend, variant = registry.BACKENDS["CPU"], VARIANTS[0]
    with collecting_kernels() as of_cases:
        for stem, facts in needs:
            cases.run(case_of(stem, facts), Site(backend, variant, "CPU"))
    own = [{"E": 256, "V": 2048}, {"I": 256, "O": 256}, {"E": 256, "F": 1024}, {"E": 256, "V": 3072}]
    codes = {kernel.compiled for kernel in of_cases}
    assert len(codes) == len(needs) and all(any(set(sizes.items()) <= set(code.defines) for code in codes) for sizes in own)
