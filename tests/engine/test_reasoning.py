"""Structures that begin after reasoning, and budgets for reasoning: by tokens, by text, alone and in a batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from tests.conftest import write_weights
from tests.engine.soak_traffic import check_empty
from tests.sampling.forcing import EOS as FORCING_EOS
from tests.sampling.forcing import TOKENS, new_backend
from tests.tiny.thinking import THINK, UNTHINK, write_thinking_model
from tinyvllm import LLM, SamplingParams
from tinyvllm.engine.engine import Engine
from tinyvllm.engine.reasoning import Reasoning, ReasoningMarks
from tinyvllm.engine.tools.recording import read_run
from tinyvllm.engine.tools.replay import config_of, replay
from tinyvllm.errors import ArgumentError, RequestError
from tinyvllm.request import ReasoningParams, RequestOutput, StructuredOutputsParams
from tinyvllm.sampling.grammar import Grammar

ANSWER = StructuredOutputsParams(choice=["yes", "no"])
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Nina", "Tom"]}}, "required": ["name"], "additionalProperties": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=ANSWER, skip_special_tokens=False)
OPENED, CLOSED, FRESH = "Why?<think>\n", "Why?<think>\n\n</think>\n\n", "Why?"
EOS = 257


class Says:
    """A processor that wants these tokens, one a draw, whether they may come or not; then an x."""

    def __init__(self, *wanted: str | int):
        self.wanted = [token for part in wanted for token in ([part] if isinstance(part, int) else part.encode())]
        self.draws = 0

    def __call__(self, prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
        self.draws += 1
        logits[self.wanted.pop(0) if self.wanted else ord("x")] += 1000
        return logits


@pytest.fixture(scope="module", params=[pytest.param("special", marks=pytest.mark.long), "added", "text"])
def llm(request, tiny_model, tmp_path_factory) -> Iterator[LLM]:
    folder = write_thinking_model(tiny_model, tmp_path_factory.mktemp("thinking"), request.param)
    write_weights(folder, seed=2)  # where nothing is forced, the likeliest token after reasoning is no blank
    with LLM(folder, device="CPU", max_model_len=128, max_num_seqs=4, num_blocks=40) as llm:
        llm.marks = ("<", "</think>") if request.param == "text" else (THINK, UNTHINK)  # of "<think>" all but the first is forced
        llm.opening = "<think>" if request.param == "text" else THINK  # where nothing forces it
        yield llm


def said(llm: LLM, prompt: str, *wanted: str | int, **changes: Any) -> str:
    params = replace(GREEDY, logits_processors=[Says(*wanted)], **changes)
    part = llm.generate([prompt], params)[0].outputs[0]
    check_empty(llm.engine)
    assert part.error is None, part.error
    return part.text


def test_a_structure_begins_after_reasoning_that_the_prompt_opened(llm) -> None:
    reasoning = said(llm, OPENED, "so ", EOS, "be it", llm.marks[1], "!", "no")
    assert reasoning[:3] == "so " and reasoning[4:] in ("be it</think>yes", "be it</think>no")  # no end inside, only the structure after it


def test_a_model_may_open_its_reasoning_with_the_first_token(llm) -> None:
    assert said(llm, FRESH, llm.marks[0], "hm", llm.marks[1], "no") == "<think>hm</think>no"


def test_a_model_that_does_not_think_first_does_not_think(llm) -> None:
    assert said(llm, FRESH, "n", llm.marks[0]) == "no"


def test_reasoning_that_the_prompt_has_closed_are_over(llm) -> None:
    assert said(llm, CLOSED, llm.marks[0], "no") in ("yes", "no")


def test_a_structure_that_begins_at_once(llm) -> None:
    for prompt in (OPENED, FRESH):
        assert said(llm, prompt, "n", structured_outputs=replace(ANSWER, enable_in_reasoning=True)) == "no"


def test_two_blanks_may_stand_between(llm) -> None:
    assert said(llm, OPENED, "a", llm.marks[1], "\n", "\n", "n") == "a</think>\n\nno"
    assert said(llm, OPENED, "a", llm.marks[1], "\n", "n") == "a</think>\nno"
    assert said(llm, OPENED, "a", llm.marks[1], "\n", "\n", "\n") in ("a</think>\n\nyes", "a</think>\n\nno")


def test_a_mark_that_is_spelled_otherwise_closes_too(llm) -> None:
    assert said(llm, OPENED, "a</think>", "no") == "a</think>no"


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"presence_penalty": 0.5}, {"allowed_token_ids": [*range(32, 127)]}])
def test_a_budget_closes_and_the_structure_begins(llm, more: dict[str, Any]) -> None:
    params = replace(GREEDY, thinking_token_budget=3, logits_processors=[Says("abcdefgh")], **more)
    (part,) = llm.generate([OPENED], params)[0].outputs
    assert part.error is None and part.text in ("abc</think>yes", "abc</think>no")
    if "logprobs" in more:
        assert [token in at for token, at in zip(part.token_ids, part.logprobs, strict=True)] == [True] * len(part.token_ids)


def test_a_budget_of_nothing(llm) -> None:
    assert said(llm, OPENED, "abc", thinking_token_budget=0) in ("</think>yes", "</think>no")
    assert said(llm, FRESH, llm.marks[0], "abc", thinking_token_budget=0) in ("<think></think>yes", "<think></think>no")
    assert said(llm, OPENED, "abc", thinking_token_budget=0, stop=["think>"], logprobs=0) == "</"


def test_a_budget_without_a_structure(llm) -> None:
    more = {"structured_outputs": None, "max_tokens": 40}
    assert said(llm, OPENED, "abcdef", thinking_token_budget=2, **more).startswith("ab</think>")
    assert said(llm, FRESH, "ab", llm.opening, "cd<efgh", thinking_token_budget=3, **more).startswith("ab<think>cd<")
    drawn = said(llm, OPENED, "abcdef", thinking_token_budget=2, logprobs=0, **more)
    assert drawn.startswith("ab</think>")


def test_forced_tokens_are_not_drawn_after_reasoning(llm) -> None:
    says = Says("a", llm.marks[1], '{"name":"T')
    structure = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    text = llm.generate([OPENED], replace(GREEDY, logits_processors=[says], structured_outputs=structure))[0].outputs[0].text
    assert json.loads(text.removeprefix("a</think>"))["name"] in ("Nina", "Tom")
    assert says.draws < 2 + len("</think>") + 4


def test_stop_strings_and_banned_words_hold_inside_reasoning(llm) -> None:
    assert said(llm, OPENED, "abc", stop=["bc"]) == "a"
    text = said(llm, OPENED, "a", "b", llm.marks[1], "no", bad_words=["b"])
    assert "b" not in text and text.endswith(("</think>yes", "</think>no"))


def test_a_stop_string_in_what_is_forced_first_is_an_end_like_any(llm) -> None:
    only = StructuredOutputsParams(choice=["abc def"], enable_in_reasoning=True)
    for prompt, structure in ((FRESH, only), (CLOSED, replace(only, enable_in_reasoning=False))):
        part = llm.generate([prompt], replace(GREEDY, structured_outputs=structure, stop=["c"]))[0].outputs[0]
        assert (part.text, part.finish_reason, part.stop_reason) == ("ab", "stop", "c")
        whole = llm.generate([prompt], replace(GREEDY, structured_outputs=structure, min_tokens=20))[0].outputs[0]
        assert (whole.text, whole.finish_reason) == ("abc def", "stop")
    assert llm.generate([FRESH], replace(GREEDY, structured_outputs=only, stop_token_ids=[ord("b")]))[0].outputs[0].text == "a"


def test_an_opening_that_the_grammar_shares(llm) -> None:
    shared = StructuredOutputsParams(regex="<(b|think!)>")
    assert said(llm, FRESH, "<b>", structured_outputs=shared) == "<b>"
    assert said(llm, FRESH, "<think!>", structured_outputs=shared) == "<think!>"
    assert said(llm, FRESH, llm.opening, "a", llm.marks[1], "<b>", structured_outputs=shared) == "<think>a</think><b>"


def test_marks_that_the_caller_brings(llm) -> None:
    reasoning = ReasoningParams("[[", "]]", "inside")
    assert said(llm, FRESH, "a</think>]", "]", "no", reasoning=reasoning) == "a</think>]]no"
    assert said(llm, OPENED, llm.marks[0], "no", reasoning=ReasoningParams("<think>", "</think>", "after")) in ("yes", "no")


def test_what_cannot_be(llm, tiny_model) -> None:
    with pytest.raises(ArgumentError, match="begins must be one of before, inside, after"):
        ReasoningParams("a", "b", "there")
    with pytest.raises(ArgumentError, match="missing field 'closing'"):
        SamplingParams(reasoning={"opening": "a"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="enable_in_reasoning"):
        llm.generate([FRESH], replace(GREEDY, thinking_token_budget=1, structured_outputs=replace(ANSWER, enable_in_reasoning=True)))
    with LLM(tiny_model, device="CPU", max_model_len=64, num_blocks=8) as plain:  # no marks, so nothing to wait for
        assert said(plain, OPENED, "no") == "no"
        with pytest.raises(RequestError, match="no marks of reasoning"):
            plain.generate(["a"], SamplingParams(thinking_token_budget=1))


class Vocabulary:
    """The vocabulary of tests/sampling as a tokenizer, and one token more that crosses the border of a mark."""

    special_ids = frozenset(range(len(TOKENS) - 3, len(TOKENS)))
    tokens = [*TOKENS, b">a", b">\n", b"k></think>{"]
    vocab_size = len(tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def token_text(self, token_id: int) -> str:
        return self.tokens[token_id].decode("utf-8", "replace")

    def encode_within(self, text: str) -> list[int]:
        return list(text.encode())


def test_no_token_may_close_reasoning_and_continue() -> None:
    n = len(TOKENS)
    marks = ReasoningMarks(Vocabulary(), "<think>", "</think>", [FORCING_EOS])  # type: ignore[arg-type]
    grammar = Grammar(new_backend().compile(StructuredOutputsParams(choice=["a"])))
    reasoning = Reasoning(marks, "inside", None, grammar)
    assert reasoning.banned == {FORCING_EOS, n + 2} and not reasoning.uses_grammar
    for byte in b"so</think":
        assert reasoning.accept(byte)
    assert reasoning.banned == {FORCING_EOS, n, n + 2}
    assert reasoning.accept(n + 1) and reasoning.uses_grammar and not reasoning.over and not reasoning.banned
    assert not reasoning.accept(ord("b"))


def test_a_mark_of_special_tokens_and_text() -> None:
    class Harmony(Vocabulary):
        special_ids = frozenset((0, 1, 2))
        tokens = [b"<|channel|>", b"<|message|>", b"<|end|>", *TOKENS[3:]]

    marks = ReasoningMarks(Harmony(), "<|channel|>analysis<|message|>", "<|end|>", [FORCING_EOS])  # type: ignore[arg-type]
    assert marks.opening_ids == [0, *b"analysis", 1] and marks.closing_ids == [2]


# --- batches: the same tokens for any other requests


def requests(llm: LLM) -> dict[str, tuple[str, SamplingParams]]:
    sampled = replace(GREEDY, temperature=1.0, thinking_token_budget=7)
    schema = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    return {
        "opened": (OPENED, replace(sampled, seed=1)),
        "fresh": (FRESH, replace(sampled, seed=2, structured_outputs=schema, logit_bias={THINK: 30.0, ord("<"): 30.0})),
        "several": (OPENED, replace(sampled, seed=3, n=3, thinking_token_budget=5)),
        "best": (OPENED, replace(sampled, seed=4, best_of=3)),
        "late": (OPENED, replace(sampled, seed=5, min_tokens=9, structured_outputs=schema)),
        "plain": ("Once", replace(sampled, seed=6, structured_outputs=None, thinking_token_budget=None, max_tokens=20)),
    }


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work():
        outputs |= {output.request_id: output for output in engine.step()}
    check_empty(engine)
    return outputs


def add(engine: Engine, name: str, prompt: str, params: SamplingParams) -> None:
    assert engine.tokenizer is not None
    engine.add(name, engine.tokenizer.encode(prompt), params, prompt)


@pytest.mark.parametrize("options", [
    {"num_blocks": 12, "swap_space": "1MB", "preemption_mode": "swap"}, {"async_scheduling": True},
    *(pytest.param(more, marks=pytest.mark.long)
      for more in ({"num_blocks": 12}, {"num_scheduler_steps": 4}, {"max_num_batched_tokens": 8})),
])  # fmt: skip
def test_other_requests_change_nothing(llm, options: dict[str, Any]) -> None:
    asked = requests(llm)
    alone: dict[str, RequestOutput] = {}
    for name, (prompt, params) in asked.items():
        add(llm.engine, name, prompt, params)
        alone |= finish(llm.engine)
    given = {"max_model_len": 64, "max_num_seqs": 8, "num_blocks": 40, "block_size": 8} | options
    with LLM(llm.engine.config.model, device="CPU", **given) as other:
        for name, (prompt, params) in asked.items():
            add(other.engine, name, prompt, params)
        together = finish(other.engine)
        preempted = sum(output.metrics.preemptions for output in together.values())
    assert preempted > 0 or options.get("num_blocks") != 12
    for name in asked:
        assert [part.token_ids for part in together[name].outputs] == [part.token_ids for part in alone[name].outputs], name
        if name != "plain":
            assert all(part.text.count("</think>") == 1 and part.finish_reason == "stop" for part in alone[name].outputs), alone[name]


def test_a_replay_thinks_the_same(llm, tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    with LLM(llm.engine.config.model, device="CPU", max_model_len=64, num_blocks=40, record=str(path)) as recorded:
        for name, (prompt, params) in requests(llm).items():
            add(recorded.engine, name, prompt, params)
        add(recorded.engine, "brought", FRESH, replace(GREEDY, reasoning=ReasoningParams("[[", "]]", "inside"), thinking_token_budget=4))
        finish(recorded.engine)
    run = read_run(str(path))
    assert run.added[-1]["params"]["reasoning"] == {"opening": "[[", "closing": "]]", "begins": "inside"}
    assert replay(run, config_of(run, {})).identical
