"""RequestState turns sampled ids into text and ends. The tokenizer is a real one whose ids are bytes, so that texts split anywhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tinyvllm.engine.output import RequestState
from tinyvllm.request import CompletionOutput, Logprob, SamplingParams
from tinyvllm.text.load import load_tokenizer
from tinyvllm.text.tokenizer import Tokenizer

EOS, USER = 257, 259


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)


def state_of(tokenizer: Tokenizer | None, prompt: str = "Q", max_model_len: int = 100, **params: Any) -> RequestState:
    ids = list(prompt.encode())
    params = {"seed": 7, "max_tokens": None, **params}
    return RequestState(
        "r", prompt, ids, SamplingParams(**params), tokenizer, (EOS,), max_model_len, time.monotonic(), first_sequence_id=40
    )


def feed(state: RequestState, tokens: list[int] | bytes, index: int = 0) -> tuple[list[str], CompletionOutput]:
    """Append tokens up to the end of the continuation; the text after each of them, and what it became."""
    texts = []
    for token in tokens:
        reason = state.append(state.sequences[index], token, None)
        part = state.output().outputs[index]
        assert part.finish_reason == reason
        texts.append(part.text)
        if reason is not None:
            break
    return texts, state.output().outputs[index]


def test_text_never_shows_half_a_character(tokenizer: Tokenizer) -> None:
    texts, part = feed(state_of(tokenizer), "aé🌍".encode())
    assert texts == ["a", "a", "aé", "aé", "aé", "aé", "aé🌍"]
    assert part.token_ids == list("aé🌍".encode()) and part.finish_reason is None


def test_what_never_became_a_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    texts, part = feed(state_of(tokenizer, max_tokens=3), b"ab\xc3")
    assert texts == ["a", "ab", "ab\ufffd"] and part.finish_reason == "length"


def test_end_of_sequence_is_a_token_but_not_text(tokenizer: Tokenizer) -> None:
    texts, part = feed(state_of(tokenizer, skip_special_tokens=False), [*b"hi", EOS])
    assert (texts, part.token_ids) == (["h", "hi", "hi"], [*b"hi", EOS])
    assert (part.finish_reason, part.stop_reason) == ("stop", None)


def test_ignore_eos(tokenizer: Tokenizer) -> None:
    _, part = feed(state_of(tokenizer, ignore_eos=True, max_tokens=4), [*b"hi", EOS, *b"!?"])
    assert (part.text, part.token_ids, part.finish_reason) == ("hi!", [*b"hi", EOS, *b"!"], "length")
    _, part = feed(state_of(tokenizer, ignore_eos=True, skip_special_tokens=False, max_tokens=4), [*b"hi", EOS, *b"!?"])
    assert part.text == "hi</s>!"


def test_stop_token_ids(tokenizer: Tokenizer) -> None:
    _, part = feed(state_of(tokenizer, stop_token_ids=[USER, ord("x")]), b"abxyz")
    assert (part.text, part.token_ids, part.finish_reason, part.stop_reason) == ("ab", list(b"abx"), "stop", ord("x"))
    _, part = feed(state_of(tokenizer, stop_token_ids=[ord("x")], include_stop_str_in_output=True), b"abxyz")
    assert part.text == "abx"
    _, part = feed(state_of(tokenizer, stop_token_ids=[ord("x")], stop=["bc"]), b"abxyz")
    assert (part.text, part.stop_reason) == ("ab", ord("x"))
    _, part = feed(state_of(tokenizer, stop_token_ids=[EOS], ignore_eos=True), [*b"ab", EOS])
    assert (part.finish_reason, part.stop_reason) == ("stop", EOS)


def test_a_stop_string_split_over_tokens_is_cut_and_never_shown(tokenizer: Tokenizer) -> None:
    texts, part = feed(state_of(tokenizer, stop=["STOP", "é!"]), b"one STSTOP two")
    assert texts == ["o", "on", "one", "one ", "one ", "one ", "one ST", "one ST", "one ST", "one ST"][: len(texts)]
    assert (part.text, part.finish_reason, part.stop_reason) == ("one ST", "stop", "STOP")
    assert part.token_ids == list(b"one STSTOP")
    _, part = feed(state_of(tokenizer, stop=["STOP", "é!"]), "oé!".encode())
    assert (part.text, part.stop_reason) == ("o", "é!")


def test_a_stop_string_may_stay_in_the_text(tokenizer: Tokenizer) -> None:
    _, part = feed(state_of(tokenizer, stop="\n\n", include_stop_str_in_output=True), b"a\nb\n\nc")
    assert (part.text, part.stop_reason) == ("a\nb\n\n", "\n\n")


@pytest.mark.parametrize("end", ["length", "eos", "abort"])
def test_held_back_text_comes_when_it_turns_out_to_be_no_stop_string(tokenizer: Tokenizer, end: str) -> None:
    state = state_of(tokenizer, stop=["STOP"], max_tokens=3 if end == "length" else None)
    texts, _ = feed(state, b"xST")
    assert texts[:2] == ["x", "x"]
    if end == "eos":
        feed(state, [EOS])
    elif end == "abort":
        assert texts[2] == "x"
        state.finish(state.sequences[0], "abort")
    part = state.output().outputs[0]
    assert part.text == "xST" and part.finish_reason == ("stop" if end == "eos" else end) and part.stop_reason is None


def test_a_stop_string_completed_by_the_last_token_wins_over_length(tokenizer: Tokenizer) -> None:
    _, part = feed(state_of(tokenizer, stop=["END"], max_tokens=4), b"xEND")
    assert (part.text, part.finish_reason, part.stop_reason) == ("x", "stop", "END")


def test_min_tokens(tokenizer: Tokenizer) -> None:
    _, part = feed(state_of(tokenizer, min_tokens=3, stop=["b"]), b"abcdbz")
    assert (part.text, part.token_ids) == ("abcd", list(b"abcdb"))
    _, part = feed(state_of(tokenizer, min_tokens=3), [EOS, *b"a", EOS, EOS])
    assert part.token_ids == [EOS, *b"a", EOS] and part.finish_reason == "stop"


def test_max_tokens_and_the_context(tokenizer: Tokenizer) -> None:
    _, part = feed(state_of(tokenizer, max_tokens=2), b"abc")
    assert (part.text, part.finish_reason, part.stop_reason) == ("ab", "length", None)
    _, part = feed(state_of(tokenizer, prompt="four", max_model_len=7), b"abcdef")
    assert (part.text, part.finish_reason) == ("abc", "length")
    _, part = feed(state_of(tokenizer, prompt="four", max_model_len=7, max_tokens=50), b"abcdef")
    assert part.text == "abc"


def test_n_continuations_are_apart(tokenizer: Tokenizer) -> None:
    state = state_of(tokenizer, n=3, seed=2**64 - 2, stop=["!"])
    assert [s.params.seed for s in state.sequences] == [2**64 - 2, 2**64 - 1, 0]
    assert [(s.sequence_id, s.index, s.request_id) for s in state.sequences] == [(40, 0, "r"), (41, 1, "r"), (42, 2, "r")]
    feed(state, b"abc", 1)
    feed(state, [*b"xy", EOS], 0)
    assert not state.finished and not state.output().finished and state.metrics.finished is None
    feed(state, b"d!", 1)
    assert not state.finished
    state.finish(state.sequences[2], "abort")
    output = state.output()
    assert output.finished and [(p.index, p.text, p.finish_reason) for p in output.outputs] == [
        (0, "xy", "stop"),
        (1, "abcd", "stop"),
        (2, "", "abort"),
    ]
    assert output.metrics.arrival <= output.metrics.first_token <= output.metrics.finished  # type: ignore[operator]


def test_the_first_end_counts(tokenizer: Tokenizer) -> None:
    state = state_of(tokenizer, n=2)
    state.finish(state.sequences[0], "length")
    state.finish(state.sequences[0], "abort")
    assert state.output().outputs[0].finish_reason == "length" and not state.finished
    with pytest.raises(AssertionError, match="after the end"):
        state.append(state.sequences[0], 65, None)


def test_outputs_do_not_change_afterwards(tokenizer: Tokenizer) -> None:
    state = state_of(tokenizer, logprobs=0)
    state.append(state.sequences[0], 65, {65: Logprob(-1.0, 1)})
    early = state.output()
    state.append(state.sequences[0], EOS, {EOS: Logprob(-1.0, 1)})
    assert early.outputs[0].token_ids == [65] and len(early.outputs[0].logprobs or ()) == 1
    assert not early.finished and early.metrics.finished is None and state.output().finished


def test_logprobs_get_the_spelling_of_their_tokens(tokenizer: Tokenizer) -> None:
    state = state_of(tokenizer, logprobs=2)
    state.append(state.sequences[0], 65, {65: Logprob(-1.0, 2), 66: Logprob(-0.5, 1), EOS: Logprob(-3.0, 3, "end")})
    assert state.output().outputs[0].logprobs == [{65: Logprob(-1.0, 2, "A"), 66: Logprob(-0.5, 1, "B"), EOS: Logprob(-3.0, 3, "end")}]
    assert state_of(tokenizer).output().outputs[0].logprobs is None


def test_without_a_tokenizer_there_are_only_ids() -> None:
    state = state_of(None, stop_token_ids=[9], logprobs=0, stop=None)
    state.append(state.sequences[0], 65, {65: Logprob(-1.0, 1)})
    assert state.append(state.sequences[0], 9, {9: Logprob(-1.0, 1)}) == "stop"
    part = state.output().outputs[0]
    assert (part.text, part.token_ids, part.stop_reason) == ("", [65, 9], 9)
    assert part.logprobs == [{65: Logprob(-1.0, 1)}, {9: Logprob(-1.0, 1)}]


def test_preemptions_are_counted(tokenizer: Tokenizer) -> None:
    state = state_of(tokenizer, n=2)
    state.sequences[0].num_preemptions, state.sequences[1].num_preemptions = 2, 1
    assert state.output().metrics.preemptions == 3


def test_deltas_hold_what_is_new_and_join_to_the_whole(tokenizer: Tokenizer) -> None:
    """A reader that was slower than the engine gets two as one; nothing is told twice."""
    asked: dict[str, Any] = {"n": 2, "max_tokens": 4, "logprobs": 0}
    whole, parts = state_of(tokenizer, **asked), state_of(tokenizer, **asked, output_kind="delta")
    told = []
    for position, token in enumerate("aé!".encode()):
        for state in (whole, parts):
            for sequence in state.sequences[: 2 if position != 1 else 1]:
                state.append(sequence, token, {token: Logprob(-1.0, 1)})
        told.append(parts.output())
    assert all(output is not None for output in told)
    first, second, third, fourth = told
    assert [part.token_ids for part in first.outputs] == [[97], [97]] and [part.index for part in second.outputs] == [0]
    joined, expected = first.joined(second).joined(third.joined(fourth)), whole.output()
    assert expected is not None
    for ours, theirs in zip(joined.outputs, expected.outputs, strict=True):
        assert (ours.text, ours.token_ids, ours.logprobs, ours.finish_reason) == (
            theirs.text, theirs.token_ids, theirs.logprobs, theirs.finish_reason,
        )  # fmt: skip


def test_final_only_tells_nothing_before_the_end(tokenizer: Tokenizer) -> None:
    state = state_of(tokenizer, max_tokens=2, output_kind="final_only")
    state.append(state.sequences[0], 97, None)
    assert state.output() is None
    state.append(state.sequences[0], 98, None)
    output = state.output()
    assert output is not None and output.finished and output.outputs[0].text == "ab"


def test_the_best_of_several_are_reported_at_the_end(tokenizer: Tokenizer) -> None:
    state = state_of(tokenizer, n=1, best_of=3, max_tokens=1)
    for sequence, logprob in zip(state.sequences, (-2.0, -0.5, -3.0), strict=True):
        assert state.output() is None
        state.append(sequence, 97 + sequence.index, {97 + sequence.index: Logprob(logprob, 1)})
    output = state.output()
    assert output is not None and [(part.index, part.text, part.logprobs) for part in output.outputs] == [(0, "b", None)]
