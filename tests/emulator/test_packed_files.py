"""Whole GGUF files in packed formats on the emulated GPU: no matrix becomes floats, and greedy tokens are the CPU kernels'."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulator.driver import cuda_device
from tests.engine.test_packed_files import PRODUCTS, V, model_of, prompts_of  # noqa: F401  a fixture
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.backends.cuda.hopper_plan import HOPPER
from tinyvllm.quant.formats import Layout, packed_in

LENGTHS = (5, 19)  # of prompts: few rows, many rows
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FILES = ["Q4_K_M", *(pytest.param(mix, marks=pytest.mark.long) for mix in ("Q5_K_M", "Q3_K_M", "Q2_K", "IQ4_XS", "gate and up apart"))]


@pytest.fixture(scope="module")
def driver():
    with cuda_device(seed=3) as driver:
        yield driver


def tokens(path: Path, device: str, which: list[int], **options) -> list[list[int]]:
    registry.forget_choices()
    prompts = [{"prompt_token_ids": prompts_of(2, V)[i][: LENGTHS[i]]} for i in which]
    with LLM(path, device=device, max_model_len=64, skip_tokenizer_init=True, max_num_seqs=2, **options) as llm:
        if not options:
            plan = LLM(path, device=device, max_model_len=64, max_num_seqs=2, speed=False, plan=True).plan
            assert plan.sizes.memory.weights == llm.engine.runner.weight_bytes and "ref" not in {one.variant for one in plan.kernels}
        assert options or llm.engine.runner.weight_bytes < 1.02 * path.stat().st_size
        return [output.outputs[0].token_ids for output in llm.generate(prompts, [GREEDY] * len(prompts))]


@pytest.mark.parametrize("mix", FILES)
def test_greedy_tokens_are_the_cpus(driver, model_of, mix):  # noqa: F811
    """Both round x to int8. A request has the same tokens alone and with another one; the first ones are those of dequantized weights."""
    path = model_of(mix)
    together = tokens(path, "CUDA", [0, 1])
    products = [choice for choice in registry.choices("CUDA") if choice.stem in PRODUCTS and "load" not in choice.shape]
    assert {part for choice in products for part in choice.shape.split()[-1].split("+")} <= set(packed_in(Layout.TILES))
    assert {choice.variant for choice in products} == {HOPPER}
    assert together == tokens(path, "CPU", [0, 1])
    assert tokens(path, "CUDA", [1]) == together[1:]
    assert [ids[:1] for ids in tokens(path, "CPU", [0, 1], dtype="float32")] == [ids[:1] for ids in together]
