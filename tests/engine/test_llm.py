"""LLM with the real engine and a tiny checkpoint: order, streams, chat, refusals."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.drafting import Oracle, speculate
from tinyvllm import LLM, ArgumentError, ModelError, RequestError, RequestOptions, SamplingParams
from tinyvllm.engine.prompt import PromptError, default_sampling_params
from tinyvllm.errors import TinyvllmError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, num_blocks=64, max_num_seqs=4) as llm:
        yield llm


def tokens(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["hello", "a much longer prompt than the others", "b", "hello", "c", "d"]
    lengths = [8, 2, 5, 8, 1, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts and all(o.finished for o in outputs)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert outputs[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids == tokens(llm, "hello")
    assert len({o.request_id for o in outputs}) == len(outputs)


def test_a_text_and_its_ids_are_the_same_prompt(llm: LLM) -> None:
    text = llm.generate("hello", GREEDY)[0]
    assert text.prompt_token_ids == [256, *b"hello"]
    ids = llm.generate({"prompt_token_ids": text.prompt_token_ids}, GREEDY)[0]
    assert ids.prompt is None and ids.prompt_token_ids == text.prompt_token_ids
    assert ids.outputs[0].token_ids == text.outputs[0].token_ids


def test_greedy_tokens_are_the_best_of_the_logits(llm: LLM) -> None:
    prompt = [256, *b"hello"]
    generated = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids
    logits = llm.prompt_logits(prompt + generated)
    assert logits.shape == (len(prompt) + 8, 264) and logits.dtype == np.float32
    assert logits.argmax(axis=1)[len(prompt) - 1 : -1].tolist() == generated


def test_a_stream_adds_up_to_the_output(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    whole = llm.generate("hello", params)[0].outputs[0]
    pieces = list(llm.stream("hello", params))
    assert "".join(map(str, pieces)) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(piece.token_ids for piece in pieces), "as many tokens as their step has given: more than one where drafts are accepted"


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_stream_has_a_piece_for_each_step(tiny_model: Path, num_drafts: int) -> None:
    params = SamplingParams(seed=3, max_tokens=13, ignore_eos=True)
    with LLM(tiny_model, max_model_len=64, speculative_config="off") as llm:
        whole = llm.generate(["hello"], params)
        if num_drafts:
            speculate(llm, Oracle(whole).right, num_drafts)
        pieces = [piece.token_ids for piece in llm.stream("hello", params)]
    assert sum(pieces, []) == whole[0].outputs[0].token_ids
    assert [len(piece) for piece in pieces] == ([1, 3, 3, 3, 3] if num_drafts else [1] * 13)


def test_a_stream_of_several_continuations(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=5, ignore_eos=True)
    whole = llm.generate("hello", params)[0].outputs
    pieces = list(llm.stream("hello", params))
    for part in whole:
        assert "".join(p.text for p in pieces if p.index == part.index) == part.text
    assert whole[0].token_ids != whole[1].token_ids


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    assert llm.engine.has_work()
    stream.close()  # type: ignore[attr-defined]
    tokens(llm, "x")
    assert not llm.engine.has_work() and llm._open == {}


def test_a_stream_continues_after_another_request_ran(llm: LLM) -> None:
    alone = [str(d) for d in llm.stream("hello", GREEDY)]
    stream = llm.stream("hello", GREEDY)
    first = str(next(stream))
    other = llm.stream("b", GREEDY)
    next(other)
    assert len(tokens(llm, "x", SamplingParams(max_tokens=20, ignore_eos=True))) == 20
    assert first + "".join(map(str, stream)) == "".join(alone)
    assert sum(len(d.token_ids) for d in other) == 7
    assert not llm.engine.has_work()


def test_chat_uses_the_template(llm: LLM) -> None:
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    output = llm.chat(talk, GREEDY)[0]
    assert output.prompt == "<s><|system|>S</s><|user|>hi</s><|assistant|>"
    assert output.prompt_token_ids == [256, 258, ord("S"), 257, 259, *b"hi", 257, 260]
    both = llm.chat([talk, talk[1:]], GREEDY)
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids and both[1].prompt == "<s><|user|>hi</s><|assistant|>"
    assert llm.chat(talk, GREEDY, add_generation_prompt=False)[0].prompt == "<s><|system|>S</s><|user|>hi</s>"
    assert llm.chat(talk, GREEDY, chat_template="{{ name }}", name="x")[0].prompt == "x"
    assert sum(len(d.token_ids) for d in llm.stream(talk, GREEDY)) == 8


def test_the_model_recommends_sampling_parameters(llm: LLM, tmp_path: Path) -> None:
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.top_p) == (0.7, 50, 1.0)
    assert len(llm.generate("hello")[0].outputs[0].token_ids) <= 16
    assert default_sampling_params(tmp_path) == SamplingParams()
    for wrong, words in (("[", "generation_config.json"), ("[]", "generation_config.json"), ('{"top_p": 3}', "top_p")):
        (tmp_path / "generation_config.json").write_text(wrong)
        with pytest.raises(ModelError, match=words):
            default_sampling_params(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("x" * 600, "601 tokens"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1, 264]}, "264"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt_token_id": [1]}, "prompt_token_ids"),
        ({"prompt": "a", "temperature": 1}, "'temperature'"),
        ({"prompt": 3}, "must be a text"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a non-empty text"),
        ({"prompt_token_ids": [1], "cache_salt": "x" * 4097}, "cache_salt must be a non-empty text of at most 4096 characters"),
        ({"messages": [{"role": "user", "content": "a"}], "cache_salt": 7}, "cache_salt must be a non-empty text"),
        (7, "a prompt must be a text"),
    ],
)
def test_a_prompt_that_cannot_be_served_runs_nothing(llm: LLM, prompt: object, words: str) -> None:
    with pytest.raises((RequestError, ArgumentError), match=words):
        llm.generate([prompt], GREEDY)  # type: ignore[list-item]
    with pytest.raises(PromptError, match=words) as refusal:
        llm.generate(["fine", prompt, "fine"], GREEDY)  # type: ignore[list-item]
    assert refusal.value.index == 1
    assert llm._open == {} and len(tokens(llm, "x")) == 8 and not llm.engine.has_work()


def test_prompts_share_cached_prefixes_with_those_of_their_salt(llm: LLM) -> None:
    """As in vLLM's TextPrompt and TokensPrompt."""
    text = "salt " * 20
    ids = [256, *text.encode()]

    def cached(*prompts: dict[str, object], options: RequestOptions | None = None) -> list[int]:
        return [output.num_cached_tokens for output in llm.generate(list(prompts), GREEDY, options=options)]

    assert cached({"prompt": text, "cache_salt": "a"}, {"prompt": text, "cache_salt": "b"}) == [0, 0], "nor with those that run with them"
    assert cached({"prompt_token_ids": ids, "cache_salt": "a"}) == [96]
    assert cached({"prompt": text}) == cached({"prompt": text, "cache_salt": "c"}) == [0]
    assert cached({"prompt": text}, options=RequestOptions(cache_salt="a")) == [96], "the salt of options is the same one"
    assert cached({"prompt": text, "cache_salt": "a"}, options=RequestOptions(priority=1, cache_salt="a")) == [96]
    assert cached({"prompt": text, "cache_salt": None}) == [96], "not given"
    with pytest.raises(ArgumentError, match="the prompt has 'a', its options 'b': give one of them"):
        cached({"prompt": text, "cache_salt": "a"}, options=RequestOptions(cache_salt="b"))


