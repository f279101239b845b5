"""Matrices on the emulated Mac: the variant apple7_matrix, GPUs whose matrices have another layout, and pipelines with too few threads."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor
from tinygrad.helpers import USE_TC

from tests.emulator.emulate import another_matrix_layout
from tests.emulator.metal_runtime import metal_device
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.backends.metal.probe import unexpected_matrix_layout
from tinyvllm.bridge import Captured, download
from tinyvllm.config.engine import DEFAULT_MODEL as MODEL
from tinyvllm.errors import ReplacedKernelError
from tinyvllm.ops.linear import linear
from tinyvllm.placement import Placement
from tinyvllm.quant.layouts import RowWeight, StoredWeight

PRODUCTS = ("matmul", "norm_gate_up_silu", "norm_qkv_rope_store", "norm_head")


@pytest.mark.long
def test_a_batch_of_nine_is_multiplied_by_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [{"prompt_token_ids": [0, 40 + i]} for i in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    counts, token_ids = [], []
    for variant in ("apple7", "apple7_matrix"):
        monkeypatch.setenv("TINYVLLM_KERNELS", ",".join(f"{stem}={variant}" for stem in PRODUCTS))
        with metal_device() as mac, LLM(MODEL, device="METAL", max_model_len=64, max_num_seqs=16, quantization="q4_0") as llm:
            token_ids.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            counts.append([Counter(command.name for command in commands.commands) for commands in mac.indirect][-1])
    assert counts[0]["matmul16"] == 0 and counts[0]["matvec"] > 0
    layers = counts[1]["attention_decode"]
    assert counts[1]["matmul16"] == 4 * layers + 1 and counts[1]["rope_store"] == layers and counts[1]["matvec"] == 0
    assert sum(a == b for a, b in zip(*token_ids, strict=True)) >= 8, "other bits, but rarely other tokens"


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """tinygrad's setting is the process's: it is restored."""
    monkeypatch.setattr(USE_TC, "value", USE_TC.value)


def product(T: int, O: int = 40, I: int = 64) -> tuple[tuple[Any, ...], np.ndarray]:
    """Arguments of `linear` on METAL, all rows but the last two counting, and what comes out of those."""
    random = np.random.default_rng(T)
    x, w, residual = (random.standard_normal(shape).astype(np.float32) for shape in ((T, I), (O, I), (T, O)))
    matrix = RowWeight(on_metal(w.reshape(-1).view(np.uint8)), "F32", O, I)
    count = on_metal(np.array([T - 2], np.int32))
    return (on_metal(x), StoredWeight((matrix,)), count, None, on_metal(residual)), (x @ w.T + residual)[: T - 2]


def on_metal(array: np.ndarray) -> Tensor:
    return Tensor(array, device="METAL").contiguous().realize()


def test_the_layout_of_matrices_is_looked_at_when_the_device_is_opened(tensor_cores, caplog):
    with metal_device() as mac:
        assert mac.launched == ["matrix_probe"] and unexpected_matrix_layout("METAL") is None and not caplog.records
    with another_matrix_layout(), metal_device() as mac, caplog.at_level(logging.WARNING):
        assert mac.launched == ["matrix_probe"]
        assert unexpected_matrix_layout("METAL") == "lane 2 has the number 4 where 8 is expected"


@pytest.mark.parametrize("T", [16, 40])
def test_products_with_another_layout_of_matrices(tensor_cores, caplog, T):
    """In pieces of sixteen rows."""
    with another_matrix_layout(), metal_device(races=False) as mac:
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "matrices do not hold the numbers that the kernels expect: lane 2 has" in warning.getMessage()
        arguments, expected = product(T)
        got = download(linear(*arguments).contiguous().realize())
        np.testing.assert_allclose(got[: T - 2], expected, rtol=1e-5, atol=1e-5)
        assert mac.launched.count("matvec") == -(-T // 16) and "matmul" not in mac.launched
        lacking = registry.variants(Placement("METAL"), "matmul")
        assert lacking["apple7"] is None and "matrices have another layout" in (lacking["apple7_matrix"] or "")


@pytest.mark.long
def test_the_engine_with_another_layout_of_matrices(tensor_cores):
    prompts = [{"prompt_token_ids": [0, *range(40, 60)]}]
    params, options = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), dict(max_model_len=64, max_num_seqs=2)
    with LLM(MODEL, device="CPU", **options) as llm:
        expected = llm.generate(prompts, params)[0].outputs[0].token_ids
    registry.forget_choices()  # those of engines of earlier tests
    with another_matrix_layout(), metal_device(races=False) as mac, LLM(MODEL, device="METAL", **options) as llm:
        assert llm.generate(prompts, params)[0].outputs[0].token_ids == expected
        assert not {"matmul", "attention_prefill"} & set(mac.launched) and "matvec" in mac.launched
        (choice,) = [choice for choice in registry.choices("METAL") if choice.stem == "attention_prefill"]
        assert choice.variant == "ref" and "matrices" in choice.why


@pytest.mark.parametrize("captured", [False, True])
def test_a_pipeline_with_too_few_threads_falls_to_the_reference(tensor_cores, caplog, captured):
    """A capture chooses again by itself; a single call says so. Products of few rows take a cut with fewer threads."""
    with metal_device(races=False, max_threads=128) as mac:
        arguments, expected = product(8)
        got = download(linear(*arguments).contiguous().realize())
        np.testing.assert_allclose(got[:6], expected, rtol=1e-5, atol=1e-5)
        assert mac.launched.count("matvec") == 1 and not caplog.records
    with metal_device(races=False, max_threads=64) as mac, caplog.at_level(logging.WARNING):
        (x, *rest), expected = product(20)

        def run(x: Tensor) -> Tensor:
            return linear(x, *rest).contiguous().realize()

        if not captured:
            with pytest.raises(ReplacedKernelError, match="the same call again runs matmul without the variant apple7"):
                run(x)
        got = Captured(run)(x) if captured else run(x)
        np.testing.assert_allclose(download(got)[:18], expected, rtol=1e-5, atol=1e-5)
        assert "matmul" not in mac.launched
        (warning,) = caplog.records
        assert "matmul has 128 threads per threadgroup; this GPU runs at most 64 of it" in warning.getMessage()
        variant, lacking = next(iter(registry.variants(Placement("METAL"), "matmul").items()))
        assert variant == "apple7" and "at most 64" in (lacking or "")


@pytest.mark.long
def test_the_engine_where_no_pipeline_has_many_threads(tensor_cores):
    USE_TC.value = 0  # the emulator does not support tinygrad's own tensor cores, which the reference would use here
    prompts = [{"prompt_token_ids": [0, *range(40, 60)]}]
    params, options = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), dict(max_model_len=64, max_num_seqs=2)
    with LLM(MODEL, device="CPU", **options) as llm:
        expected = llm.generate(prompts, params)[0].outputs[0].token_ids
    with metal_device(races=False, max_threads=128) as mac, LLM(MODEL, device="METAL", **options) as llm:
        assert llm.generate(prompts, params)[0].outputs[0].token_ids == expected
        assert "attention_decode" not in mac.launched and "attention_prefill" in mac.launched and "matvec" in mac.launched
