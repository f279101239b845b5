"""The self-test of kernels on the emulated GPUs: right kernels pass, wrong ones are replaced and named, another driver tests again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tinygrad import Tensor

from tests.emulator.driver import cuda_device
from tests.emulator.metal_runtime import metal_device
from tests.formats import sampled_formats
from tests.planting import forget_code, plant
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import autotune, cases, registry, selftest
from tinyvllm.backends.cases import Case, Site
from tinyvllm.backends.cases.inputs import OTHER_BITS
from tinyvllm.backends.cuda import call as cuda
from tinyvllm.backends.cuda import hopper_plan
from tinyvllm.backends.cuda import launch as cuda_launch
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.selftest import test_kernels as check_kernels
from tinyvllm.bridge import download, mapped
from tinyvllm.config.engine import DEFAULT_MODEL
from tinyvllm.ops.copy import copy_blocks
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.kv import KV_FORMATS
from tinyvllm.quant.random_rows import packable_width
from tinyvllm.storage.cache import CacheFolder
from tinyvllm.storage.folders import require_private

DEVICES = {"CUDA": cuda_device, "METAL": metal_device}
BASE = {"CUDA": "sm_80", "METAL": "apple7"}
_CACHE = {"cache_format": "BF16", "head_dim": 64, "block_size": 16, "query_heads": 4, "kv_heads": 2}


@pytest.fixture(scope="module", params=DEVICES)
def device(request) -> Iterator[str]:
    with DEVICES[request.param](seed=1):
        yield request.param


@pytest.fixture(autouse=True)
def switched_on(monkeypatch, tmp_path):
    """Verdicts in a folder of the test's own."""
    cache = CacheFolder(require_private(tmp_path / "cache"))
    monkeypatch.setattr(selftest, "open_cache", lambda: cache)
    monkeypatch.setenv("TINYVLLM_SELFTEST", "on")
    registry.forget_replaced()
    yield
    monkeypatch.undo()
    forget_code()
    registry.forget_replaced()
    registry.forget_choices()


def needs(device: str) -> dict[str, ShapeFacts]:
    at = Placement(device)
    product = {"inputs": 96, "outputs": 64, "format": "BF16", "layout": str(registry.BACKENDS[device].layout)}
    return {
        "embed": ShapeFacts(at, **product), "kv_append": ShapeFacts(at, **_CACHE), "matmul": ShapeFacts(at, **product),
        "attention_decode": ShapeFacts(at, **_CACHE), "advance": ShapeFacts(at), "kv_copy": ShapeFacts(at, block_bytes=320),
        "sample": ShapeFacts(at, vocabulary=300), "gated_delta": ShapeFacts(at, head_dim=32, outputs=48),
    }  # fmt: skip


def check(device: str, *stems: str):
    return check_kernels(Placement(device), lambda: [(stem, needs(device)[stem]) for stem in stems])


PACKED = [Case("pack_tiles", format) for format in sampled_formats(Layout.TILES)]
LONG = [
    *(Case("norm_qkv_rope_store", "BF16", cache=cache) for cache in KV_FORMATS),
    Case("attention_prefill", cache="KV_INT4", head_dim=64),
]
LONG += [Case("attention_decode", cache="KV_INT8", head_dim=48), Case("kv_append", cache="KV_FP8")]
LONG += [Case("attention_prefill", cache="BF16", head_dim=64, cap=True)]
LONG += [Case("attention_decode", cache="KV_INT8", head_dim=512), Case("attention_prefill", cache="BF16", head_dim=512)]
LONG += [Case("norm_gate_up_silu", "BF16"), Case("norm_head", "Q8_0"), Case("attention_prefill", cache="BF16", head_dim=48)]
# v in another format, and a packed cache; gate and up apart. Their answers are computed.
MIXED = [Case("norm_qkv_rope_store", "INT4_G64+Q6_K", cache="KV_INT8"), Case("norm_gate_up_silu", "Q8_0+NF4")]
LONG += [Case("norm_qkv_rope_store", "Q8_0+Q4_K+FP8_G128", cache="KV_INT4"), Case("norm_qkv_rope_store", "F16+MXFP4", cache="KV_FP8")]
RIGHT = [Case("norm_qkv_rope_store", "Q4_0", cache="F16"), Case("attention_decode", cache="KV_INT4", head_dim=64), *MIXED]
RIGHT += [
    Case("attention_decode", cache="BF16", head_dim=64, cap=True, sinks=True),
    Case("attention_prefill", cache="F16", head_dim=48, sinks=True),
]
RIGHT += [Case("lora_bias"), Case("gated_delta"), Case("gated_delta", drafts=True), Case("norm_route", "F32")]
RIGHT += [Case("experts_gate_up_silu", "Q4_K"), Case("experts_down", "BF16")]
RIGHT += [*(pytest.param(case, marks=pytest.mark.long) for case in LONG)]


