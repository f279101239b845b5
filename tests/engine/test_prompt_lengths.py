"""No prompt is cut: whatever computes one that the context does not hold refuses it, with the tokens that it has and those that fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyvllm import LLM, AsyncLLM, BeamSearchParams, RequestError, SamplingParams
from tinyvllm.cli import main
from tinyvllm.cli.partner import ContextFull, Local

CONTEXT, TOKENS = 64, 100
IDS = {"prompt_token_ids": [5] * TOKENS}
MESSAGES = [{"role": "user", "content": "word " * 200}]
LIMITS: dict[str, Any] = {"num_blocks": 64, "max_model_len": CONTEXT}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**LIMITS) as llm:
        yield llm


PATHS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(IDS),
    "one of several": lambda llm: llm.generate(["hello", IDS]),
    "stream": lambda llm: [*llm.stream(IDS)],
    "embed": lambda llm: llm.embed([IDS]),
    "prompt_logits": lambda llm: llm.prompt_logits([5] * TOKENS),
    "segment": lambda llm: llm.segment([5] * TOKENS),
    "beam search": lambda llm: llm.beam_search([IDS], BeamSearchParams(beam_width=2, max_tokens=3)),
    "prompt_logprobs": lambda llm: llm.generate(IDS, SamplingParams(prompt_logprobs=-1, logprobs=-1, max_tokens=1)),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_beyond_the_context_is_refused_with_both_counts(llm: LLM, path: str) -> None:
    with pytest.raises(RequestError) as refused:
        PATHS[path](llm)
    assert str(TOKENS) in str(refused.value) and (str(CONTEXT) in str(refused.value)), str(refused.value)
    if llm.engine.has_work():  # the end of the prompts that were queued before it
        llm.engine.step()
    assert not llm.engine.has_work()


@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1])
def test_one_token_too_many(llm: LLM, tokens: int) -> None:
    """The longest prompt that is answered leaves a token; one more is refused, also by a beam search."""
    for run in (llm.generate, lambda prompt: llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=3))):
        [whole] = run({"prompt_token_ids": [5] * (CONTEXT - 1)})
        assert len(whole.prompt_token_ids) == CONTEXT - 1
        with pytest.raises(RequestError, match=f"the prompt has {tokens} tokens, max_model_len={CONTEXT} allows at most {CONTEXT - 1}"):
            run({"prompt_token_ids": [5] * tokens})


def test_conversations(llm: LLM) -> None:
    """Of the command chat, too: it takes nothing out of a conversation by itself."""
    with pytest.raises(RequestError, match=f"the prompt has 20. tokens, max_model_len={CONTEXT} allows at most {CONTEXT - 1}"):
        llm.chat(MESSAGES)
    partner = Local(llm)
    with pytest.raises(ContextFull, match=f"the conversation has 20. tokens, the context of {CONTEXT} tokens holds at most"):
        next(partner.answer(MESSAGES, partner.default_params, {}))


def test_the_command_names_both_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--max-model-len", str(CONTEXT), "--num-blocks", "64", "--quiet"]
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "hello", "max_tokens": 2}\n' + json.dumps({"prompt_token_ids": [5] * TOKENS}) + "\n")
    assert main([*arguments, "--prompts-file", str(file), "--output", str(tmp_path / "a.jsonl")]) == 1
    text = f"the prompt has {TOKENS} tokens, max_model_len={CONTEXT}"
    assert text in capsys.readouterr().err
    answers = sorted(map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines()), key=lambda one: one["index"])
    assert answers[0]["completion_tokens"] == 2 and text in answers[1]["error"]["message"]


def test_a_batch_line_has_the_error(tmp_path: Path) -> None:
    body = {"model": "m", "prompt": [5] * TOKENS, "max_tokens": 2}
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    batch = ["batch", str(tmp_path / "in.jsonl"), "-o", str(out), "--served-model-name", "m", "--quiet"]
    assert main([*batch, "--max-model-len", str(CONTEXT), "--num-blocks", "64"]) == 1
    [answer] = map(json.loads, out.read_text().splitlines())
    error = answer["response"]["body"]["error"]
    assert error["code"] == "context_length_exceeded" and (error["n_prompt_tokens"], error["n_ctx"]) == (TOKENS, CONTEXT)


def test_async_engines_refuse_the_same() -> None:
    async def run(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match=f"the prompt has {TOKENS} tokens, max_model_len={CONTEXT}"):
            async for _ in llm.generate(IDS, SamplingParams(max_tokens=2)):
                pass
        with pytest.raises(RequestError, match=f"expected 1 to {CONTEXT} tokens, got {TOKENS}"):
            await llm.embed([[5] * TOKENS])

    llm = AsyncLLM(**LIMITS)
    try:
        asyncio.run(run(llm))
    finally:
        llm.close()
