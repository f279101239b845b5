"""A file of mixed formats together with a packed KV cache: a request has the same tokens and log-probabilities alone, in a batch, from the
prefix cache, and after a preemption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_kernels import answers
from tests.engine.test_packed_files import PRODUCTS, V, write_model
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.request import RequestOutput

COUNT, NUM_TOKENS, SHARED = 4, 20, 32  # requests; tokens of an answer; tokens that all prompts begin with: two blocks
SCARCE = 15  # blocks: the prompts take 13, with their answers they would take 18
FORMATS = {"Q4_K", "Q6_K"}


def prompt(i: int) -> list[int]:
    common, own = np.random.default_rng(0), np.random.default_rng(100 + i)
    return [*common.integers(3, V, SHARED).tolist(), *own.integers(3, V, 1 + 6 * i).tolist()]


def load(path: Path, kind: str, device: str = "CPU", **options: Any) -> LLM:
    usual: dict[str, Any] = {"max_num_seqs": COUNT, "num_blocks": 24, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    return LLM(path, device=device, max_model_len=80, kv_cache_dtype=kind, **usual | options)


def run(llm: LLM, numbers: list[int], **more: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **more)
    return llm.generate([{"prompt_token_ids": prompt(i)} for i in numbers], params)


def require_kernels(llm: LLM, device: str) -> None:
    """Weights and cache are packed, and kernels multiplied all of them since the choices were forgotten."""
    assert llm.engine.runner.weight_formats == FORMATS and llm.engine.runner.pool.block.packed is not None
    choices = [choice for choice in registry.choices(device) if choice.stem in (*PRODUCTS, "attention_decode", "attention_prefill")]
    assert choices and "ref" not in {choice.variant for choice in choices if "load" not in choice.shape}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixed"), "Q4_K_M")


@pytest.fixture(scope="module", params=["int8", "int4"])
def alone(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[str, list[Any]]]:
    """A type, and the answer of each request by itself; all of them together have the same."""
    registry.forget_choices()
    with load(model, request.param) as llm:
        found = [answers(run(llm, [i], logprobs=2))[0] for i in range(COUNT)]
        require_kernels(llm, "CPU")
        assert all(a != b for i, a in enumerate(found) for b in found[:i]), "the requests are meant to differ"
        assert answers(run(llm, list(range(COUNT)), logprobs=2)) == found, "together"
        yield request.param, found


def test_from_the_prefix_cache_and_in_chunks(model: Path, alone: tuple[str, list[Any]]) -> None:
    kind, expected = alone
    with load(model, kind, enable_prefix_caching=True, max_num_batched_tokens=24) as llm:
        assert answers(run(llm, list(range(COUNT)), logprobs=2)) == expected
        outputs = run(llm, list(range(COUNT)), logprobs=2)
        assert [output.num_cached_tokens >= SHARED - 16 for output in outputs] == [True] * COUNT and answers(outputs) == expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_after_a_preemption(model: Path, alone: tuple[str, list[Any]], mode: str) -> None:
    kind, expected = alone
    with load(model, kind, num_blocks=SCARCE, preemption_mode=mode, **({"swap_space": "4MB"} if mode == "swap" else {})) as llm:
        outputs = run(llm, list(range(COUNT)), logprobs=2)
        assert sum(output.metrics.preemptions for output in outputs) > 0, "the test is meant to preempt"
        assert bool(llm.engine.scheduler.num_swaps) == (mode == "swap")
        assert answers(outputs) == expected
