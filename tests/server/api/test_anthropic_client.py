"""The official Anthropic client against the real server: messages, streams, tools, counting and errors."""

from __future__ import annotations

import contextlib

import pytest

anthropic = pytest.importorskip("anthropic")

from tests.server.conftest import HERMES, LOOK, Running, running  # noqa: E402
from tinyvllm.server.core.context import ServerConfig  # noqa: E402

ASK = [{"role": "user", "content": "Tell me a story about a dragon."}]
GREEDY = {"temperature": 0}
TOOL = {"name": "look", "description": "Look.", "input_schema": LOOK["function"]["parameters"]}


@pytest.fixture(scope="module")
def client(server: Running):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_message(client) -> None:
    done = client.messages.create(model="demo", max_tokens=5, messages=ASK, system="Be brief.", extra_body=GREEDY)
    assert done.type == "message" and done.role == "assistant" and done.stop_reason == "max_tokens"
    assert done.content[0].type == "text" and done.content[0].text
    assert done.usage.output_tokens == 5
    total = done.usage.input_tokens + done.usage.cache_read_input_tokens
    assert client.messages.count_tokens(model="demo", messages=ASK, system="Be brief.").input_tokens == total


def test_stop_sequence_and_prefill(client) -> None:
    said = [*ASK, {"role": "assistant", "content": "Once upon a"}]
    done = client.messages.create(model="demo", max_tokens=20, messages=said, stop_sequences=[","], extra_body=GREEDY)
    assert done.content[0].text.strip().startswith("time") and (done.stop_reason, done.stop_sequence) == ("stop_sequence", ",")


def test_stream(client) -> None:
    whole = client.messages.create(model="demo", max_tokens=8, messages=ASK, extra_body=GREEDY)
    with client.messages.stream(model="demo", max_tokens=8, messages=ASK, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "ping")]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == "max_tokens" and final.usage.output_tokens == 8
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tools() -> None:
    """Required calls, with a server whose chat template supports tools."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(ServerConfig(port=0, chat_template=HERMES, access_log=False)))
        client = stack.enter_context(anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60))
        ask = {"model": "demo", "max_tokens": 150, "messages": ASK, "tools": [TOOL], "extra_body": GREEDY}
        choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
        done = client.messages.create(**ask, tool_choice=choice)
        call = next(block for block in done.content if block.type == "tool_use")
        assert done.stop_reason == "tool_use" and call.name == "look" and call.input["place"] in ("tree", "river")
        with client.messages.stream(**ask, tool_choice=choice) as stream:
            final = stream.get_final_message()
        assert final.content[-1].type == "tool_use" and final.content[-1].input == call.input
        for max_tokens in (20, 26):  # cut inside the call: what is there of its input
            cut = client.messages.create(**{**ask, "max_tokens": max_tokens}, tool_choice=choice)
            assert cut.stop_reason == "max_tokens" and not any(block.type == "text" and block.text for block in cut.content)
            assert all(block.name == "look" and set(block.input) <= set(call.input) for block in cut.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a bird"}]}
        said = [*ASK, {"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**{**ask, "messages": said, "max_tokens": 1}).usage.output_tokens == 1


def test_tool_results_without_a_tool_role(client) -> None:
    """The template of the bundled model raises an error for other roles than system, user and assistant."""
    call = {"type": "tool_use", "id": "call-1", "name": "look", "input": {"place": "tree"}}
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": "a bird"}
    said = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, {"type": "text", "text": "And then?"}]}]
    ask = {"model": "demo", "max_tokens": 3, "messages": said, "tools": [TOOL], "extra_body": GREEDY}
    assert client.messages.create(**ask).usage.output_tokens == 3
    shorter = client.messages.count_tokens(model="demo", messages=said[:2] + ASK)
    assert client.messages.count_tokens(model="demo", messages=said).input_tokens > shorter.input_tokens - 5


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
def test_thinking_of_a_model_without_marks(client, thinking) -> None:
    """Agents send it to every model: the answer is as without it, and the header names it."""
    ask = {"model": "demo", "max_tokens": 4, "messages": ASK, "extra_body": GREEDY}
    raw = client.messages.with_raw_response.create(**ask, thinking=thinking)
    assert raw.headers["x-ignored-fields"] == "thinking"
    assert raw.parse().content == client.messages.create(**ask).content
    assert "x-ignored-fields" not in client.messages.with_raw_response.create(**ask, thinking={"type": "disabled"}).headers


def test_errors_have_anthropics_shape(client, server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=5, messages=ASK)
    assert missing.value.body["error"]["type"] == "not_found_error" and missing.value.body["type"] == "error"
    image = {"type": "image", "source": {"type": "url", "url": "http://a"}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    assert "messages[0].content[0]" in refused.value.body["error"]["message"]
    unknown = server.post("/v1/messages", {"model": "demo", "max_tokens": 1, "messages": ASK, "wish": 1}).json()
    assert unknown["error"]["type"] == "invalid_request_error" and "wish" in unknown["error"]["message"]


def test_the_id_of_a_request_has_the_name_that_the_client_reads(client) -> None:
    done = client.messages.create(model="demo", max_tokens=1, messages=ASK, extra_headers={"X-Request-Id": "req-7"})
    assert done._request_id == "req-7"


def test_threads_are_refused_in_the_form_after_which_clients_send_all_messages(client) -> None:
    """The tool runner of newer clients begins with a thread of the server's, and continues without one after this error."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="demo", max_tokens=1, messages=ASK, extra_body={"thread": {"type": "create"}})
    error = refused.value.body["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]} and "thread" in error["message"]
