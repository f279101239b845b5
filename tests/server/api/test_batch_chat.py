"""POST /v1/chat/completions/batch: several conversations in one request, each answered as if it were sent alone."""

from __future__ import annotations

import json

import pytest

from tests.server.conftest import Running

PATH = "/v1/chat/completions/batch"
CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Once upon a time"}],
    [{"role": "user", "content": "A dragon"}],
]
GREEDY = {"max_tokens": 6, "temperature": 0}


def test_each_conversation_is_answered_as_if_alone(server: Running) -> None:
    more = {**GREEDY, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    answer = server.post(PATH, {"messages": CONVERSATIONS, **more}).json()
    alone = [server.post("/v1/chat/completions", {"messages": one, **more}).json() for one in CONVERSATIONS]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and answer["object"] == "chat.completion"
    for choice, single in zip(answer["choices"], alone, strict=True):
        (expected,) = single["choices"]
        assert choice["message"] == expected["message"] and choice["token_ids"] == expected["token_ids"]
        assert choice["prompt_token_ids"] == single["prompt_token_ids"] and choice["finish_reason"] == expected["finish_reason"]
        assert [one["token"] for one in choice["logprobs"]["content"]] == [one["token"] for one in expected["logprobs"]["content"]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(single["usage"][name] for single in alone)


def test_the_format_holds_for_each_answer(server: Running) -> None:
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"], "additionalProperties": False}
    body = {"messages": CONVERSATIONS, "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    for choice in server.post(PATH, body).json()["choices"]:
        assert json.loads(choice["message"]["content"])["answer"] in ("yes", "no")


def test_echo_is_of_each_conversation(server: Running) -> None:
    started = [[*CONVERSATIONS[0], {"role": "assistant", "content": text}] for text in ("One ", "Two ")]
    body = {"messages": started, "echo": True, "add_generation_prompt": False, "continue_final_message": True, **GREEDY}
    contents = [choice["message"]["content"] for choice in server.post(PATH, body).json()["choices"]]
    assert contents[0].startswith("One ") and contents[1].startswith("Two ")
    (unstarted,) = server.post(PATH, {"messages": CONVERSATIONS[2:], "echo": True, **GREEDY}).json()["choices"]
    assert not unstarted["message"]["content"].startswith("A dragon")  # the user's words are no start of an answer


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": CONVERSATIONS[0]}, "messages[0]"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": "word " * 3000}]]}, "messages"),
        ({"messages": [CONVERSATIONS[0]] * 2049}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_a_batch_refuses(server: Running, change: dict, param: str) -> None:
    answer = server.post(PATH, {"messages": CONVERSATIONS, **change})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_token_ids_out_of_vocabulary(server: Running) -> None:
    """The wording by which vLLM's clients recognise them."""
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        for ids in ([5, 999_999], [-1]):
            answer = server.post(path, {field: ids})
            assert answer.status_code == 400 and "out of vocabulary" in answer.json()["error"]["message"], answer.text
