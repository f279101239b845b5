"""Tokens on the GPU: draws and accepted drafts equal the CPU's, blocks are copied, and a model answers as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.gpu.operands import DEVICE, EMULATED, both
from tests.kernels.test_sample import logits_of, params
from tests.ops.inputs import int32, numbers, realized
from tinyvllm.bridge import download
from tinyvllm.config import DEFAULT_MODEL, cache_folder
from tinyvllm.ops.accept_drafts import accept_drafts
from tinyvllm.ops.copy import copy_blocks
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner.device import start_device
from tinyvllm.sampling.sampler import Sampler, SamplingFlags

EVERYTHING = SamplingParams(seed=1, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=0.1, logit_bias={1: 1.0})
FLAGS = {
    "greedy": SamplingFlags(*[False] * 6),
    "drawn": SamplingFlags(True, *[False] * 5),
    "with all": SamplingFlags(*[True] * 6),
}
PROMPTS = ([0, 5, 200, 41], list(range(3, 60)), [0] + [7 * i % (240 if EMULATED else 3000) for i in range(80 if EMULATED else 200)])
TOKENS = 8 if EMULATED else 48
# In units of the logits' standard deviation: the tolerance, and the distance of two logits that may change places. The devices sum in
# different orders, and one rounds attention weights to bfloat16.
OFF, CLOSE = 0.15, 0.15


@pytest.mark.parametrize("B", [1, 3, 8, 64])
@pytest.mark.parametrize("kind", FLAGS)
def test_draws_are_the_cpus(sizes, kind, B):
    start_device("CPU", cache_folder())
    random, V = np.random.default_rng(B), sizes.V
    B = min(B, 4 if sizes.max_rows < 100 else B)
    samplers = {device: Sampler(V, B, device) for device in ("CPU", DEVICE)}
    for _ in range(2):
        params_of_rows = {
            "greedy": [SamplingParams(temperature=0.0)] * B,
            "drawn": [SamplingParams(seed=b, temperature=0.7) for b in range(B)],
            "with all": [params(random, V) for _ in range(B)],
        }[kind]
        prompt = random.integers(0, V, 30).tolist()
        sequences = [Sequence(b, str(b), prompt, p, row=b) for b, p in enumerate(params_of_rows)]
        for sampler in samplers.values():
            if kind == "with all":  # creates the sampler's tables
                sampler.add(Sequence(0, "0", [1], EVERYTHING, row=0), (2,))
                sampler.remove(0)
            for sequence in sequences:
                sampler.add(sequence, (2,))
        for step in range(3):
            logits, tokens = np.stack([logits_of(random, V) for _ in range(B)]), {}
            for device, sampler in samplers.items():
                sampler.prepare(sequences, B)
                tokens[device] = download(sampler.draw(Tensor(logits, device=device).realize(), FLAGS[kind])).tolist()
            assert tokens[DEVICE] == tokens["CPU"], f"step {step}: {params_of_rows}"
            for b, sequence in enumerate(sequences):
                sequence.output_token_ids.append(max(tokens["CPU"][b], 0))
        for sampler in samplers.values():
            for sequence in sequences:
                sampler.remove(sequence.row)


def test_accepted_drafts_equal_the_reference(monkeypatch):
    random = np.random.default_rng(0)
    drafts, chosen = random.integers(0, 2, (33, 5)), random.integers(0, 2, (33, 6))
    arguments = realized(drafts.astype(np.int32)), realized(chosen.astype(np.int32)), int32(*(b % 6 for b in range(33))), int32(33)

    def op() -> np.ndarray:
        accepted, following = accept_drafts(*arguments)
        Tensor.realize(accepted, following)
        return np.stack([accepted.numpy(), following.numpy()])

    got, want = both(monkeypatch, "accept_drafts", op)
    np.testing.assert_array_equal(got, want)


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
    """The bundled model on the GPU and on the CPU; in the emulator, the toy of tests/conftest.py in its place."""
    from tinyvllm import LLM

    path, options = (tiny_model, {"max_model_len": 128, "num_blocks": 64}) if EMULATED else (DEFAULT_MODEL, {})
    with pytest.MonkeyPatch.context() as patch:
        if EMULATED:
            patch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
        patch.delenv("TINYVLLM_KERNELS", raising=False)
        both = (LLM(path, device=name, dtype="bfloat16", **options) for name in (DEVICE, "CPU"))
        with next(both) as gpu, next(both) as cpu:
            yield gpu, cpu


def greedy(llm, prompts, tokens: int) -> list[list[int]]:
    prompts_of_ids = [{"prompt_token_ids": list(ids)} for ids in prompts]
    outputs = llm.generate(prompts_of_ids, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_answers_are_the_cpus(model):
    """Up to where the CPU's two best tokens are too close to call."""
    gpu, cpu = model
    for ids, got, expected in zip(PROMPTS, greedy(gpu, PROMPTS, TOKENS), greedy(cpu, PROMPTS, TOKENS), strict=True):
        same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
        if same is not None:
            logits = np.sort(cpu.prompt_logits([*ids, *expected[:same]])[-1])
            assert logits[-1] - logits[-2] < CLOSE * logits.std(), f"token {same} is {got[same]}, on the CPU {expected[same]}"


def test_logits_are_close_to_the_cpus(model):
    gpu, cpu = model
    for ids in PROMPTS:
        got, expected = gpu.prompt_logits(list(ids)), cpu.prompt_logits(list(ids))
        assert np.abs(got - expected).max() < OFF * expected.std()
        assert np.abs(got - expected).mean() < OFF / 5 * expected.std()


def test_a_request_gives_the_same_answer_alone_and_in_a_batch(model):
    gpu, _ = model
    prompts = [[0, *range(3 + i, 20 + 9 * i)] for i in range(5 if EMULATED else 12)]
    together = greedy(gpu, prompts, TOKENS // 2)
    assert [greedy(gpu, [ids], TOKENS // 2)[0] for ids in prompts[::4]] == together[::4]


@pytest.mark.skipif(DEVICE == "METAL", reason="Metal's products of few rows and of many differ in bits")
def test_a_token_has_the_same_logits_in_every_chunk(model):
    """Bit for bit: the few rows of a short prompt and the many of a long one come from different kernels."""
    gpu, _ = model
    ids = list(PROMPTS[2])
    whole = gpu.prompt_logits(ids)
    for length in (3, 9) if EMULATED else (1, 3, 8, 9, 70, 130):
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
