"""What the CPU answers: computed here where there is a C compiler for its kernels, else as recorded in answers.npz.

python -m tests.gpu.answers     records them again: after a change of the sampler's arithmetic or of the bundled model
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from tinygrad import Tensor

from tests.kernels.test_sample import logits_of, params
from tinyvllm.backends.cpu.toolchain import has_compiler
from tinyvllm.bridge import download
from tinyvllm.config.engine import DEFAULT_MODEL
from tinyvllm.config.switches import cache_folder
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner.device import start_device
from tinyvllm.sampling.sampler import Sampler, SamplingFlags

FILE = Path(__file__).parent / "answers.npz"
VOCABULARY = 128256  # of the draws on a GPU
ROWS = (1, 3, 8, 64)
EVERYTHING = SamplingParams(seed=1, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=0.1, logit_bias={1: 1.0})
FLAGS = {
    "greedy": SamplingFlags(*[False] * 6),
    "drawn": SamplingFlags(True, *[False] * 5),
    "with all": SamplingFlags(*[True] * 6),
}
PROMPTS = ([0, 5, 200, 41], list(range(3, 60)), [0] + [7 * i % 3000 for i in range(200)])  # of the bundled model
TOKENS = 48
COLUMNS = 64  # of the recorded logits
# Packed KV caches, and weights packed at load: in bytes, in nibbles, in a mix of K-quants, by a table, in small floats.
FEATURES: dict[str, dict[str, Any]] = {
    **{f"KV {name}": {"kv_cache_dtype": name} for name in ("int8", "int4", "fp8_e4m3")},
    **{name: {"quantization": name} for name in ("q8_0", "q4_0", "q4_k_m", "iq4_nl", "mxfp4")},
}


# --- draws


def draws(device: str, V: int, B: int, kind: str) -> np.ndarray:
    """int32 [6, B]: the tokens that a sampler draws for two sets of requests, three steps each."""
    random, sampler, tokens = np.random.default_rng(B), Sampler(V, B, device), []
    for _ in range(2):
        params_of_rows = {
            "greedy": [SamplingParams(temperature=0.0)] * B,
            "drawn": [SamplingParams(seed=b, temperature=0.7) for b in range(B)],
            "with all": [params(random, V) for _ in range(B)],
        }[kind]
        prompt = random.integers(0, V, 30).tolist()
        sequences = [Sequence(b, str(b), prompt, p, row=b) for b, p in enumerate(params_of_rows)]
        if kind == "with all":  # creates the sampler's tables
            sampler.add(Sequence(0, "0", [1], EVERYTHING, row=0), (2,))
            sampler.remove(0)
        for sequence in sequences:
            sampler.add(sequence, (2,))
        for _ in range(3):
            logits = np.stack([logits_of(random, V) for _ in range(B)])
            sampler.prepare(sequences, B)
            tokens.append(download(sampler.draw(Tensor(logits, device=device).realize(), FLAGS[kind])).tolist())
            for b, sequence in enumerate(sequences):
                sequence.output_token_ids.append(max(tokens[-1][b], 0))
        for sequence in sequences:
            sampler.remove(sequence.row)
    return np.array(tokens, np.int32)


def cpu_draws(V: int, B: int, kind: str) -> np.ndarray:
    """The same on the CPU. Skips the test where there is neither a compiler nor a recorded answer."""
    if has_compiler():
        start_device("CPU", cache_folder())
        return draws("CPU", V, B, kind)
    recorded, name = _recorded(), f"draws {V} {B} {kind}"
    if name not in recorded:
        pytest.skip(f"no C compiler for the CPU's kernels, and nothing is recorded for {B} rows of {V} logits")
    return recorded[name]


# --- a model's answers


class ModelAnswers(Protocol):
    """What a model answers to some prompts on the CPU, greedily."""

    def tokens(self, prompt: int) -> list[int]:
        """The answer to a prompt, by its index."""

    def margin(self, prompt: int, place: int) -> float:
        """By how much the best token of an answer's place is ahead, in units of the logits' standard deviation."""

    def logits(self, prompt: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Columns of the prompt's logits, their values [tokens, columns], and the standard deviation of all."""


