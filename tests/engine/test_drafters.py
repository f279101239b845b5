"""Drafters and controllers of the product in an engine: the tokens are those without them, and they guess what they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tinyvllm.demo
from tests.engine.drafting import Fixed, Oracle, speculate
from tests.engine.test_rounds import all_free, results
from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import ArgumentError
from tinyvllm.speculate.controller import AdaptiveController, WindowController
from tinyvllm.speculate.ngram import NgramDrafter
from tinyvllm.speculate.suffix import SuffixDrafter

OPTIONS: dict[str, Any] = dict(device="CPU", max_model_len=256, max_num_seqs=8, num_blocks=64, speculative_config="off")
STORIES = ["Once upon a time", "The little dog", "Tom went to the market", "A cat and a mouse"]


@pytest.fixture(scope="module")
def llm():
    with LLM(**OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def draft_folder():
    """The bundled draft model."""
    return Path(tinyvllm.demo.__file__).parent / "draft"


@pytest.fixture(scope="module")
def draft_runner(llm, draft_folder):
    from tinyvllm.runner.runner import Runner

    return Runner(EngineConfig(model=str(draft_folder), max_model_len=256, max_num_seqs=8, num_blocks=40), "CPU")


def stories(**given: Any) -> list[SamplingParams]:
    """One for each prompt."""
    return [SamplingParams(**({"max_tokens": 40, "ignore_eos": True, "seed": i} | given)) for i in range(len(STORIES))]


class Counting:
    """A controller, with the accepted drafts counted."""

    def __init__(self, controller: Any):
        self.controller, self.accepted = controller, 0

    def observe(self, sequence: Any, num_drafts: int, num_accepted: int) -> None:
        self.accepted += num_accepted
        self.controller.observe(sequence, num_drafts, num_accepted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.controller, name)


KINDS = {"greedy": dict(temperature=0.0), "sampled": dict(temperature=0.8), "top_p": dict(temperature=0.8, top_p=0.9)}


@pytest.fixture(scope="module")
def plain():
    with LLM(**OPTIONS) as made:
        yield {kind: results(made.generate(STORIES, stories(**given))) for kind, given in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_draft_model_agrees_also_where_tokens_are_sampled(llm, draft_runner, plain, kind):
    """It draws with the target's noise: without that two samplers at temperature 0.8 would agree on about half of these tokens."""
    from tinyvllm.speculate.draft_model import DraftModelDrafter

    controller, drafter = Fixed(4), DraftModelDrafter(draft_runner, 8)
    llm.engine.speculate(drafter, controller)
    assert results(llm.generate(STORIES, stories(**KINDS[kind]))) == plain[kind]
    checked = sum(drafts for drafts, _ in controller.checked)
    assert controller.accepted >= 0.55 * checked > 0
    assert all_free(llm) and drafter.num_free_blocks == 40


def test_the_draft_model_with_few_blocks_and_preemption(draft_runner, plain):
    """The target has 9 blocks for 4 sequences that need 3 each, so that some are preempted; the draft model keeps copies of two."""
    from tinyvllm.speculate.draft_model import DraftModelDrafter

    with LLM(**(OPTIONS | {"num_blocks": 9, "max_model_len": 96, "enable_prefix_caching": False})) as llm:
        drafter, controller = DraftModelDrafter(draft_runner, 2), Fixed(3)
        llm.engine.speculate(drafter, controller)
        outputs = llm.generate(STORIES, stories(**KINDS["sampled"]))
        assert results(outputs) == plain["sampled"]
        assert sum(output.metrics.preemptions for output in outputs) and controller.accepted
        assert all_free(llm) and drafter.num_free_blocks == 40