def on_device(device: str, case: Case) -> Case:
    """Metal names the format of each part."""
    if device == "CUDA" or not case.is_mixed:
        return case
    parts = case.format.split("+")
    return replace(case, format="+".join([*parts[:1] * (3 - len(parts)), *parts] if case.stem == "norm_qkv_rope_store" else parts))


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.name)
def test_right_kernels_pass(device, case):
    case = on_device(device, case)
    with autotune.untuned():
        results = cases.run(case, Site(registry.BACKENDS[device], BASE[device], device))
    assert cases.wrong(case, results, selftest._answers()) is None


@pytest.mark.long
@pytest.mark.parametrize("cache", ["BF16", "KV_INT8"])
def test_wide_heads_of_a_small_gpu_pass(monkeypatch, cache):
    """99 KiB of shared memory, from the driver's attributes to the launch."""
    monkeypatch.setattr("tests.emulator.driver.MAX_SHARED_BYTES", 99 << 10)
    with cuda_device(seed=1, capability=(8, 9)):
        backend = registry.BACKENDS["CUDA"]
        for case in (Case(stem, cache=cache, head_dim=512) for stem in ("attention_decode", "attention_prefill")):
            facts = ShapeFacts(Placement("CUDA"), **_CACHE | {"cache_format": cache, "head_dim": 512})
            assert backend.unsupported(case.stem, facts) is None
            assert cases.wrong(case, cases.run(case, Site(backend, BASE["CUDA"], "CUDA")), selftest._answers()) is None


@pytest.mark.parametrize("stem", ["attention_decode", "attention_decode_team"])
def test_both_kernels_of_decode_are_tested(monkeypatch, stem):
    """A few sequences, and more of them that share no blocks."""
    case = Case("attention_decode", cache="F16", head_dim=64)
    with cuda_device(seed=1):
        plant(monkeypatch, {stem})
        results = cases.run(case, Site(registry.BACKENDS["CUDA"], "sm_80", "CUDA"))
    assert ["largest error" in (cases.wrong(case, [arrays], selftest._answers()) or "") for arrays in results] == {
        "attention_decode": [True, False, True], "attention_decode_team": [False, True, False]}[stem]  # fmt: skip


@pytest.mark.parametrize("stem, why", [("norm_head", "largest error"), ("norm_qkv_rope_store", "largest error")])
def test_a_wrong_part_of_a_mixed_product_is_found(monkeypatch, stem, why):
    """v is a product of norm_head for few rows; the fused kernel has q and k."""
    case = Case("norm_qkv_rope_store", "INT4_G64+Q6_K", cache="KV_INT8")
    with cuda_device(seed=1):
        plant(monkeypatch, {stem})
        forget_code()
        results = cases.run(case, Site(registry.BACKENDS["CUDA"], "sm_80", "CUDA"))
    assert why in (cases.wrong(case, results, {}) or "")


STEMS = ["embed", "kv_append", "attention_decode", "gated_delta", "advance", "kv_copy", pytest.param("sample", marks=pytest.mark.long)]


@pytest.mark.parametrize("stem", [*STEMS, pytest.param("matmul", marks=pytest.mark.long)])
def test_a_wrong_kernel_is_replaced_and_named(monkeypatch, device, caplog, stem):
    stems = {stem, "matvec"} if stem == "matmul" else {stem}
    assert check(device, stem).replaced == {}, "the right kernel passes"
    selftest.open_cache().path.joinpath("selftest.json").unlink()
    best = registry.usable_variants(Placement(device), stem)[0]
    planted = plant(monkeypatch, stems, BASE[device])
    report = check(device, stem)
    assert planted
    named = next(iter(report.replaced))
    assert named.startswith(f"{best} {stem}")
    assert f"the kernel {stem}" in caplog.text and f"is wrong on {device} ({registry.architecture_of(Placement(device))})" in caplog.text
    instead = registry.replaceable_variant(stem, Placement(device), needs(device)[stem])
    assert instead not in (best, BASE[device]) and f"; {instead or 'ref'} is used instead" in caplog.text


HOPPER = [Case("matmul", "BF16"), Case("norm_gate_up_silu", "F16"), Case("attention_prefill", cache="F16", head_dim=64, sinks=True)]


@pytest.mark.parametrize("case", HOPPER, ids=lambda case: case.name)
def test_hoppers_kernels_pass(case):
    """Many rows, with the bits of a few, or of the other variant."""
    with cuda_device(seed=1) as driver:
        results = cases.run(case, Site(registry.BACKENDS["CUDA"], hopper_plan.HOPPER, "CUDA"))
        assert any(name.endswith("_hopper") for name in driver.launched)
    assert results[-1][OTHER_BITS].tolist() == [0] and cases.wrong(case, results, selftest._answers()) is None


