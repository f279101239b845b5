"""Drafts of a recurrent model's own layer: the tokens and log-probabilities are those without, and the guesses are the formulas'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor

from tests.engine.drafting import Fixed
from tests.engine.test_recurrent_drafts import GREEDY, MIXED, PROMPTS, SAMPLED, forget, open_llm
from tests.engine.test_rounds import all_free, results
from tests.speculate import gated
from tests.tiny.to_gguf import write_gguf
from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import resolve
from tinyvllm.engine.drafter_memory import drafter_memory
from tinyvllm.engine.second_model import open_any_drafter
from tinyvllm.runner.opened import open_model
from tinyvllm.speculate.protocol import Draft, DraftRequest, StateRows
from tinyvllm.speculative import SpeculativeConfig

MTP = {"method": "mtp", "num_speculative_tokens": 3}


class Engines:
    """A model whose layer for drafts guesses most of its greedy answers right, with drafts and without."""

    def __init__(self, folder: Path, name: str = "qwen3.5") -> None:
        with open_llm(gated.GOLDEN / name, speculative_config="off", enable_prefix_caching=False) as plain:
            self.outputs = self.run(plain)
        self.tensors = gated.fitted(name, [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in self.outputs])
        self.name, self.model = name, gated.write_model(name, folder, self.tensors)
        self.drafted = open_llm(self.model, speculative_config=MTP)

    def run(self, llm: LLM) -> list[Any]:
        """Together, where there are too few blocks for them, each alone, and the first again after an answer to it."""
        outputs = llm.generate(PROMPTS, MIXED)
        self.preempted = any(output.metrics.preemptions for output in outputs)
        outputs += [llm.generate([PROMPTS[n]], [GREEDY])[0] for n in range(4)]
        turn = {"prompt_token_ids": [*PROMPTS[2]["prompt_token_ids"], *outputs[2].outputs[0].token_ids, 9, 8]}
        return [*outputs, *llm.generate([turn], [SAMPLED])]

    def check(self, K: int) -> None:
        llm, controller, config = self.drafted, Fixed(K), SpeculativeConfig("mtp", num_speculative_tokens=K)
        llm.engine.speculate(open_any_drafter(llm.engine.config, config, llm.engine.runner, None), controller)
        forget(llm)
        outputs = self.run(llm)
        assert self.preempted and outputs[-1].num_cached_tokens == 48
        assert results(outputs) == results(self.outputs) and all_free(llm) and llm.engine.speculation.on
        assert 0 < controller.accepted < sum(drafts for drafts, _ in controller.checked)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("mtp"))
    yield engines
    engines.drafted.close()


@pytest.mark.parametrize("K", [3, pytest.param(1, marks=pytest.mark.long)])
def test_tokens_are_those_without(engines: Engines, K: int) -> None:
    """Greedy, sampled and penalized requests together and preempted, alone, and after a prefix hit, whose tokens have no states."""
    engines.check(K)


def test_guesses_are_those_of_the_formulas(engines: Engines) -> None:
    """Of an answer in the whole engine, from the states after the final norm, whose product with the head is the model's own logits."""
    llm, ends = engines.drafted, gated.ends_of(engines.name)
    oracle, states = gated.GatedOracle(engines.name, engines.tensors, ends), {}
    llm.engine.speculate(open_any_drafter(llm.engine.config, SpeculativeConfig(**MTP), llm.engine.runner, None), Fixed(3))
    drafter, guesses = llm.engine.speculation.drafter, []
    observe, propose = drafter.observe_states, drafter.propose

    def observed(found: Tensor, rows: list[StateRows]) -> None:
        for each in rows:
            states.update(enumerate(found.numpy()[each.first_row : each.first_row + each.count], each.start))
        observe(found, rows)

    def proposed(requests: list[DraftRequest]) -> list[Draft]:
        drafts = propose(requests)
        guesses.extend((r.sequence.token_ids(0, len(r.sequence)), draft.tokens) for r, draft in zip(requests, drafts, strict=True))
        return drafts

    drafter.observe_states, drafter.propose = observed, proposed
    forget(llm)
    (output,) = llm.generate([PROMPTS[0]], [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)])
    text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    rows = np.stack([states[p] for p in range(len(states))])  # not those of the last step, after which nothing is guessed
    first = len(output.prompt_token_ids) - 1
    assert (rows[first:] @ ends.head.T).argmax(1).tolist() == text[first + 1 : len(rows) + 1]
    assert len(guesses) > 3
    for tokens, found in guesses:
        assert tokens == text[: len(tokens)] and found == oracle.guesses(tokens, rows, 3)[0][: len(found)] and found


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3next", "qwen3.5moe"])
def test_models_with_experts(name: str, tmp_path: Path) -> None:
    engines = Engines(tmp_path, name)
    engines.check(2)
    engines.drafted.close()


@pytest.mark.long
def test_a_gguf_file_with_the_layer_of_the_published_folder(engines: Engines, tmp_path: Path) -> None:
    """Its values are those of the folder; packed at load, as heads are."""
    write_gguf(gated.GOLDEN / engines.name, tmp_path / "model.gguf", "qwen35", "F32")
    config = {**MTP, "model": str(engines.model), "quantization": "q8_0"}
    with open_llm(tmp_path / "model.gguf", speculative_config="off", num_blocks=64) as plain:
        expected = results(plain.generate(PROMPTS, MIXED))
    with open_llm(tmp_path / "model.gguf", speculative_config=config, num_blocks=64) as llm:
        assert results(llm.generate(PROMPTS, MIXED)) == expected
        assert llm.engine.metrics.accepted_tokens > 0


@pytest.mark.long
def test_by_the_reference(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel computes anything."""
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=ref")
    short, small = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), dict(max_num_batched_tokens=8, max_num_seqs=1)
    with open_llm(engines.model, speculative_config="off", **small) as plain:
        expected = results(plain.generate(PROMPTS[3:], [short]))
    with open_llm(engines.model, speculative_config={**MTP, "num_speculative_tokens": 2}, **small) as llm:
        assert results(llm.generate(PROMPTS[3:], [short])) == expected
        assert llm.engine.metrics.accepted_tokens > 0


def test_what_is_counted_before_the_layer_is_loaded(engines: Engines) -> None:
    """Its cache, and its weights: the published tensors in float32, query and gate apart."""
    config = resolve(engines.model, device="CPU", dtype="float32", max_num_seqs=4, speculative_config=MTP)
    counted, engine = drafter_memory(config, open_model(config, "CPU")), engines.drafted.engine
    assert counted.weights == sum(array.nbytes for array in engines.tensors.values())
    assert counted.cache(engine.runner.pool.num_blocks) == open_any_drafter(config, SpeculativeConfig(**MTP), engine.runner, None).nbytes