@pytest.mark.parametrize("drafter", [NgramDrafter, lambda: NgramDrafter(4, 1), SuffixDrafter], ids=["ngram", "ngram 1", "suffix"])
@pytest.mark.parametrize("controller", [AdaptiveController, WindowController, Fixed])
def test_text_that_repeats_is_guessed_and_unchanged(llm, drafter, controller):
    """The most likely of a few tokens soon repeat."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, allowed_token_ids=[*range(400, 420)])
    llm.engine.loop = getattr(llm.engine.loop, "single", llm.engine.loop)
    expected = llm.generate(["Once upon a time"], params)
    counting = Counting(controller(8))
    llm.engine.speculate(drafter(), counting)
    outputs = llm.generate(["Once upon a time"], params)
    assert results(outputs) == results(expected)
    assert all_free(llm)
    if not isinstance(counting.controller, AdaptiveController):  # which looks at the times of steps
        assert counting.accepted >= 0.4 * len(outputs[0].outputs[0].token_ids)


def test_suffix_learns_from_past_outputs_of_the_same_key_only(llm):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    controller = Fixed(8)
    llm.engine.speculate(SuffixDrafter(), controller)
    first = llm.generate(["The little dog"], params)
    checked = len(controller.checked)
    assert results(llm.generate(["The little dog"], params)) == results(first)
    again = controller.checked[checked:]
    assert len(again) <= 10 and sum(accepted for _, accepted in again) >= 45, "the second time it is known"


@pytest.mark.parametrize("options", [{}, {"num_scheduler_steps": 4}, {"async_scheduling": True}], ids=str)
def test_steps_without_drafts_are_timed_too(options):
    """Otherwise a controller could not tell what drafts add."""
    with LLM(**OPTIONS, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        oracle = Oracle(llm.generate(["The little dog"], params))
        _, controller = speculate(llm, lambda text, count: oracle.right(text, count) if len(text) % 16 < 5 else [], 3)
        for _ in range(2):  # in the first one shapes are captured
            controller.steps.clear()
            llm.generate(["The little dog"], params)
        assert controller.steps.count(1) >= 5 and any(rows > 1 for rows in controller.steps)


def test_a_drafters_first_call_may_take_its_captures(llm, monkeypatch):
    """The limit of a call is for the drafter's work, not for what is compiled and captured once."""
    from tinyvllm.runner.runner import CaptureWork

    work = CaptureWork(0, 0.0)
    monkeypatch.setattr(llm.engine.runner, "capture_work", lambda: work)
    start = llm.engine.speculate(NgramDrafter(), Fixed(2)) or llm.engine.speculation._clock()
    work.seconds += 1000.0
    assert llm.engine.speculation._clock() - start < -900


def draft_config(model: Any, **given: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 4} | given


def test_a_draft_model_by_configuration(draft_folder, plain, caplog):
    """Both caches together take what `kv_memory` allows, and the start says how it is divided."""
    room = 3 << 20
    options = OPTIONS | {"num_blocks": None, "kv_memory": room}
    with LLM(**options | {"speculative_config": draft_config(draft_folder)}) as llm:
        outputs = llm.generate(STORIES, stories(**KINDS["sampled"]))
        assert results(outputs) == plain["sampled"]
        assert llm.engine.speculation.method == "draft_model"
        assert llm.engine.metrics.accepted_tokens > 40
        pools = llm.engine.runner.pool, llm.engine.speculation.drafter.runner.pool
        assert pools[0].num_blocks == pools[1].num_blocks == room // sum(pool.block_bytes for pool in pools)
        assert f"{pools[0].num_blocks} blocks: " in caplog.text
    least = sum(pool.block_bytes for pool in pools)
    with pytest.raises(ArgumentError, match=f"no block of the model and its drafter together.* at least {least},"):
        LLM(**options | {"kv_memory": least - 1, "speculative_config": draft_config(draft_folder)})


@pytest.mark.parametrize("options", [{}, {"skip_tokenizer_init": True}], ids=["tokens", "sizes"])
def test_another_vocabulary_is_refused_by_name(tiny_model, options):
    with pytest.raises(ArgumentError, match=f"draft model '{tiny_model}' has.* vocabulary"):
        LLM(**OPTIONS | options | {"speculative_config": draft_config(tiny_model)})


@pytest.mark.parametrize("config", ["auto", "suffix", {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}], ids=str)
def test_lookups_by_configuration(config, plain):
    with LLM(**OPTIONS | {"speculative_config": config}) as llm:
        assert results(llm.generate(STORIES, stories(**KINDS["greedy"]))) == plain["greedy"]
        assert llm.engine.speculation is not None and llm.engine.speculation.on
