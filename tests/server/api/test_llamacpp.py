"""What llama.cpp's clients send and read: /completion, /slots, /tokenize with content, n_predict, timings, and its form of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running
from tinyvllm.server.core.limits import MAX_PROMPTS

PROMPT = "Once upon a time there was a dragon"
ASK = {"prompt": PROMPT, "n_predict": 6, "temperature": 0}
TALK = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0}


def complete(server: Running, **more: Any) -> Any:
    reply = server.post("/completion", {**ASK, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def refusal(server: Running, body: Mapping[str, Any], path: str = "/completion") -> dict[str, Any]:
    reply = server.post(path, {**ASK, **body} if path == "/completion" else body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def test_a_whole_answer_and_a_stream_are_the_same(server: Running) -> None:
    whole = complete(server, return_tokens=True, cache_prompt=False)
    same = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}).json()[
        "choices"
    ][0]
    assert whole["content"] == same["text"] and whole["tokens"] == same["token_ids"] and whole["prompt"].endswith(PROMPT)
    assert whole["stop"] is True and whole["stop_type"] == "limit" and whole["stopping_word"] == "" and whole["truncated"] is False
    assert whole["tokens_predicted"] == 6 and whole["tokens_evaluated"] == len(same["prompt_token_ids"]) and not whole["has_new_line"]
    *steps, last = events(server.post("/completion", {**ASK, "stream": True, "timings_per_token": True}).text)
    assert all(not step["stop"] and step["tokens"] and step["timings"]["predicted_n"] == step["tokens_predicted"] for step in steps)
    assert "".join(step["content"] for step in steps) == whole["content"] and sum((step["tokens"] for step in steps), []) == whole["tokens"]
    assert last["stop"] and last["content"] == "" and last["tokens"] == [] and last["generation_settings"]["n_predict"] == 6
    assert complete(server, stop=[whole["content"][-3:]])["stop_type"] == "word"


def test_timings(server: Running) -> None:
    """Tokens from the cache are counted apart; the first token costs the prompt and no step of its own."""
    times = complete(server, cache_prompt=False)["timings"]
    assert times["cache_n"] == 0 and times["prompt_n"] > 5 and times["predicted_n"] == 6 and min(times.values()) >= 0
    assert times["predicted_per_second"] == pytest.approx(5000 / times["predicted_ms"]) and times["prompt_ms"] > 0
    one = complete(server, n_predict=1)["timings"]
    assert one["predicted_per_second"] == one["predicted_per_token_ms"] == 0
    for path, body in (("/v1/chat/completions", TALK), ("/v1/completions", {"prompt": PROMPT}), ("/generate", {"prompt": PROMPT})):
        asked = {**body, "n_predict": 4, "timings_per_token": True}
        assert server.post(path, asked).json()["timings"]["predicted_n"] == 4
        assert events(server.post(path, {**asked, "stream": True}).text)[-1]["timings"]["predicted_n"] == 4
        assert "timings" not in server.post(path, {**body, "n_predict": 4}).json()


def test_prompts(server: Running) -> None:
    """A text, token ids, both mixed, and lists of these; only a text that is first gets BOS."""
    whole = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    rest = server.post("/tokenize", {"content": PROMPT}).json()["tokens"]
    bos = whole[: len(whole) - len(rest)]
    assert bos and complete(server, prompt=whole)["content"] == complete(server)["content"]
    mixed = complete(server, prompt=[*bos, PROMPT])
    assert mixed["content"] == complete(server)["content"] and mixed["tokens_evaluated"] == len(whole)
    assert complete(server, prompt=[*bos, PROMPT, 5])["tokens_evaluated"] == len(whole) + 1
    several = complete(server, prompt=[PROMPT, whole, [*bos, PROMPT]], n_cmpl=2)
    assert [one["index"] for one in several] == list(range(6)) and len({one["content"] for one in several}) == 1
    assert isinstance(complete(server, prompt=[PROMPT]), list)
    assert complete(server, prompt={"prompt_string": PROMPT})["content"] == several[0]["content"]
    assert complete(server, prompt=[{"prompt_string": PROMPT}, whole])[0]["content"] == several[0]["content"]
    for prompt, word in (
        ([5, "a" * 300_000], "context"),
        ([5, *["a"] * (MAX_PROMPTS + 1)], "at most"),
        ([], "empty"),
        ("", "empty"),
        ({"prompt_string": "a", "multimodal_data": ["a"]}, "text"),
        ([[1], [{}]], "prompt"),
    ):
        assert word in refusal(server, {"prompt": prompt})["message"]
    assert refusal(server, {"prompt": [PROMPT] * 20, "n_cmpl": 100})["param"] == "n_cmpl"


def test_biases(server: Running) -> None:
    """Pairs or an object; a text means its tokens, false forbids them."""
    first = complete(server, n_probs=3, n_predict=1)["completion_probabilities"][0]
    assert first["id"] == first["top_logprobs"][0]["id"] and len(first["top_logprobs"]) == 3 and first["logprob"] < 0 and first["bytes"]
    token, text = first["id"], first["token"]
    for bias in ([[token, False]], [[token, -50]], {str(token): -50.0}, [[text.strip(), False]], {text.strip(): False}):
        settings = complete(server, logit_bias=bias, n_probs=1)
        if any(one["token"] == token for one in settings["generation_settings"]["logit_bias"]):
            assert all(one["id"] != token for one in settings["completion_probabilities"])
    assert complete(server, logit_bias=[[second := first["top_logprobs"][1]["id"], 100]], return_tokens=True)["tokens"][0] == second
    for bias in ([[token, True]], [[1.5, 1]], [[token, "a"]], [[token]], [["a" * 20_000, 1]]):
        assert refusal(server, {"logit_bias": bias})["param"].startswith("logit_bias")
    assert complete(server, ignore_eos=True)["generation_settings"]["logit_bias"][0]["bias"] is None


def test_an_answer_of_a_full_context_is_truncated(server: Running) -> None:
    """n_predict may exceed the context, unlike max_tokens."""
    context = httpx.get(f"{server.url}/props", timeout=60, trust_env=False).json()["default_generation_settings"]["n_ctx"]
    prompt = {"prompt": [5] * (context - 3), "ignore_eos": True}
    for length in (-1, 50):
        done = complete(server, **prompt, n_predict=length)
        assert done["truncated"] is True and done["tokens_predicted"] == 3 and done["stop_type"] == "limit"
        usage = server.post("/v1/completions", {**prompt, "n_predict": length}).json()["usage"]
        assert usage["completion_tokens"] == 3
    assert complete(server, **prompt, n_predict=2)["truncated"] is False
    assert "differ" in refusal(server, {"prompt": "a", "n_predict": 3, "max_tokens": 4}, "/v1/completions")["message"]
    assert refusal(server, {"n_predict": 0})["param"] == "n_predict"


def test_a_prompt_beyond_the_context(server: Running) -> None:
    """llama.cpp's type, numbers and words, and OpenAI's code."""
    context = httpx.get(f"{server.url}/props", timeout=60, trust_env=False).json()["default_generation_settings"]["n_ctx"]
    for path, body in (("/completion", {"prompt": [5] * 5000}), ("/v1/completions", {"prompt": [5] * 5000})):
        error = refusal(server, body, path)
        assert error["type"] == "exceed_context_size_error" and error["code"] == "context_length_exceeded"
        assert error["n_prompt_tokens"] == 5000 and error["n_ctx"] == context and "exceeds the available context size" in error["message"]


def test_formats_and_fields(server: Running) -> None:
    assert complete(server, grammar='root ::= "yes" | "no"')["content"] in ("yes", "no")
    assert complete(server, json_schema={"const": 12})["content"] == "12"
    chat = server.post("/v1/chat/completions", {**TALK, "json_schema": {"const": 12}}).json()
    assert chat["choices"][0]["message"]["content"] == "12"
    assert "combined" in refusal(server, {"grammar": 'root ::= "a"', "json_schema": {}})["message"]
    assert complete(server, response_fields=["content", "generation_settings/n_predict", "none"]).keys() == {
        "content", "generation_settings/n_predict",
    }  # fmt: skip
    assert complete(server, repeat_penalty=1.5)["generation_settings"]["repeat_penalty"] == 1.5
    assert complete(server, seed=7, temperature=1)["content"] == complete(server, seed=7, temperature=1)["content"]


def test_cache_prompt_false_uses_no_cache(server: Running) -> None:
    prompt = {"prompt": [7, 8, 9] * 30}
    complete(server, **prompt)
    assert complete(server, **prompt)["tokens_cached"] > 0
    assert complete(server, **prompt, cache_prompt=False)["tokens_cached"] == 0


def test_tokens(server: Running) -> None:
    plain = server.post("/tokenize", {"content": "Tag 媽"}).json()["tokens"]
    special = server.post("/tokenize", {"content": "Tag 媽", "add_special": True}).json()["tokens"]
    assert len(special) > len(plain) and special == server.post("/tokenize", {"prompt": "Tag 媽"}).json()["tokens"]
    pieces = server.post("/tokenize", {"content": "Tag 媽", "with_pieces": True}).json()["tokens"]
    assert [one["id"] for one in pieces] == plain
    raw = b"".join(one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces)
    assert raw.decode().strip() == "Tag 媽" and any(isinstance(one["piece"], list) for one in pieces)
    assert server.post("/detokenize", {"tokens": plain}).json()["content"].strip() == "Tag 媽"
    assert server.post("/detokenize", {"tokens": plain, "model": "demo"}).json().keys() == {"prompt"}, "vLLM's form"
    for body in ({"prompt": "a", "with_pieces": True}, {"content": "a", "prompt": "a"}, {"content": "a", "add_special_tokens": True}):
        assert refusal(server, body, "/tokenize")
    count = server.post("/v1/chat/completions/input_tokens", TALK).json()["input_tokens"]
    assert count == server.post("/v1/chat/completions", {**TALK, "max_tokens": 1}).json()["usage"]["prompt_tokens"]


def test_slots(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry for each sequence that can run, and 503 if there is no free one and the client asks for that."""

    def get(query: str = "") -> httpx.Response:
        return httpx.get(f"{server.url}/slots{query}", timeout=60, trust_env=False)

    complete(server)
    (llm,) = server.service.models.loaded().values()
    slots = get("?fail_on_no_slot=1").json()
    assert len(slots) == llm.config.max_num_seqs and {one["n_ctx"] for one in slots} == {llm.max_model_len}
    for running, busy in ((0, 200), (3, 200), (len(slots), 503)):
        monkeypatch.setattr(llm, "status", lambda: {"running": running})  # noqa: B023  called at once
        assert [one["is_processing"] for one in get().json()].count(True) == running
        assert get("?fail_on_no_slot=1").status_code == busy
