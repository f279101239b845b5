"""A reasoning model with a structured format: reasoning first, then the structure, through every API with its official client."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from tests.server.conftest import LOOK, Running, events, running  # noqa: E402
from tests.tiny.thinking import THINK, UNTHINK, write_thinking_model  # noqa: E402
from tinyvllm.server.core import prompts  # noqa: E402
from tinyvllm.server.core.context import ServerConfig  # noqa: E402
from tinyvllm.text.parsing import StreamParser  # noqa: E402

ASK = [{"role": "user", "content": "Name?"}]
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Nina", "Tom"]}}, "required": ["name"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
KINDS: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": FORM},
    "choice": {"structured_outputs": {"choice": ["Nina", "Tom"]}},
    "regex": {"structured_outputs": {"regex": "(Nina|Tom)!"}},
    "tool": {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False},
    "budget": {"response_format": FORM, "thinking_token_budget": 5},
}


@pytest.fixture(scope="module", params=["special", "added", "text"])
def server(request, tiny_model, tmp_path_factory) -> Iterator[Running]:
    folder = write_thinking_model(tiny_model, tmp_path_factory.mktemp("thinking"), request.param)
    spec = {"model": str(folder), "device": "CPU", "max_num_seqs": 8, "num_blocks": 256, "max_model_len": 512}
    with running(ServerConfig(port=0, access_log=False), {"thinker": spec}) as made:
        made.text = request.param == "text"
        yield made


@pytest.fixture(scope="module")
def client(server: Running):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def fits(kind: str, message: Any) -> bool:
    if kind == "tool":
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        return not message["content"] and call["function"]["name"] == "look" and arguments["place"] in ("tree", "river")
    if kind in ("response_format", "budget"):
        return json.loads(message["content"])["name"] in ("Nina", "Tom")
    return message["content"] in ("Nina", "Tom") if kind == "choice" else message["content"] in ("Nina!", "Tom!")


def joined(chunks: Any) -> dict[str, Any]:
    """The message that the deltas of a stream form."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id:
                message["tool_calls"].append({"function": {"name": call.function.name, "arguments": ""}})
            message["tool_calls"][call.index]["function"]["arguments"] += call.function.arguments or ""
    return message


def asked(server: Running, kind: str, **more: Any) -> dict[str, Any]:
    """The body of a request whose reasoning ends: a mark that is not one token needs a budget."""
    body = {"model": "thinker", "messages": ASK, "max_tokens": 400, "seed": 3, "temperature": 1, "stream": False, **KINDS[kind], **more}
    return body if not server.text else {"thinking_token_budget": 40, **body}


def chat(client, body: dict[str, Any]) -> dict[str, Any]:
    known = {name: body.pop(name) for name in ("model", "messages", "stream")}
    done = client.chat.completions.create(**known, extra_body=body)
    return joined(done) if known["stream"] else done.choices[0].message.model_dump()


@pytest.mark.parametrize("kind", KINDS)
def test_chat_reasons_and_then_answers(client, server: Running, kind: str) -> None:
    whole, streamed = (chat(client, asked(server, kind, stream=stream)) for stream in (False, True))
    for message in (whole, streamed):
        assert message.get("reasoning_content") and fits(kind, message), message
    assert all((whole[name] or "") == streamed[name] for name in ("content", "reasoning_content"))
    if kind == "budget":
        assert len(whole["reasoning_content"]) <= 5


def test_a_model_that_opens_its_reasoning_itself(client, server: Running) -> None:
    more = {"chat_template_kwargs": {"open_thoughts": False}, "thinking_token_budget": 6}
    message = chat(client, asked(server, "choice", logit_bias={str(THINK): 60, str(ord("<")): 60}, **more))
    assert message["reasoning_content"] and fits("choice", message), message


@pytest.mark.parametrize("more", [
    {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False, "open_thoughts": False}},
    {"messages": [*ASK, {"role": "assistant", "content": "It is"}], "add_generation_prompt": False, "continue_final_message": True},
    {"structured_outputs": {"choice": ["Nina", "Tom"], "enable_in_reasoning": True}, "thinking_token_budget": None},
])  # fmt: skip
def test_disabled_reasoning(client, server: Running, more: dict[str, Any]) -> None:
    for stream in (False, True):
        message = chat(client, asked(server, "choice", **{"logit_bias": {str(THINK): 60}, **more}, stream=stream))
        assert not message.get("reasoning_content") and fits("choice", message), message


