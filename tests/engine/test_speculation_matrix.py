"""The matrix of issue 18: drafters, numbers of drafts, weights and caches, with requests of every kind in a batch that preempts, and alone.

A cell is a drafter, a number of drafts and an engine. In each, a batch of a request of each kind runs in a cache too small for it, then
its first request alone, on a cached prefix. The fast cells are the drafters without heads in one engine; the others are `long`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinyvllm.demo
from tests.engine.drafting import Fixed
from tests.engine.test_rounds import all_free, results
from tests.engine.test_speculation import params, prompt
from tinyvllm import LLM
from tinyvllm.engine.second_model import open_any_drafter
from tinyvllm.speculative import SpeculativeConfig

DEMO = Path(tinyvllm.demo.__file__).parent
DRAFTERS: dict[str, SpeculativeConfig | None] = {
    "none": None,
    "ngram": SpeculativeConfig("ngram", prompt_lookup_min=1),
    "suffix": SpeculativeConfig("suffix"),
    "draft": SpeculativeConfig("draft_model", str(DEMO / "draft")),
    "medusa": SpeculativeConfig("medusa_lite", num_speculative_tokens=8),
    "eagle": SpeculativeConfig("eagle3", str(DEMO / "heads"), num_speculative_tokens=8),
}
NUMBERS = (1, 3, 8)
ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {}, "Q4_K": dict(quantization="q4_k_m"), "int8 cache": dict(kv_cache_dtype="int8"),
    "Q4_K, int8 cache": dict(quantization="q4_k_m", kv_cache_dtype="int8"),
}  # fmt: skip
KINDS = ("greedy", "sampled", "penalties", "grammar", "min_tokens", "logprobs")
LENGTHS = (1, 2, 3, 1, 4, 2)  # which of the prompts
ONE_EACH = [("Q4_K, int8 cache", name, NUMBERS[i % 3]) for i, name in enumerate(DRAFTERS)]
FAST = [cell for cell in ONE_EACH if cell[1] in ("ngram", "suffix", "draft")]  # heads capture the model's steps again
# each drafter with each number, and both with each engine
PAIRS = [(engine, name, NUMBERS[(i + j) % 3]) for i, engine in enumerate(list(ENGINES)[:3]) for j, name in enumerate(DRAFTERS)]
LONG = [cell for cell in ONE_EACH if cell not in FAST] + PAIRS


class Cells:
    """One engine at a time, with what it gives without drafts."""

    def __init__(self) -> None:
        self.name, self.llm = "", None
        self.expected: Any = None

    def open(self, name: str) -> LLM:
        if self.name != name:
            self.close()
            self.name = name
            self.llm = LLM(
                device="CPU", max_model_len=128, max_num_seqs=6, max_num_batched_tokens=64, num_blocks=12, speculative_config="off",
                **ENGINES[name],
            )  # fmt: skip
            self.expected = self.run()
            assert self.preemptions > 0
        assert self.llm is not None
        return self.llm

    def run(self) -> Any:
        """The log-probabilities, tokens, texts and reasons of a batch, and of one request alone."""
        assert self.llm is not None
        wanted = [params(kind) for kind in KINDS]
        together = self.llm.generate([prompt(i) for i in LENGTHS], wanted)
        self.preemptions = sum(output.metrics.preemptions for output in together)
        (alone,) = self.llm.generate([prompt(LENGTHS[0])], wanted[:1])
        assert alone.num_cached_tokens >= 16
        return results([*together, alone])

    def close(self) -> None:
        if self.llm is not None:
            self.llm.close()


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    cells = Cells()
    yield cells
    cells.close()


@pytest.mark.parametrize(("engine", "name", "K"), [*FAST, *(pytest.param(*cell, marks=pytest.mark.long) for cell in LONG)])
def test_cell(cells: Cells, engine: str, name: str, K: int) -> None:
    llm, chosen = cells.open(engine), DRAFTERS[name]
    if chosen is None:
        llm.engine.stop_speculation()
    else:
        controller = Fixed(K)
        llm.engine.speculate(open_any_drafter(llm.engine.config, chosen, llm.engine.runner, llm.engine.tokenizer), controller)
    assert cells.run() == cells.expected and all_free(llm)
    if chosen is not None:
        assert llm.engine.speculation is not None and llm.engine.speculation.on and controller.checked
