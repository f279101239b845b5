"""/v1/responses through the official client: whole answers, the events of a stream, tools, and answers that are kept."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

openai = pytest.importorskip("openai")

from tests.server.conftest import LOOK, Running, running  # noqa: E402
from tinyvllm.server.core import response_store  # noqa: E402
from tinyvllm.server.core.config import ServerConfig  # noqa: E402
from tinyvllm.server.core.failures import Failure  # noqa: E402
from tinyvllm.server.core.keys import Key, read_keys  # noqa: E402
from tinyvllm.server.core.response_store import ResponseStore  # noqa: E402

SHORT: dict[str, Any] = {"model": "demo", "max_output_tokens": 4, "temperature": 0}
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
    assert done.output_text and done.usage.output_tokens == 6 and done.store is True
    assert client.responses.create(**ask, store=False).store is False
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_by_max_tokens_is_a_call(client, stream: bool) -> None:
    """An incomplete response with the arguments so far; no message has its text."""
    ask = {"model": "demo", "input": ASK, "temperature": 0, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.responses.create(**ask, max_output_tokens=150).output[0].arguments.replace(" ", "")
    seen = set()
    for max_tokens in (20, 26):
        done = client.responses.create(**ask, max_output_tokens=max_tokens, stream=stream)
        done = list(done)[-1].response if stream else done
        assert done.status == "incomplete" and done.incomplete_details.reason == "max_output_tokens" and done.output_text == ""
        seen |= {item.arguments.replace(" ", "") for item in done.output if item.type == "function_call"}
    assert any(seen) and all(whole.startswith(arguments) for arguments in seen)


def test_fields_that_the_background_excludes(client) -> None:
    for fields, field in (
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"conversation": "c"}, "conversation"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="demo", input=ASK, **fields)
        assert refused.value.param == field


def finished(client, id_: str) -> Any:
    """The response, when it waits and runs no more."""
    while (response := client.responses.retrieve(id_)).status in ("queued", "in_progress"):
        pass
    return response


def test_an_answer_in_the_background(client) -> None:
    """It is queued at once, gives the same answer as in the foreground, under its own id, and can be continued."""
    body = {**SHORT, "input": ASK}
    client.responses.create(**body)  # both find the prompt in the prefix cache
    queued = client.responses.create(**body, background=True)
    assert queued.status == "queued" and queued.background and queued.output == [] and queued.usage is None
    done, expected = finished(client, queued.id), client.responses.create(**body)
    assert (done.id, done.created_at, done.background) == (queued.id, queued.created_at, True)
    assert (done.status, done.output_text, done.usage.output_tokens) == (
        expected.status,
        expected.output_text,
        expected.usage.output_tokens,
    )
    after, same = (client.responses.create(**{**body, "input": "And then?"}, previous_response_id=one.id) for one in (done, expected))
    assert after.usage.input_tokens == same.usage.input_tokens
    assert [item.type for item in client.responses.input_items.list(done.id)] == ["message"]
    assert client.responses.cancel(done.id).status == done.status  # a finished one is unchanged
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(model="demo", input="word " * 3000, background=True)


def test_the_background_is_cancelled(client, server: Running) -> None:
    """By its id, or by deleting it; the engine works on neither any longer."""
    body = {"model": "demo", "input": ASK, "max_output_tokens": 900, "background": True, "extra_body": {"ignore_eos": True}}
    first, second = client.responses.create(**body), client.responses.create(**body)
    with pytest.raises(openai.BadRequestError, match="wait until it is finished"):
        client.responses.create(model="demo", input="And then?", previous_response_id=first.id)
    assert client.responses.cancel(first.id).status == "cancelled"
    client.responses.delete(second.id)
    assert client.responses.retrieve(first.id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    while httpx.get(f"{server.url}/load", timeout=60, trust_env=False).json()["server_load"]:
        pass
    assert server.service.background.running == 0


def test_the_limit_of_the_background(client, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyvllm.server.core import background

    monkeypatch.setattr(background, "MAX_BACKGROUND", 1)
    body = {"model": "demo", "input": ASK, "max_output_tokens": 900, "background": True, "extra_body": {"ignore_eos": True}}
    first = client.responses.create(**body)
    with pytest.raises(openai.RateLimitError, match="the limit is 1"):
        client.responses.create(**body)
    client.responses.delete(first.id)


def test_an_answer_in_the_background_that_fails(client, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is in the response."""

    def end(*_: Any) -> Any:
        raise Failure(500, "the model ended", code="engine_error")

    monkeypatch.setattr(server.service.responses, "replace", end)
    queued = client.responses.create(model="demo", input=ASK, max_output_tokens=2, background=True)
    failed = finished(client, queued.id)
    assert failed.status == "failed" and failed.error.code == "internal_error" and failed.output == []