# The last bit of a sum, as a tensor core that rounds differently would have it; a weight.
ROUNDED = {
    "matmul": ("matmul_hopper", "total[j / 4][j % 4] += sums", "total[j / 4][j % 4] += 1.0000002f * sums"),
    "attention_prefill": ("attention_prefill_hopper", "add_tile(state, s, keys", "s[0][0] *= 1.01f, add_tile(state, s, keys"),
}


@pytest.mark.parametrize("stem", ROUNDED)
def test_a_kernel_of_hopper_with_other_bits_is_replaced(monkeypatch, stem):
    kernel, old, new = ROUNDED[stem]

    def change(_: str, text: str) -> str:
        assert old in text
        return text.replace(old, new)

    monkeypatch.setattr(cuda, "ON_REQUEST", ())
    facts = needs("CUDA").get(stem, ShapeFacts(Placement("CUDA"), **_CACHE))
    with cuda_device(seed=1):
        planted = plant(monkeypatch, {kernel}, change=change)
        report = check_kernels(Placement("CUDA"), lambda: [(stem, facts)])
        ((name, why),) = report.replaced.items()
        assert planted == [kernel] and name.startswith(f"sm_90a {stem}") and "numbers have other bits than those of the kernel" in why
        assert registry.select(stem, Placement("CUDA"), "a", facts).variant == "sm_80"


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_weights_are_packed_as_defined_or_on_the_host(monkeypatch, device, case):
    """Metal reads rows as in files and packs none."""
    facts = ShapeFacts(Placement(device), inputs=packable_width(case.format, 32), format=case.format)

    def report():
        return check_kernels(Placement(device), lambda: [("pack_tiles", facts)])

    if device == "METAL":
        assert report().tested == 0
        return
    assert (report().tested, report().remembered) == (1, 1)
    selftest.open_cache().path.joinpath("selftest.json").unlink()
    plant(monkeypatch, {"pack_tiles"})
    assert report().replaced == {f"sm_80 {case.name}": "largest error 1 in equal of 1 rows, expected at most 0"}
    assert registry.select("pack_tiles", Placement(device), "a", facts) is None


def test_results_are_those_of_the_reference(monkeypatch, device):
    pool, pairs, count = np.arange(5 * 80, dtype=np.int32).reshape(5, 80), np.array([[0, 3], [4, 1]], np.int32), np.array([2], np.int32)

    def copied() -> np.ndarray:
        copies = copy_blocks(mapped(pool, device), mapped(pairs, device), mapped(count, device))
        Tensor.realize(copies)
        return download(copies)

    right = copied()
    plant(monkeypatch, {"kv_copy"})
    assert (copied() != right).any(), "the planted kernel is wrong"
    assert check(device, "kv_copy").replaced
    np.testing.assert_array_equal(copied(), right)
    assert registry.choices(device)[-1].why.startswith(f"replaced: {BASE[device]} failed its self-test: ")


def test_the_second_start_launches_nothing_and_another_driver_tests_again(monkeypatch, device):
    first = check(device, "advance", "kv_copy")
    assert (first.tested, first.replaced) == (2, {})
    with monkeypatch.context() as patch:
        patch.setattr(selftest, "run", None)  # any launch would fail
        assert check(device, "advance", "kv_copy").remembered == 2
    if device == "CUDA":
        monkeypatch.setattr(cuda_launch, "driver_version", lambda: 13010)
    else:
        monkeypatch.setattr("tinyvllm.backends.metal.call.platform.mac_ver", lambda: ("15.2", ("", "", ""), "arm64"))
    assert check(device, "advance", "kv_copy").tested == 2


def test_nothing_is_timed_while_kernels_are_tested(monkeypatch, device):
    def never(*arguments):
        raise AssertionError("the autotuner ran")

    monkeypatch.setattr(autotune, "tuner", never)
    assert check(device, "matmul").replaced == {}


@pytest.mark.long
def test_an_engine_with_a_wrong_kernel_gives_the_tokens_of_the_right_one(monkeypatch, device):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    def tokens(mode: str) -> list[int]:
        monkeypatch.setenv("TINYVLLM_SELFTEST", mode)
        forget_code()
        with contextlib.closing(LLM(DEFAULT_MODEL, device=device, max_model_len=64, max_num_seqs=4)) as llm:
            return llm.generate(["Once upon a time"], params)[0].outputs[0].token_ids

    right = tokens("off")
    # tinygrad's own products and attention use matrix instructions on Metal, which the emulator has only for our kernels
    stems = {"attention_decode": "attention_decode"} | (
        {"attention_prefill": "attention_prefill"} if device == "CUDA" else {"matvec": "matmul"}
    )
    plant(monkeypatch, {*stems, "attention_decode_team"}, BASE[device])
    assert tokens("off") != right
    assert tokens("on") == right
    ran = {choice.stem: choice for choice in registry.choices(device) if "load" not in choice.shape}
    assert all(ran[stem].why.startswith(f"replaced: {BASE[device]} failed") for stem in stems.values())
