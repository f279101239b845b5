"""The official OpenAI client against the real server: completions, chat, streams, logprobs, tools, formats and errors."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")

from tests.server.conftest import HERMES, LOOK, Running, events  # noqa: E402
from tinyvllm import LLM, SamplingParams  # noqa: E402

PROMPT = "Once upon a time"
ASK = [{"role": "user", "content": "Tell me a story about a dragon."}]


@pytest.fixture(scope="module")
def client(server: Running):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def offline() -> dict[str, str]:
    """Greedy answers without a server."""
    with LLM(max_num_seqs=8, num_blocks=512) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, top_p=1.0)
        text = llm.generate([PROMPT], greedy)[0].outputs[0].text
        chat = llm.chat(ASK, greedy)[0].outputs[0].text
        return {"text": text, "chat": chat}


def test_models_are_listed(client) -> None:
    assert [m.id for m in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_is_the_offline_one(client, offline) -> None:
    done = client.completions.create(model="demo", prompt=PROMPT, max_tokens=12, temperature=0, top_p=1)
    assert done.choices[0].text == offline["text"] and done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 12 and done.usage.total_tokens == done.usage.prompt_tokens + 12
    assert done.usage.prompt_tokens_details.cached_tokens >= 0


def test_completion_stream_is_the_offline_one(client, offline) -> None:
    stream = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=12, temperature=0, top_p=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == offline["text"]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12


def test_several_prompts_and_choices(client) -> None:
    ids = client.post("/../tokenize", body={"prompt": "The cat"}, cast_to=object)["tokens"]
    done = client.completions.create(model="demo", prompt=["The dog", "The dog"], n=2, max_tokens=4, seed=3)
    assert [c.index for c in done.choices] == [0, 1, 2, 3] and done.choices[0].text == done.choices[2].text
    by_ids = client.completions.create(model="demo", prompt=ids, max_tokens=4, temperature=0, echo=True)
    by_text = client.completions.create(model="demo", prompt="The cat", max_tokens=4, temperature=0)
    assert by_ids.choices[0].text.endswith("The cat" + by_text.choices[0].text)
    lists = client.completions.create(model="demo", prompt=[ids, ids], max_tokens=4, temperature=0)
    assert [c.text for c in lists.choices] == [by_text.choices[0].text] * 2


def test_interleaved_stream_of_several_choices(client) -> None:
    whole = client.completions.create(model="demo", prompt=["The dog", "A cat"], n=2, max_tokens=6, seed=5)
    texts = {i: "" for i in range(4)}
    for chunk in client.completions.create(model="demo", prompt=["The dog", "A cat"], n=2, max_tokens=6, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {c.index: c.text for c in whole.choices}


def test_completion_logprobs_with_echo(client) -> None:
    """The request that lm-evaluation-harness makes for log-likelihoods."""
    done = client.completions.create(model="demo", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    lists = done.choices[0].logprobs
    assert len(lists.tokens) == done.usage.prompt_tokens + 1 == len(lists.token_logprobs) == len(lists.top_logprobs)
    assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None and lists.text_offset[0] == 0
    assert all(value <= 0 for value in lists.token_logprobs[1:])
    assert max(lists.top_logprobs[-1].values()) == lists.token_logprobs[-1]
    nothing = client.completions.create(model="demo", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    assert nothing.choices[0].text == PROMPT and nothing.usage.completion_tokens == 0
    assert nothing.choices[0].logprobs.token_logprobs == pytest.approx([None, *lists.token_logprobs[1:-1]], nan_ok=True)


def test_chat_is_the_offline_one(client, offline) -> None:
    done = client.chat.completions.create(model="demo", messages=ASK, max_tokens=12, temperature=0, top_p=1)
    assert done.choices[0].message.content == offline["chat"] and done.choices[0].message.role == "assistant"
    assert done.id.startswith("chatcmpl-") and done.object == "chat.completion"


def test_chat_stream_is_the_offline_one(client, offline) -> None:
    ask = {"messages": ASK, "temperature": 0, "top_p": 1, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="demo", max_completion_tokens=12, **ask))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == offline["chat"]
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1


def test_the_bytes_of_a_stream_are_openais(server: Running) -> None:
    body = {"messages": ASK, "max_tokens": 3, "stream": True, "n": 2}
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line != ": keep-alive"]  # a comment, if the first step is slow
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: {") for line in lines[:-2])
    said = events(answer)[:-1]
    assert [c["choices"][0]["delta"].get("role") for c in said].count("assistant") == 2
    assert all("usage" not in c for c in said) and {c["choices"][0]["index"] for c in said} == {0, 1}


def test_chat_logprobs(client, server: Running) -> None:
    ask = {"messages": ASK, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    done = client.chat.completions.create(model="demo", **ask)
    content = done.choices[0].logprobs.content
    assert len(content) == 4 and all(len(t.top_logprobs) == 3 for t in content)
    assert b"".join(bytes(t.bytes) for t in content).decode() == done.choices[0].message.content
    assert all(t.top_logprobs[0].token == t.token for t in content)
    streamed = [c.choices[0].logprobs for c in client.chat.completions.create(model="demo", stream=True, **ask)]
    told = [t.logprob for logprobs in streamed if logprobs for t in logprobs.content]
    assert told == pytest.approx([t.logprob for t in content], abs=1e-4)


def test_stop_seed_and_penalties(client) -> None:
    ask = {"model": "demo", "prompt": PROMPT}
    one = client.completions.create(**ask, max_tokens=30, temperature=0, top_p=1, stop=[","])
    assert one.choices[0].finish_reason == "stop" and "," not in one.choices[0].text
    seeded = [client.completions.create(**ask, max_tokens=8, temperature=1, seed=11).choices[0].text for _ in range(2)]
    assert seeded[0] == seeded[1]
    banned = client.completions.create(**ask, max_tokens=8, temperature=0, logit_bias={"5": -100}, frequency_penalty=1)
    assert banned.choices[0].finish_reason


def test_best_of(client) -> None:
    done = client.completions.create(model="demo", prompt=PROMPT, max_tokens=4, best_of=3, n=1, seed=2)
    assert len(done.choices) == 1
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=4, best_of=3, stream=True)
    assert refused.value.body["param"] == "best_of"


def test_continued_final_message(server: Running) -> None:
    messages = [*ASK, {"role": "assistant", "content": "Once upon a"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", {**body, "add_generation_prompt": False}).json()
    assert answer["choices"][0]["message"]["content"].strip() == "time"


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client, stream: bool) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["Nina", "Tom"]}}, "required": ["name"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    done = client.chat.completions.create(model="demo", messages=ASK, max_tokens=60, temperature=0, response_format=form, stream=stream)
    text = "".join(c.choices[0].delta.content or "" for c in done) if stream else done.choices[0].message.content
    assert json.loads(text)["name"] in ("Nina", "Tom")


def test_a_schema_that_cannot_be_enforced_is_refused(client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": {"type": "object", "uniqueItemz": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItemz"):
        client.chat.completions.create(model="demo", messages=ASK, max_tokens=60, response_format=form)


def _calls(done, stream: bool) -> tuple[list[tuple[str, str]], str]:
    if not stream:
        return [(c.function.name, c.function.arguments) for c in done.choices[0].message.tool_calls or []], done.choices[0].finish_reason
    calls: list[list[str]] = []
    for chunk in done:
        choice = chunk.choices[0]
        for call in choice.delta.tool_calls or []:
            if call.id:
                calls.append([call.function.name, ""])
                assert call.index == len(calls) - 1 and call.type == "function"
            calls[call.index][1] += call.function.arguments or ""
    return [(name, arguments) for name, arguments in calls], choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("template", [HERMES, None])
def test_required_tools(client, choice, stream: bool, template: str | None) -> None:
    more = {"chat_template": template} if template else {}
    done = client.chat.completions.create(
        model="demo", messages=ASK, tools=[LOOK], tool_choice=choice, parallel_tool_calls=False, max_tokens=150, temperature=0,
        stream=stream, extra_body=more,
    )  # fmt: skip
    calls, reason = _calls(done, stream)
    assert reason == "tool_calls" and [name for name, _ in calls] == ["look"]
    arguments = json.loads(calls[0][1])
    assert arguments["place"] in ("tree", "river") and 1 <= arguments["times"] <= 9


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [HERMES, None])
def test_a_call_cut_by_max_tokens_is_a_call(client, stream: bool, template: str | None) -> None:
    """With the arguments so far and the reason "length"; the content has nothing of it."""
    ask = {"model": "demo", "messages": ASK, "tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    more = {"chat_template": template} if template else {}
    (whole,), _ = _calls(client.chat.completions.create(**ask, max_tokens=150, extra_body=more), False)
    seen = set()
    for max_tokens in (12, 20, 26, 30):
        done = client.chat.completions.create(**ask, max_tokens=max_tokens, extra_body=more, stream=stream)
        answers = list(done) if stream else [done]
        calls, reason = _calls(answers if stream else done, stream)
        content = "".join((a.choices[0].delta if stream else a.choices[0].message).content or "" for a in answers)
        assert reason == "length" and content == "" and len(calls) < 2
        assert all(name == "look" and whole[1].replace(" ", "").startswith(arguments.replace(" ", "")) for name, arguments in calls)
        seen |= {arguments for _, arguments in calls}
    assert any(seen)


KEYWORDS = {"type": "object", "properties": {"name": {"enum": ["Nina", "Tom"], "x-order": 1, "format": "color"}}, "required": ["name"]}
UNPROVEN = {**KEYWORDS, "properties": {"name": {"enum": ["Nina", "Tom"]}, "tags": {"type": "array", "uniqueItems": True, "maxItems": 2}}}


def test_keywords_of_a_schema_without_effect_are_named(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": KEYWORDS}}
    ask = {"messages": ASK, "max_tokens": 60, "temperature": 0}
    tool = {"type": "function", "function": {"name": "look", "parameters": KEYWORDS}}
    named = "#/properties/name/x-order, {0}#/properties/name/format"
    for path, field, more in (
        ("/v1/chat/completions", "response_format", {"response_format": form}),
        ("/v1/chat/completions", "response_format", {"response_format": form, "stream": True}),
        ("/v1/chat/completions", "structured_outputs", {"structured_outputs": {"json": KEYWORDS}}),
        ("/v1/chat/completions", "tools", {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}),
        ("/v1/completions", "response_format", {"response_format": form, "messages": None, "prompt": "Once"}),
        ("/v1/responses", "text", {"input": "Hi", "messages": None, "max_tokens": None, "max_output_tokens": 60,
                                   "text": {"format": {"type": "json_schema", "name": "p", "schema": KEYWORDS}}}),
    ):  # fmt: skip
        answer = server.post(path, {name: value for name, value in {**ask, **more}.items() if value is not None})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == field + named.format(field), path


def test_a_schema_is_read_leniently_where_the_client_says_so(server: Running) -> None:
    ask = {"messages": ASK, "max_tokens": 60, "temperature": 0}

    def post(strict: bool | None) -> object:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": UNPROVEN, "strict": strict}}
        return server.post("/v1/chat/completions", {**ask, "response_format": form})

    for strict in (True, None):
        assert post(strict).status_code == 400 and "uniqueItems" in post(strict).json()["error"]["message"]
    assert post(False).headers["x-ignored-fields"] == "response_format#/properties/tags/uniqueItems"
    lenient = server.post("/v1/chat/completions", {**ask, "structured_outputs": {"json": UNPROVEN, "lenient": True}})
    assert lenient.status_code == 200 and lenient.headers["x-ignored-fields"] == "structured_outputs#/properties/tags/uniqueItems"
    tool = {"type": "function", "function": {"name": "look", "parameters": UNPROVEN, "strict": False}}
    called = server.post("/v1/chat/completions", {**ask, "tools": [tool], "tool_choice": "required"})
    assert called.headers["x-ignored-fields"] == "tools#/properties/tags/uniqueItems"


def test_disabled_tools_are_not_in_the_prompt(client, server: Running) -> None:
    body = {"messages": ASK, "tools": [LOOK], "chat_template": HERMES, "max_tokens": 2}
    with_tools = server.post("/v1/chat/completions", {**body, "tool_choice": "auto"}).json()["usage"]["prompt_tokens"]
    without = server.post("/v1/chat/completions", {**body, "tool_choice": "none"}).json()["usage"]["prompt_tokens"]
    assert without < with_tools


def test_a_conversation_with_calls_is_accepted(client) -> None:
    """Clients send back the answer with the call, including nulls, with arguments as text."""
    answer = {"role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None}
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "tree", "times": 1}'}}
    messages = [*ASK, {**answer, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "a bird"}]
    more = {"chat_template": HERMES, "ignore_eos": True}
    done = client.chat.completions.create(model="demo", messages=messages, tools=[LOOK], max_tokens=3, extra_body=more)
    assert done.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_separated(client, stream: bool) -> None:
    """A template that opens the reasoning itself: all text is reasoning until the closing mark."""
    template = HERMES.replace("assistant: ", "assistant: <think>\n") + "{# </think> #}"
    regex = {"regex": "A thought\\.</think>An answer\\.", "enable_in_reasoning": True}
    body = {"chat_template": template, "structured_outputs": regex}
    done = client.chat.completions.create(model="demo", messages=ASK, max_tokens=40, temperature=0, stream=stream, extra_body=body)
    if stream:
        deltas = [c.choices[0].delta for c in done]
        reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
        content = "".join(d.content or "" for d in deltas)
    else:
        reasoning, content = done.choices[0].message.reasoning_content, done.choices[0].message.content
        assert done.usage.completion_tokens_details.reasoning_tokens > 0
    assert (reasoning.strip(), content.strip()) == ("A thought.", "An answer.")


@pytest.mark.parametrize("stream", [False, True])
def test_an_enforced_format_is_content_even_after_an_opening_mark(client, stream: bool) -> None:
    template = HERMES.replace("assistant: ", "assistant: <think>\n") + "{# </think> #}"
    body = {"chat_template": template, "structured_outputs": {"choice": ["yes", "no"], "enable_in_reasoning": True}}
    done = client.chat.completions.create(model="demo", messages=ASK, max_tokens=20, stream=stream, extra_body=body)
    text = "".join(c.choices[0].delta.content or "" for c in done) if stream else done.choices[0].message.content
    assert text in ("yes", "no")


def test_beam_search(server: Running) -> None:
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 5}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    chat = server.post("/v1/chat/completions", {"messages": ASK, "use_beam_search": True, "n": 2, "max_tokens": 5})
    assert chat.status_code == 200 and len({c["message"]["content"] for c in chat.json()["choices"]}) == 2
    for field, value in (("seed", 1), ("temperature", 0.5), ("stop", ["a"]), ("logprobs", 1), ("stream", True)):
        refused = server.post("/v1/completions", {**body, field: value}).json()["error"]
        assert field in refused["message"] and refused["code"] == "unsupported_parameter"


def test_token_ids_of_streams(server: Running) -> None:
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": ASK})):
        more = {"max_tokens": 5, "return_token_ids": True, "temperature": 0}
        whole = server.post(path, {**body, **more}).json()
        chunks = events(server.post(path, {**body, **more, "stream": True}))[:-1]
        told = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
        assert told == whole["choices"][0]["token_ids"] and len(told) == 5
        prompts = [c.get("prompt_token_ids") or c["choices"][0].get("prompt_token_ids") for c in chunks]
        assert [p for p in prompts if p] == [whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]]


def test_developer_becomes_system_for_templates_without_it(server: Running) -> None:
    told = [[{"role": role, "content": "Be brief."}, *ASK] for role in ("developer", "system")]
    said = [server.post("/tokenize", {"messages": messages}).json() for messages in told]
    assert said[0] == said[1] and "tokens" in said[0]


def test_embeddings(client) -> None:
    """The client requests base64 by default."""
    done = client.embeddings.create(model="demo", input=["a dragon", "a dragon", "the sea"])
    first, again, other = (item.embedding for item in done.data)
    assert first == again != other and sum(x * x for x in first) == pytest.approx(1.0, abs=1e-3)
    numbers = client.embeddings.create(model="demo", input="a dragon", encoding_format="float").data[0].embedding
    assert numbers == pytest.approx(first, abs=1e-6)
    last = client.embeddings.create(model="demo", input="a dragon", extra_body={"pooling": "last", "normalize": False}).data[0].embedding
    assert last != numbers


def test_errors_name_the_field(client) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=ASK)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="demo", messages=ASK, extra_body={"temperatur": 1})
    assert unknown.value.param == "temperatur" and "temperature" in unknown.value.message and unknown.value.code == "unknown_parameter"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": 5}])
    assert wrong.value.param == "messages[0].content" and wrong.value.code == "invalid_type"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="word " * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as template:
        client.chat.completions.create(model="demo", messages=[{"role": "wizard", "content": "a"}])
    assert "roles" in template.value.message


def test_receipt_and_explanation(server: Running) -> None:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "receipt": True, "explain": True}).json()
    assert answer["receipt"]["output_tokens"] == 3 and answer["receipt"]["steps"] >= 1 and answer["explanation"]
    assert answer["receipt"]["architecture"].startswith(platform.machine())
    last = events(server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "receipt": True, "stream": True}))[-2]
    assert last["receipt"]["output_tokens"] == 3


def test_energy_is_in_the_usage_of_a_request_that_asks(server: Running) -> None:
    """This server measures none, and says so; tests/engine/test_energy.py has one that does."""
    body = {"model": "demo", "max_tokens": 3, "energy": True}
    conversation = {"messages": [{"role": "user", "content": PROMPT}]}
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", conversation),
        ("/generate", {"prompt": PROMPT}),
    ):
        energy = server.post(path, {**body, **prompt}).json()["usage"]["energy"]
        assert energy["joules"] is None and "--energy" in energy["not_measured"]["all"]
        *others, last, _ = events(server.post(path, {**body, **prompt, "stream": True}))
        assert last["usage"]["energy"] == energy, path
        assert "energy" not in server.post(path, {**body, **prompt, "energy": False}).json()["usage"]


def test_request_ids(server: Running) -> None:
    given = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **{"X-Request-Id": "mine.1"})
    assert given.headers["x-request-id"] == "mine.1" and "mine.1" in given.json()["id"]
    made = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **{"X-Request-Id": "not\tthis one"})
    assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
    named = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": "in-the-body"})
    assert named.headers["x-request-id"] == "in-the-body"


def test_the_bundled_models_own_name_is_not_a_path(server: Running) -> None:
    listed = server.service.models.path("demo")
    assert str(Path.cwd()) not in listed


def test_a_required_call_has_no_content_to_format(client, server: Running) -> None:
    """OpenAI takes both, and instructor sends both: the format is that of the content, which such an answer lacks."""
    schema = {"type": "object", "properties": {"name": {"const": "Nina"}}, "required": ["name"], "additionalProperties": False}
    tools = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    reply = server.post(
        "/v1/chat/completions",
        {**tools, "messages": ASK, "tools": [LOOK], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    )
    call = reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "look" and reply.headers["X-Ignored-Fields"] == "response_format"
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    reply = server.post("/v1/responses", {**tools, "input": "Look.", "tools": [{"type": "function", **LOOK["function"]}], "text": text})
    assert reply.json()["output"][0]["type"] == "function_call" and reply.headers["X-Ignored-Fields"] == "text"
    whole = {**tools, "messages": ASK, "tools": [LOOK], "structured_outputs": {"choice": ["a"]}}
    assert server.post("/v1/chat/completions", whole).json()["error"]["param"] == "structured_outputs"
