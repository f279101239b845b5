"""Segments over HTTP: registered, used in prompts and conversations, listed, released; their owners, and refusals."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, events, running
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.keys import read_keys

STORY = "Once upon a time there was a little dragon that lived under the old bridge by the river. " * 4
ANSWER = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
SYSTEM = {"role": "system", "content": STORY}
SMALL = {"max_num_seqs": 4, "num_blocks": 48, "max_model_len": 256}


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """A server with two keys and a cache that few requests fill."""
    config = ServerConfig(port=0, access_log=False)
    with running(config, {"demo": SMALL}, read_keys(["sk-alice", "sk-bob"])) as made:
        yield made


class Client:
    """A client with a key."""

    def __init__(self, server: Running, key: str = "sk-alice"):
        self._url, self._headers = server.url, {"Authorization": f"Bearer {key}"}

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, self._url + path, json=body, headers=self._headers, timeout=60, trust_env=False)

    def register(self, **body: Any) -> dict[str, Any]:
        answer = self.ask("POST", "/v1/segments", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """(cached tokens, the first choice)"""
        answer = self.ask("POST", "/v1/completions", {**ANSWER, **body})
        assert answer.status_code == 200, answer.text
        said = answer.json()
        return said["usage"]["prompt_tokens_details"]["cached_tokens"], said["choices"][0]

    def refused(self, method: str, path: str, body: Any = None) -> tuple[int, str, str | None, str]:
        error = (answer := self.ask(method, path, body)).json()["error"]
        return answer.status_code, error["code"], error["param"], error["message"]

    def release_all(self) -> None:
        while held := self.ask("GET", "/v1/segments").json()["data"]:
            for segment in reversed(held):
                self.ask("DELETE", f"/v1/segments/{segment['id']}")


@pytest.fixture
def alice(small: Running) -> Iterator[Client]:
    client = Client(small)
    yield client
    client.release_all()


def fill(client: Client) -> None:
    """Evict all blocks that may be evicted."""
    for n in range(5):
        client.complete(prompt=[100 + n] * 240)


def test_a_segment_is_held_until_it_is_released(alice: Client) -> None:
    _, alone = alice.complete(prompt=STORY + " What then?")
    fill(alice)
    segment = alice.register(text=STORY)
    assert segment["object"] == "segment" and segment["kind"] == "text" and segment["model"] == "demo" and segment["after"] is None
    assert segment["tokens"] == segment["context_tokens"] and segment["blocks"] == segment["tokens"] // 16 > 3 and segment["bytes"] > 0
    fill(alice)
    cached, answer = alice.complete(segments=[segment["id"]], prompt=" What then?")
    assert cached == 16 * segment["blocks"] and len(answer["prompt_token_ids"]) > segment["tokens"]
    if answer["prompt_token_ids"] == alone["prompt_token_ids"]:
        assert answer["token_ids"] == alone["token_ids"]
    listed = alice.ask("GET", "/v1/segments").json()
    assert listed["data"] == [segment] and (listed["blocks"], listed["bytes"]) == (segment["blocks"], segment["bytes"])
    assert alice.ask("GET", f"/v1/segments/{segment['id']}").json() == segment
    assert alice.ask("DELETE", f"/v1/segments/{segment['id']}").json() == {"id": segment["id"], "object": "segment", "deleted": True}
    fill(alice)
    assert alice.complete(prompt=STORY)[0] == 0
    refusal = alice.refused("POST", "/v1/completions", {"prompt": "a", "segments": [segment["id"]]})
    assert refusal[:3] == (404, "segment_not_found", "segments")
    assert alice.refused("DELETE", f"/v1/segments/{segment['id']}")[:2] == (404, "segment_not_found")


def test_segments_follow_each_other(alice: Client) -> None:
    first = alice.register(token_ids=[7] * 40)
    second = alice.register(token_ids=[8] * 40, after=first["id"])
    assert (second["after"], second["tokens"], second["context_tokens"], second["blocks"]) == (first["id"], 40, 80, 3)
    assert alice.ask("GET", "/v1/segments").json()["blocks"] == 5
    wanted = [7] * 40 + [8] * 40 + [9]
    for segments in ([first["id"], second["id"]], [second["id"]]):  # the first of a list includes the segments that it follows
        cached, answer = alice.complete(segments=segments, prompt=[9])
        assert cached == 80 and answer["prompt_token_ids"] == wanted
    other = alice.register(token_ids=[6] * 20)
    assert alice.complete(segments=[other["id"], second["id"]], prompt=[9])[1]["prompt_token_ids"] == [6] * 20 + [8] * 40 + [9]
    status, code, _, message = alice.refused("DELETE", f"/v1/segments/{first['id']}")
    assert (status, code) == (409, "segment_in_use") and second["id"] in message
    assert alice.ask("DELETE", f"/v1/segments/{second['id']}").status_code == 200
    assert alice.ask("DELETE", f"/v1/segments/{first['id']}").status_code == 200


def test_several_prompts_start_with_the_same_segment(alice: Client) -> None:
    segment = alice.register(token_ids=[7] * 40)
    answer = alice.ask("POST", "/v1/completions", {**ANSWER, "segments": [segment["id"]], "prompt": [[1], [2, 3], []]})
    assert [c["prompt_token_ids"] for c in answer.json()["choices"]] == [[7] * 40 + more for more in ([1], [2, 3], [])]
    whole = alice.ask("POST", "/generate", {"segments": [segment["id"]], "prompt": "", "max_tokens": 1}).json()
    assert whole["prompt_token_ids"] == [7] * 40


def test_a_conversation_continues_a_segment(alice: Client) -> None:
    more = [{"role": "user", "content": "What are you?"}]
    plain = alice.ask("POST", "/v1/chat/completions", {**ANSWER, "messages": [SYSTEM, *more]}).json()
    fill(alice)
    segment = alice.register(messages=[SYSTEM])
    assert segment["kind"] == "messages"
    fill(alice)
    body = {**ANSWER, "segments": [segment["id"]], "messages": more}
    answer = alice.ask("POST", "/v1/chat/completions", body).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * segment["blocks"] > 48
    assert (answer["prompt_token_ids"], answer["choices"]) == (plain["prompt_token_ids"], plain["choices"])
    turn = alice.register(messages=[*more, {"role": "assistant", "content": "A dragon."}], after=segment["id"])
    again = {"messages": [{"role": "user", "content": "Where do you live?"}], "segments": [turn["id"]]}
    stream = {**ANSWER, **again, "stream": True, "stream_options": {"include_usage": True}}
    streamed = events(alice.ask("POST", "/v1/chat/completions", stream))
    assert streamed[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == turn["context_tokens"] // 16 * 16
    both = {**again, "segments": [segment["id"], turn["id"]]}
    first, second = (alice.ask("POST", "/v1/chat/completions", {**ANSWER, **body}).json() for body in (again, both))
    assert first["choices"] == second["choices"]
    assert "A dragon." in alice.ask("POST", "/detokenize", {"tokens": first["prompt_token_ids"]}).json()["prompt"]


def test_invalid_orders_and_fields_are_refused(alice: Client) -> None:
    text, talk = alice.register(text=STORY), alice.register(messages=[SYSTEM])
    turn = alice.register(messages=[{"role": "user", "content": "a"}], after=talk["id"])
    more = [{"role": "user", "content": "b"}]
    chat = "/v1/chat/completions"
    assert alice.refused("POST", chat, {"messages": more, "segments": [text["id"]]})[1:3] == ("invalid_value", "segments")
    assert "must directly follow" in alice.refused("POST", chat, {"messages": more, "segments": [turn["id"], turn["id"]]})[3]
    assert "must directly follow" in alice.refused("POST", "/v1/completions", {"prompt": "", "segments": [text["id"], turn["id"]]})[3]
    assert "messages can follow only messages" in alice.refused("POST", "/v1/segments", {"messages": more, "after": text["id"]})[3]
    for body, param in (
        ({"text": "a", "token_ids": [1]}, "text"),
        ({}, "text"),
        ({"text": "a", "tools": []}, "tools"),
        ({"text": ""}, None),
        ({"text": "a", "after": "segment-0"}, "after"),
        ({"text": "a", "after": text["id"], "cache_salt": "other"}, "cache_salt"),
        ({"token_ids": [5] * 300}, None),
        ({"text": "a", "wish": 1}, "wish"),
    ):
        status, _, found, message = alice.refused("POST", "/v1/segments", body)
        assert status in (400, 404) and (param is None or found == param), (body, status, found, message)
    for field, value in (("truncate_prompt_tokens", 4), ("add_special_tokens", False)):
        assert alice.refused("POST", "/v1/completions", {"prompt": "a", "segments": [text["id"]], field: value})[2] == field


def test_a_template_that_renders_the_start_differently_is_refused() -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    other = "{% for m in messages %}{{ m.content }}{% if tools %}!{% endif %}|{% endfor %}"
    with running(ServerConfig(port=0, access_log=False, chat_template=template), {"demo": SMALL}) as server:
        status, _, param, message = Client(server).refused("POST", "/v1/segments", {"messages": [SYSTEM]})
        assert (status, param) == (400, "messages") and "rewrites these messages" in message
    with running(ServerConfig(port=0, access_log=False, chat_template=other), {"demo": SMALL}) as server:
        client = Client(server)
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
        segment = client.register(messages=[SYSTEM], tools=tools)
        body = {"messages": [{"role": "user", "content": "b"}], "segments": [segment["id"]], "max_tokens": 1}
        assert "send the same tools" in client.refused("POST", "/v1/chat/completions", body)[3]
        assert client.ask("POST", "/v1/chat/completions", {**body, "tools": tools}).status_code == 200


def test_a_key_sees_only_its_own(small: Running, alice: Client) -> None:
    bob = Client(small, "sk-bob")
    segment = alice.register(text=STORY)
    assert bob.ask("GET", "/v1/segments").json() == {"object": "list", "data": [], "blocks": 0, "bytes": 0}
    for method, path, body in (
        ("GET", f"/v1/segments/{segment['id']}", None),
        ("DELETE", f"/v1/segments/{segment['id']}", None),
        ("POST", "/v1/completions", {"prompt": "a", "segments": [segment["id"]]}),
        ("POST", "/v1/segments", {"text": "a", "after": segment["id"]}),
    ):
        strange = [s.replace(segment["id"], "X") for s in map(str, bob.refused(method, path, body))]
        asked = bob.refused(method, path.replace(segment["id"], "segment-0"), _with_unknown_id(body, segment["id"]))
        unknown = [s.replace("segment-0", "X") for s in map(str, asked)]
        assert strange == unknown and strange[0] == "404", "the segment of another key must look like one that does not exist"
    assert alice.ask("GET", f"/v1/segments/{segment['id']}").json() == segment


def _with_unknown_id(body: Any, name: str) -> Any:
    if body is None:
        return None
    return {k: ["segment-0"] if v == [name] else "segment-0" if v == name else v for k, v in body.items()}


def test_a_salt_separates_segments(alice: Client) -> None:
    segment = alice.register(token_ids=[5] * 40, cache_salt="mine")
    assert alice.complete(segments=[segment["id"]], prompt=[6], cache_salt="mine")[0] == 32
    assert alice.complete(prompt=[5] * 40 + [6])[0] == 0
    assert alice.refused("POST", "/v1/completions", {"segments": [segment["id"]], "prompt": [6]})[2] == "cache_salt"
    assert "mine" not in alice.ask("GET", "/v1/segments").text


def test_no_room_is_refused_with_figures(alice: Client) -> None:
    for n in range(2):
        alice.register(token_ids=[20 + n] * 200)
    status, code, _, message = alice.refused("POST", "/v1/segments", {"token_ids": [30] * 200})
    assert (status, code) == (409, "no_room") and "hold 24 KV blocks" in message and "release a segment" in message
    assert len(alice.ask("GET", "/v1/segments").json()["data"]) == 2


def test_a_segment_in_use_is_not_released(alice: Client) -> None:
    segment = alice.register(token_ids=[5] * 40)
    body = {**ANSWER, "max_tokens": 200, "segments": [segment["id"]], "prompt": [6], "stream": True}
    started, ended = threading.Event(), threading.Event()

    def stream() -> None:
        with httpx.stream("POST", alice._url + "/v1/completions", json=body, headers=alice._headers, timeout=60, trust_env=False) as answer:
            for _ in answer.iter_lines():
                started.set()
        ended.set()

    threading.Thread(target=stream).start()
    assert started.wait(120)
    status, code, _, message = alice.refused("DELETE", f"/v1/segments/{segment['id']}")
    assert ended.is_set() or ((status, code) == (409, "segment_in_use") and "1 request;" in message)
    assert ended.wait(120)
    alice.release_all()
    assert alice.ask("GET", "/v1/segments").json()["data"] == []


def test_a_client_that_disconnects_during_registration_holds_nothing(
    small: Running, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small.service.models.loaded()["demo"]
    hold, begun, ended = llm._hold, threading.Event(), threading.Event()

    async def watched(*arguments: Any) -> Any:
        begun.set()
        try:
            return await hold(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(llm, "_hold", watched)
    for n in range(5):
        begun.clear()
        ended.clear()
        body = json.dumps({"token_ids": [40 + n, *[9] * 100]})
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", small.port)) as connection:
            connection.request("POST", "/v1/segments", body, {**alice._headers, "Content-Type": "application/json"})
            assert begun.wait(60)
        assert ended.wait(60)
    alice.complete(prompt=[1, 2, 3])
    status = alice.ask("GET", "/status").json()["models"]["demo"]["segments"]
    assert status["count"] == len(alice.ask("GET", "/v1/segments").json()["data"])


def test_openais_client_can_use_them(small: Running) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="sk-alice", http_client=httpx.Client(timeout=60, trust_env=False)) as client:
        segment = client.post("/segments", body={"messages": [SYSTEM]}, cast_to=object)
        messages = [{"role": "user", "content": "What are you?"}]
        answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=2, extra_body={"segments": [segment["id"]]})
        assert answer.usage.prompt_tokens_details.cached_tokens >= 16 * segment["blocks"] > 0
        assert client.delete(f"/segments/{segment['id']}", cast_to=object)["deleted"] is True


def test_segments_end_with_their_engine() -> None:
    with running(ServerConfig(port=0, access_log=False), {"demo": SMALL}, idle_seconds=0.3) as server:
        client = Client(server)
        segment = client.register(text=STORY)
        ends = time.monotonic() + 120
        while client.ask("GET", "/v1/models").json()["data"][0]["loaded"]:
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert client.ask("GET", "/v1/segments").json()["data"] == []
        assert client.refused("POST", "/v1/completions", {"prompt": "a", "segments": [segment["id"]]})[1] == "segment_not_found"
        assert client.register(text=STORY)["id"] != segment["id"]