def test_completions_wait_for_the_end_of_reasoning(server: Running) -> None:
    body = {"prompt": "Name?<think>\n", "max_tokens": 300, "structured_outputs": {"choice": ["Nina", "Tom"]}, "skip_special_tokens": False}
    text = server.post("/v1/completions", {**body, "thinking_token_budget": 4}).json()["choices"][0]["text"]
    assert text.partition("</think>")[2].strip() in ("Nina", "Tom")


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client, server: Running, stream: bool) -> None:
    if server.text:
        pytest.skip("this API has no budget, and the tiny model does not spell")
    ask = {"model": "thinker", "input": "Name?", "max_output_tokens": 400, "temperature": 1, "extra_body": {"seed": 3}}
    form = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    done = client.responses.create(**ask, text=form, stream=stream)
    done = list(done)[-1].response if stream else done
    assert [item.type for item in done.output] == ["reasoning", "message"] and done.output[0].content[0].text
    assert json.loads(done.output_text)["name"] in ("Nina", "Tom")
    tool = {"type": "function", **LOOK["function"]}
    called = client.responses.create(**ask, tools=[tool], tool_choice="required", parallel_tool_calls=False, stream=stream)
    called = list(called)[-1].response if stream else called
    assert [item.type for item in called.output] == ["reasoning", "function_call"] and called.output[0].content[0].text
    assert json.loads(called.output[1].arguments)["place"] in ("tree", "river")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(server: Running, stream: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60))

        def blocks(thinking: dict[str, Any], **more: Any) -> list[Any]:
            extra = {"temperature": 1, "seed": 3, "thinking": thinking, **more}
            ask = {"model": "thinker", "max_tokens": 400, "messages": ASK, "extra_body": extra}
            if not stream:
                return client.messages.create(**ask).content
            with client.messages.stream(**ask) as streamed:
                return streamed.get_final_message().content

        form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        thought, text = blocks({"type": "enabled", "budget_tokens": 30}, **form)
        assert thought.type == "thinking" and thought.thinking and json.loads(text.text)["name"] in ("Nina", "Tom")
        (text,) = blocks({"type": "disabled"}, **form)
        assert json.loads(text.text)["name"] in ("Nina", "Tom")
        tool = {"name": "look", "input_schema": LOOK["function"]["parameters"]}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        thought, call = blocks({"type": "enabled", "budget_tokens": 30}, tools=[tool], tool_choice=choice)
        assert thought.type == "thinking" and thought.thinking and call.type == "tool_use" and call.input["place"] in ("tree", "river")


def test_several_answers_reason_independently(server: Running) -> None:
    body = asked(server, "budget", n=3, temperature=1.5)
    done = server.post("/v1/chat/completions", body).json()["choices"]
    assert len({choice["message"]["reasoning_content"] for choice in done}) > 1 and all(fits("budget", c["message"]) for c in done)
    chunks = [c["choices"][0] for c in events(server.post("/v1/chat/completions", {**body, "stream": True}))[:-1]]
    for i in range(3):
        content = "".join(c["delta"].get("content") or "" for c in chunks if c["index"] == i)
        assert json.loads(content)["name"] in ("Nina", "Tom")


def test_a_template_without_marks_waits_for_nothing(tiny_model, tmp_path) -> None:
    folder = write_thinking_model(tiny_model, tmp_path / "model", "text")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    spec = {"model": str(folder), "device": "CPU", "max_num_seqs": 2, "num_blocks": 64, "max_model_len": 256}
    with running(ServerConfig(port=0, access_log=False, chat_template=template), {"thinker": spec}) as server:
        body = {"messages": ASK, "max_tokens": 60, "logit_bias": {str(ord("<")): 100, str(UNTHINK): 0}, **KINDS["choice"]}
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert fits("choice", message) and "reasoning_content" not in message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_long_answer_is_parsed_and_counted_outside_the_event_loop(server: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reasoning is encoded, which takes as long as for a prompt."""
    add, threads = StreamParser.add, []

    def watched(self: StreamParser, text: str) -> Any:
        threads.append(threading.current_thread().name)
        return add(self, text)

    monkeypatch.setattr(StreamParser, "add", watched)
    monkeypatch.setattr(prompts, "SHORT_TEXT", 0)
    own = {"max_output_tokens": 40, "input": "Name?"} if path.endswith("responses") else {"max_tokens": 40, "messages": ASK}
    answer = server.post(path, {"model": "thinker", "temperature": 0, **own})
    assert answer.status_code == 200, answer.text
    assert threads and all(name.startswith("asyncio_") for name in threads), threads


def test_every_delta_has_the_field_that_clients_of_deepseek_read(server: Running) -> None:
    """They read `delta.reasoning_content` of content, too; a field that is absent is an AttributeError of OpenAI's client."""
    body = asked(server, "response_format", messages=ASK, stream=True)
    deltas = [choice["delta"] for event in events(server.post("/v1/chat/completions", body))[:-1] for choice in event["choices"]]
    assert any(delta.get("content") for delta in deltas) and any(delta.get("reasoning_content") for delta in deltas)
    assert all("reasoning_content" in delta for delta in deltas), deltas
