"""What the first run on a new machine must show of the engine's features: with each packed KV cache and with weights of each kind, greedy
tokens are the CPU's; with drafts, tokens are those without.

tests/emulator has the same at more shapes; here, on an emulated GPU, these tests are `long`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulator import test_checkpoints as checkpoints
from tests.engine.drafting import Oracle, speculate
from tests.gpu import answers
from tests.gpu.operands import DEVICE, TOY_MODEL
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.config.engine import DEFAULT_MODEL

pytestmark = [pytest.mark.long] if TOY_MODEL else []
PROMPTS, TOKENS = (answers.PROMPTS[:2], 6) if TOY_MODEL else (answers.PROMPTS, answers.TOKENS)
# By how many standard deviations two logits may differ and change places: numbers on the border of two quants are rounded to either.
CLOSE = {"KV int4": 0.6, "KV fp8_e4m3": 0.3}
HEADS = str(Path(DEFAULT_MODEL).parent / "heads")
DRAFT = str(Path(DEFAULT_MODEL).parent / "draft")


@contextlib.contextmanager
def bundled(**options: Any) -> Iterator[LLM]:
    """The bundled model on the GPU."""
    registry.forget_choices()
    with LLM(DEFAULT_MODEL, device=DEVICE, dtype="bfloat16", max_model_len=512, max_num_seqs=4, **options) as llm:
        yield llm


@pytest.mark.parametrize("name", answers.FEATURES)
def test_tokens_of_packed_caches_and_weights_are_the_cpus(device: str, name: str) -> None:
    """Up to where the CPU's two best tokens are too close to call."""
    cpu = answers.RecordedAnswers(name)
    with bundled(**answers.FEATURES[name]) as llm:
        for i, got in enumerate(answers.greedy(llm, PROMPTS, TOKENS)):
            assert not answers.difference(got, cpu, i, CLOSE.get(name, 0.15))
    assert not checkpoints.without_kernel(DEVICE)


@pytest.mark.skipif(DEVICE == "METAL", reason="some of these formats have no kernel there; tests/kernels/metal has the others")
@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_tokens_of_quantized_checkpoints_are_those_of_float64(device: str, tmp_path: Path, kind: str) -> None:
    got, expected = checkpoints.tokens_of(tmp_path, DEVICE, kind)
    assert not checkpoints.without_kernel(DEVICE)
    assert got == expected


@pytest.mark.parametrize("method", ["guesses that are half right", "ngram", "draft_model", "eagle3"])
def test_drafts_change_no_token(device: str, method: str) -> None:
    """And no log-probability, where the device gives a row the same bits in any batch."""
    wanted = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=24, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": [0, *range(20, 40), *range(20, 34)]}, {"prompt_token_ids": list(answers.PROMPTS[1])}]

    def texts(llm: LLM) -> list[Any]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, wanted)]
        return [(list(o.token_ids), o.logprobs if DEVICE != "METAL" else None) for o in outputs]

    config = {"ngram": "ngram", "draft_model": {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3},
              "eagle3": {"method": "eagle3", "model": HEADS, "num_speculative_tokens": 3}}.get(method)  # fmt: skip
    with bundled() as llm:
        expected = texts(llm)
        if config is None:
            _, controller = speculate(llm, Oracle(llm.generate(prompts, wanted)).half_right, 3)
            assert texts(llm) == expected and controller.accepted > 2
            return
    with bundled(speculative_config=config) as llm:
        assert texts(llm) == expected
        assert llm.engine.speculation is not None