def greedy(llm: Any, prompts: Ids[Ids[int]], tokens: int) -> list[list[int]]:
    prompts_of_ids = [{"prompt_token_ids": list(ids)} for ids in prompts]
    outputs = llm.generate(prompts_of_ids, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    return [list(output.outputs[0].token_ids) for output in outputs]


def difference(got: Ids[int], cpu: ModelAnswers, prompt: int, close: float) -> str:
    """The first token that is not the CPU's, if there its two best are further from each other than `close`; "" if there is none."""
    expected = cpu.tokens(prompt)[: len(got)]
    place = next((place for place, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
    if place is None or (margin := cpu.margin(prompt, place)) < close:
        return ""
    return f"token {place} is {got[place]}, on the CPU {expected[place]}, which is ahead by {margin:.3g} deviations"


class ComputedAnswers:
    """By an LLM on the CPU."""

    def __init__(self, llm: Any, prompts: Ids[Ids[int]], tokens: int):
        self._llm, self._prompts, self._tokens = llm, [list(ids) for ids in prompts], tokens

    @functools.cached_property
    def _answers(self) -> list[list[int]]:
        return greedy(self._llm, self._prompts, self._tokens)

    def tokens(self, prompt: int) -> list[int]:
        return self._answers[prompt]

    def margin(self, prompt: int, place: int) -> float:
        logits = self._llm.prompt_logits([*self._prompts[prompt], *self._answers[prompt][:place]])[-1]
        first, second = np.sort(logits)[:-3:-1]
        return float((first - second) / logits.std())

    def logits(self, prompt: int) -> tuple[np.ndarray, np.ndarray, float]:
        logits = self._llm.prompt_logits(self._prompts[prompt])
        return np.arange(logits.shape[1]), logits, float(logits.std())


class RecordedAnswers:
    """Of the bundled model to PROMPTS, as `record` wrote them: of the logits some columns. With a feature only tokens and margins."""

    def __init__(self, feature: str = ""):
        self._prefix = f"{feature} " if feature else ""

    def tokens(self, prompt: int) -> list[int]:
        return [int(token) for token in _recorded()[f"{self._prefix}tokens {prompt}"]]

    def margin(self, prompt: int, place: int) -> float:
        return float(_recorded()[f"{self._prefix}margins {prompt}"][place])

    def logits(self, prompt: int) -> tuple[np.ndarray, np.ndarray, float]:
        recorded = _recorded()
        return recorded["columns"], recorded[f"logits {prompt}"].astype(np.float32), float(recorded[f"deviation {prompt}"])


@functools.cache
def _recorded() -> dict[str, np.ndarray]:
    with np.load(FILE, allow_pickle=False) as file:
        return dict(file)


# --- recording


def record_feature(name: str) -> dict[str, np.ndarray]:
    """The answers of the bundled model on the CPU with one of FEATURES."""
    from tinyvllm import LLM

    with LLM(DEFAULT_MODEL, device="CPU", dtype="bfloat16", **FEATURES[name]) as llm:
        return {f"{name} {key}": array for key, array in _tokens(ComputedAnswers(llm, PROMPTS, TOKENS)).items()}


def _tokens(computed: ComputedAnswers) -> dict[str, np.ndarray]:
    answers = {}
    for i in range(len(PROMPTS)):
        answers[f"tokens {i}"] = np.array(computed.tokens(i), np.int32)
        answers[f"margins {i}"] = np.array([computed.margin(i, place) for place in range(TOKENS)], np.float32)
    return answers


def record(llm: Any) -> dict[str, np.ndarray]:
    """The answers of the bundled model, an LLM on the CPU."""
    computed = ComputedAnswers(llm, PROMPTS, TOKENS)
    answers = _tokens(computed)
    answers["columns"] = np.sort(np.random.default_rng(0).permutation(computed.logits(0)[1].shape[1])[:COLUMNS]).astype(np.int32)
    for i in range(len(PROMPTS)):
        _, logits, deviation = computed.logits(i)
        answers[f"logits {i}"], answers[f"deviation {i}"] = logits[:, answers["columns"]].astype(np.float16), np.float32(deviation)
    return answers


def main() -> None:
    from tinyvllm import LLM

    start_device("CPU", cache_folder())
    with LLM(DEFAULT_MODEL, device="CPU", dtype="bfloat16") as llm:
        answers = record(llm)
    for name in FEATURES:
        answers |= record_feature(name)
    for kind in FLAGS:
        answers |= {f"draws {VOCABULARY} {B} {kind}": draws("CPU", VOCABULARY, B, kind) for B in ROWS}
    np.savez_compressed(FILE, **answers)
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