def test_sampling_parameters_are_one_or_one_each(llm: LLM) -> None:
    with pytest.raises(ArgumentError, match="one for each of 3 prompts, got 2"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(ArgumentError, match="SamplingParams"):
        llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]
    for nothing in (None, 5):
        with pytest.raises(ArgumentError, match="prompts must be a single one or a list, got"):
            llm.generate(nothing, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="messages must be a single one or a list, got int"):
        llm.chat(5, GREEDY)  # type: ignore[arg-type]
    assert llm.generate([], GREEDY) == []


def test_an_interrupted_generation_leaves_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = itertools.count(), llm.engine.step

    def interrupted() -> list:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.undo()
    assert llm._open == {} and len(tokens(llm, "x")) == 8 and not llm.engine.has_work()


def test_a_bar_counts_the_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err


def test_wrong_options_and_models(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="max_model_length"):
        LLM(tiny_model, max_model_length=3)
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}))
    with pytest.raises(ModelError, match="nosuch|NoSuch"):
        LLM(tmp_path)


def test_sampling_params_of_the_wrong_kind_are_refused():
    from tinyvllm.engine.prompt import spread

    for wrong in (5, "x", [5]):
        with pytest.raises(ArgumentError, match="sampling_params must be"):
            spread(wrong, SamplingParams(), 1)


@pytest.mark.parametrize("speculation", ["off", "auto", "eagle_lite"])
def test_a_closed_engine_keeps_no_weights(tiny_model: Path, speculation: str) -> None:
    """A closed LLM may live on in a variable; its model, and the captures that share an arena with later engines, may not."""
    llm = LLM(tiny_model, max_model_len=64, speculative_config=speculation)
    runner = weakref.ref(llm.engine.runner)
    llm.close()
    gc.collect()
    assert runner() is None


def test_a_closed_engine_says_so(tiny_model: Path) -> None:
    llm = LLM(tiny_model, max_model_len=64)
    llm.close()
    uses: list[Callable[[], object]] = [
        lambda: llm.generate("a", GREEDY),
        lambda: list(llm.stream("a", GREEDY)),
        lambda: llm.embed("a"),
        lambda: llm.prompt_logits([5]),
        lambda: llm.segment("a longer text for a segment"),
    ]
    for use in uses:
        with pytest.raises(TinyvllmError, match="engine: it was closed"):
            use()
    llm.close()


def test_a_shorter_context_than_the_models_is_said(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(tiny_model, num_blocks=8) as llm:
        assert llm.max_model_len == 128
    with LLM(tiny_model, max_model_len=128), LLM(tiny_model):
        pass
    assert [r.getMessage() for r in caplog.records if "context" in r.getMessage()] == [
        "the context is 128 tokens by default, the model allows 512: --max-model-len sets another, --num-blocks or --kv-memory the cache"
    ]


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
@pytest.mark.parametrize("best_of", [None, 4])
def test_equal_greedy_answers_are_computed_once(llm: LLM, kind: str, best_of: int | None) -> None:
    if best_of is not None and kind == "delta":
        kind = "final_only"
    engine, alone = llm.engine, llm.generate("hello", replace(GREEDY, logprobs=1))[0].outputs[0]
    before = engine.stats.num_tokens
    engine.add("several", llm.engine.tokenizer.encode("hello"), replace(GREEDY, n=3, best_of=best_of, logprobs=1, output_kind=kind))
    outputs = [output for _ in iter(engine.has_work, False) for output in engine.step()]
    assert engine.stats.num_tokens - before == len(alone.token_ids), "one of three is computed"
    whole = functools.reduce(lambda first, later: first.joined(later), outputs) if kind == "delta" else outputs[-1]
    assert [part.index for part in whole.outputs] == [0, 1, 2] and whole.finished
    for part in whole.outputs:
        assert (part.text, part.token_ids, part.logprobs, part.finish_reason) == (
            alone.text, alone.token_ids, alone.logprobs, alone.finish_reason
        )  # fmt: skip