@pytest.mark.parametrize("stream", [False, True])
def test_raw_messages(client, server: Running, stream: bool) -> None:
    """enable_response_messages: prompt and output with their token ids, special tokens included."""
    create = {**SHORT, "input": ASK, "extra_body": {"enable_response_messages": True}}
    done = list(client.responses.create(**create, stream=True))[-1].response if stream else client.responses.create(**create)
    (read,), (written,) = done.input_messages, done.output_messages
    assert read["type"] == written["type"] == "raw_message_tokens" and read["message"].endswith("<|assistant|>")
    assert len(read["tokens"]) == done.usage.input_tokens and len(written["tokens"]) == done.usage.output_tokens == 4
    again = server.post("/detokenize", {"tokens": written["tokens"]}).json()["prompt"]
    assert written["message"] == again and written["message"].startswith(done.output_text)
    assert "input_messages" not in client.responses.create(**SHORT, input=ASK).model_dump()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_continues_an_answer(client, stream: bool) -> None:
    """previous_response_id gives the same prompt as sending all items; instructions are of one request only."""

    def create(**more: Any) -> Any:
        if not stream:
            return client.responses.create(**SHORT, **more)
        return list(client.responses.create(**SHORT, **more, stream=True))[-1].response

    first = create(input=ASK, instructions="Be brief.")
    second = create(input="And then?", previous_response_id=first.id)
    whole = create(input=[{"role": "user", "content": ASK}, *first.output, {"role": "user", "content": "And then?"}])
    assert second.previous_response_id == first.id and second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens
    third = create(input="Why?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens + 4
    branch = create(input="And then?", previous_response_id=first.id)
    assert branch.id != second.id and branch.usage.input_tokens == second.usage.input_tokens


def test_stored_answers(client) -> None:
    done = client.responses.create(**SHORT, input=[{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}])
    again = client.responses.retrieve(done.id)
    assert again.output_text == done.output_text and again.usage == done.usage
    items = client.responses.input_items.list(done.id, order="asc", limit=1)
    assert [item.content for item in items] == ["One.", "Two."]  # both pages
    assert [item.content for item in client.responses.input_items.list(done.id)] == ["Two.", "One."]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(done.id)
    client.responses.delete(done.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="Response with id .* not found"):
            ask(done.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(**SHORT, input="a", previous_response_id=done.id)
    assert (gone.value.param, gone.value.code) == ("previous_response_id", "previous_response_not_found")


def test_store_false_keeps_nothing(client, server: Running) -> None:
    count = len(server.service.responses)
    done = client.responses.create(**SHORT, input=ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(done.id)
    assert len(server.service.responses) == count


def test_stored_answers_belong_to_a_key() -> None:
    config = ServerConfig(port=0, access_log=False)
    with running(config, {"demo": {"max_num_seqs": 2, "num_blocks": 64}}, read_keys(["sk-alice", "sk-bob"])) as server:
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice", "sk-bob"))
        name = server.post("/v1/responses", {**SHORT, "input": ASK}, **alice).json()["id"]
        url = f"{server.url}/v1/responses/{name}"
        assert httpx.get(url, headers=alice, timeout=60, trust_env=False).status_code == 200
        assert httpx.get(url, headers=bob, timeout=60, trust_env=False).status_code == 404
        assert httpx.delete(url, headers=bob, trust_env=False).status_code == 404
        answer = server.post("/v1/responses", {**SHORT, "input": "a", "previous_response_id": name}, **bob)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "previous_response_not_found"


def test_reasoning_without_an_answer(client) -> None:
    reasoning = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items = [{"role": "user", "content": "Hello"}, reasoning, {"role": "user", "content": "Well?"}]
    assert client.responses.create(**SHORT, input=items).usage.output_tokens == 4


def test_input_tokens(client) -> None:
    done = client.responses.create(**SHORT, input=ASK, instructions="Be brief.")
    assert client.responses.input_tokens.count(model="demo", input=ASK, instructions="Be brief.").input_tokens == done.usage.input_tokens
    more = client.responses.create(**SHORT, input="Why?", previous_response_id=done.id)
    count = client.responses.input_tokens.count(model="demo", input="Why?", previous_response_id=done.id)
    assert count.input_tokens == more.usage.input_tokens and count.object == "response.input_tokens"


def test_sampling_fields(client) -> None:
    """vLLM's extras, under the names of chat completions."""
    chat = {"messages": [{"role": "user", "content": ASK}], "max_tokens": 6, "temperature": 0}
    for extra in ({"stop": ["a"]}, {"logit_bias": {"300": 50}}, {"allowed_token_ids": [301, 302]}, {"repetition_penalty": 1.9},
                  {"structured_outputs": {"choice": ["yes", "no"]}}, {"bad_words": ["Once"]}):  # fmt: skip
        expected = client.chat.completions.create(model="demo", **{k: chat[k] for k in ("messages", "max_tokens", "temperature")},
                                                  extra_body=extra)  # fmt: skip
        done = client.responses.create(**{**SHORT, "max_output_tokens": 6}, input=ASK, extra_body=extra)
        assert done.output_text == expected.choices[0].message.content, extra
    listed = {"logprob_token_ids": [300], "return_tokens_as_token_ids": True, "allowed_token_ids": [42]}
    done = client.responses.create(**SHORT, input=ASK, include=["message.output_text.logprobs"], extra_body=listed)
    assert {p.token for p in done.output[0].content[0].logprobs[0].top_logprobs} == {"token_id:300", "token_id:42"}
    both = {"structured_outputs": {"choice": ["a"]}, "text": {"format": {"type": "json_object"}}}
    with pytest.raises(openai.BadRequestError, match="mutually exclusive"):
        client.responses.create(**SHORT, input=ASK, extra_body=both)


def test_the_limits_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bound drops the oldest answers, and those of one key do not take the room of another."""
    now = [0.0]
    alice, bob = Key("alice", b"a"), Key("bob", b"b")

    def names(store: ResponseStore) -> list[str]:
        return list(store._responses)

    def add(store: ResponseStore, key: Key, name: str, text: str = "") -> bool:
        return store.add(key, {"id": name, "text": text}, [], [])

    monkeypatch.setattr(response_store, "MAX_STORED_RESPONSES", 2)
    store = ResponseStore(clock=lambda: now[0])
    assert all(add(store, key, name) for key, name in ((alice, "a1"), (bob, "b1"), (alice, "a2"), (alice, "a3")))
    assert names(store) == ["b1", "a2", "a3"]
    monkeypatch.setattr(response_store, "MAX_STORED_KEY_BYTES", 200)
    assert not add(store, alice, "huge", "x" * 200) and names(store) == ["b1", "a2", "a3"]
    assert add(store, alice, "a4", "x" * 120) and names(store) == ["b1", "a3", "a4"]
    monkeypatch.setattr(response_store, "MAX_STORED_BYTES", 250)
    assert add(store, bob, "b2", "x" * 60) and names(store) == ["a4", "b2"]
    now[0] = response_store.MAX_STORED_AGE + 1.0
    with pytest.raises(Failure) as expired:
        store.get(bob, "b2")
    assert expired.value.status == 404 and not len(store)


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_a_cut_answer_say_so_and_can_be_sent_back(client, stream: bool) -> None:
    """A call or message without its end is incomplete. Its arguments are a prefix of JSON, which the next request may repeat."""
    ask = {"model": "demo", "input": ASK, "temperature": 0, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}

    def create(max_tokens: int, **more: Any) -> Any:
        done = client.responses.create(**{**ask, **more}, max_output_tokens=max_tokens, stream=stream)
        if not stream:
            return done
        events = list(done)
        assert [e.item for e in events if e.type == "response.output_item.done"] == events[-1].response.output
        return events[-1].response

    whole = create(150)
    assert whole.status == "completed" and whole.output[-1].status == "completed"
    cut = next(done for done in map(create, range(12, 40)) if done.output[0].type == "function_call" and done.output[0].arguments)
    call = cut.output[0]
    assert cut.status == "incomplete" and call.status == "incomplete" and not call.arguments.endswith("}")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "A tree."}
    for more in ({"input": [{"role": "user", "content": ASK}, call, result]}, {"input": [result], "previous_response_id": cut.id}):
        assert create(3, **more, tools=None, tool_choice=None).usage.output_tokens == 3
    message = create(3, tools=None, tool_choice=None).output[-1]
    assert message.type == "message" and message.status == "incomplete"


def test_a_server_that_keeps_nothing() -> None:
    """--no-store: answers say that they are not kept, and files and batches are refused by name."""
    with running(ServerConfig(port=0, access_log=False, store=False)) as server:
        asked = {"model": "demo", "input": ASK, "max_output_tokens": 2}
        for more in ({}, {"store": True}, {"stream": True}):
            reply = server.post("/v1/responses", {**asked, **more})
            assert '"store":false' in reply.text and '"store":true' not in reply.text
            assert reply.headers.get("X-Ignored-Fields") == ("store" if "store" in more else None)
        done = server.post("/v1/responses", asked).json()
        refused = server.post("/v1/responses", {**asked, "previous_response_id": done["id"]})
        assert refused.status_code == 400 and "keeps no answers (--no-store)" in refused.json()["error"]["message"]
        assert httpx.get(f"{server.url}/v1/responses/{done['id']}", timeout=60, trust_env=False).status_code == 404
        upload = httpx.post(f"{server.url}/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "batch"}, timeout=60, trust_env=False)
        batch = server.post("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"})
        for reply in (upload, batch):
            assert reply.status_code == 501 and "--no-store" in reply.json()["error"]["message"]
