"""Tokens on the GPU: draws equal the CPU's, blocks are copied, and a model answers as on the CPU."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.gpu import answers
from tests.gpu.answers import greedy
from tests.gpu.operands import DEVICE, EMULATED, TOY_MODEL, both
from tests.ops.inputs import int32, numbers, realized
from tinyvllm.backends.cpu.toolchain import has_compiler
from tinyvllm.config.engine import DEFAULT_MODEL
from tinyvllm.ops.copy import copy_blocks
from tinyvllm.request import SamplingParams

TOY_PROMPTS = ([0, 5, 200, 41], list(range(3, 60)), [0] + [7 * i % 240 for i in range(80)])
PROMPTS, TOKENS = (TOY_PROMPTS, 8) if TOY_MODEL else (answers.PROMPTS, answers.TOKENS)
# In units of the logits' standard deviation: the tolerance, and the distance of two logits that may change places. The devices sum in
# different orders, and one rounds attention weights to bfloat16.
OFF, CLOSE = 0.15, 0.15


@pytest.mark.parametrize("B", answers.ROWS)
@pytest.mark.parametrize("kind", answers.FLAGS)
def test_draws_are_the_cpus(sizes, kind, B):
    B = min(B, 4 if sizes.max_rows < 100 else B)
    got = answers.draws(DEVICE, sizes.V, B, kind)
    np.testing.assert_array_equal(got, answers.cpu_draws(sizes.V, B, kind), err_msg="tokens of a step in a row")


def test_blocks_are_copied(monkeypatch):
    pool, pairs = numbers(9, 2, 2, 16, 32), realized(np.array([[0, 5], [7, 1], [2, 2]], np.int32))

    def op() -> np.ndarray:
        tensor = Tensor(pool).cast(dtypes.bfloat16).contiguous().realize()
        return copy_blocks(tensor, pairs, int32(2)).float().numpy()

    got, want = both(monkeypatch, "kv_copy", op)
    np.testing.assert_array_equal(got, want)
    assert (got[5] == got[0]).all() and (got[1] == got[7]).all()


# --- the bundled model


@pytest.fixture(scope="module")
def model(device, tiny_model):
    """The bundled model on the GPU, and what the CPU answers; in the emulator, the toy of tests/conftest.py in its place."""
    from tinyvllm import LLM

    path, options = (tiny_model, {"max_model_len": 128, "num_blocks": 64}) if TOY_MODEL else (DEFAULT_MODEL, {})
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as opened:
        if EMULATED:
            patch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
        patch.delenv("TINYVLLM_KERNELS", raising=False)
        gpu = opened.enter_context(LLM(path, device=DEVICE, dtype="bfloat16", **options))
        cpu: answers.ModelAnswers = answers.RecordedAnswers()
        if has_compiler():
            llm = opened.enter_context(LLM(path, device="CPU", dtype="bfloat16", **options))
            cpu = answers.ComputedAnswers(llm, PROMPTS, TOKENS)
        opened_models = [gpu, cpu]
        yield opened_models
        opened_models.clear()  # pytest holds what it got until the device is closed, and the LLM's programs would outlive it
        del gpu, cpu


def test_answers_are_the_cpus(model):
    """Up to where the CPU's two best tokens are too close to call."""
    gpu, cpu = model
    for i, got in enumerate(greedy(gpu, PROMPTS, TOKENS)):
        assert not answers.difference(got, cpu, i, CLOSE)


def test_logits_are_close_to_the_cpus(model):
    gpu, cpu = model
    for i, ids in enumerate(PROMPTS):
        columns, expected, deviation = cpu.logits(i)
        off = np.abs(gpu.prompt_logits(list(ids))[:, columns] - expected)
        assert off.max() < OFF * deviation and off.mean() < OFF / 5 * deviation


def test_a_request_gives_the_same_answer_alone_and_in_a_batch(model):
    gpu, _ = model
    prompts = [[0, *range(3 + i, 20 + 9 * i)] for i in range(5 if TOY_MODEL else 12)]
    together = greedy(gpu, prompts, TOKENS // 2)
    assert [greedy(gpu, [ids], TOKENS // 2)[0] for ids in prompts[::4]] == together[::4]


@pytest.mark.skipif(DEVICE == "METAL", reason="Metal's products of few rows and of many differ in bits")
def test_a_token_has_the_same_logits_in_every_chunk(model):
    """Bit for bit: the few rows of a short prompt and the many of a long one come from different kernels."""
    gpu, _ = model
    ids = list(PROMPTS[2])
    whole = gpu.prompt_logits(ids)
    for length in (3, 9) if TOY_MODEL else (1, 3, 8, 9, 70, 130):
        some = gpu.prompt_logits(ids[:length])
        np.testing.assert_array_equal(some.view(np.uint32), whole[:length].view(np.uint32), err_msg=f"{length} tokens")


def test_only_allowed_tokens_are_drawn(model):
    """Masks are applied in the step's own graph, as tinygrad compiles it for the device."""
    gpu, _ = model
    allowed = list(range(5, 90, 7))
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=4, ignore_eos=True, allowed_token_ids=ids)
        for t, ids in ((0.0, allowed), (1.0, allowed), (0.0, None))
    ]
    outputs = gpu.generate([{"prompt_token_ids": list(PROMPTS[0])}] * 3, params)
    assert all(set(output.outputs[0].token_ids) <= set(allowed) for output in outputs[:2])
    assert list(outputs[2].outputs[0].token_ids) == greedy(gpu, [PROMPTS[0]], 4)[0], "a mask must not affect other rows"
