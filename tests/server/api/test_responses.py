"""/v1/responses through the official client: whole answers, the events of a stream, tools, and fields that need stored state."""

from __future__ import annotations

import json

import pytest

openai = pytest.importorskip("openai")

from tests.server.conftest import LOOK, Running  # noqa: E402

ASK = "Tell me a story about a dragon."
TOOL = {"type": "function", **LOOK["function"]}


@pytest.fixture(scope="module")
def client(server: Running):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_whole(client) -> None:
    ask = {"model": "demo", "input": ASK, "max_output_tokens": 6, "temperature": 0}
    done = client.responses.create(**ask, instructions="Be brief.", metadata={"a": "b"})
    assert done.status == "incomplete" and done.incomplete_details.reason == "max_output_tokens" and done.metadata == {"a": "b"}
    assert done.output_text and done.usage.output_tokens == 6 and done.store is False
    items = [{"role": "user", "content": ASK}, *done.output, {"role": "user", "content": [{"type": "input_text", "text": "More."}]}]
    assert client.responses.create(model="demo", input=items, max_output_tokens=2).usage.input_tokens > done.usage.input_tokens


def test_stream(client) -> None:
    whole = client.responses.create(model="demo", input=ASK, max_output_tokens=6, temperature=0)
    seen = list(client.responses.create(model="demo", input=ASK, max_output_tokens=6, temperature=0, stream=True))
    assert [e.sequence_number for e in seen] == list(range(len(seen)))
    kinds = [e.type for e in seen if e.type != "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    text = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
    assert text == whole.output_text == seen[-1].response.output_text


def test_logprobs(client) -> None:
    ask = {"model": "demo", "input": ASK, "max_output_tokens": 4, "temperature": 0, "top_logprobs": 2}
    done = client.responses.create(**ask, include=["message.output_text.logprobs"])
    assert [len(p.top_logprobs) for p in done.output[0].content[0].logprobs] == [2] * 4
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ask)


@pytest.mark.parametrize("stream", [False, True])
def test_required_tool(client, stream: bool) -> None:
    ask = {"model": "demo", "input": ASK, "max_output_tokens": 150, "temperature": 0, "tools": [TOOL], "parallel_tool_calls": False}
    done = client.responses.create(**ask, tool_choice="required", stream=stream)
    if stream:
        seen = list(done)
        done = seen[-1].response
        deltas = "".join(e.delta for e in seen if e.type == "response.function_call_arguments.delta")
        assert deltas == done.output[0].arguments
    call = done.output[0]
    assert call.type == "function_call" and call.name == "look" and json.loads(call.arguments)["place"] in ("tree", "river")


def test_fields_that_need_stored_state_are_refused(client) -> None:
    for field, value in (("store", True), ("previous_response_id", "resp_1"), ("background", True), ("conversation", "c")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="demo", input=ASK, **{field: value})
        assert refused.value.param == field
