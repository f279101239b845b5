"""gpt-oss over HTTP: channels become reasoning, content and tool calls, streamed or whole, as the model writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from tests.server.conftest import LOOK, Running, running  # noqa: E402
from tests.tiny.harmony import write_harmony_model  # noqa: E402
from tinyvllm.server.core.context import ServerConfig  # noqa: E402

pytestmark = pytest.mark.long  # two engines, whose kernels are those of no other test of the server
REASONING = ["<|channel|>", "analysis", "<|message|>", "why", " not", "<|end|>", "<|start|>"]
SCRIPTS = {
    "answers": [*REASONING, "assistant<|channel|>final<|message|>", "so", " be it", "<|return|>"],
    "calls": [*REASONING, "assistant<|channel|>commentary to=functions.look ", "<|constrain|>", "json<|message|>",
              '{"place": "tree",', ' "times": 2}', "<|call|>"],
}  # fmt: skip
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Name?"}], "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("harmony")
    common = {"device": "CPU", "max_num_seqs": 2, "num_blocks": 128}
    specs = {name: {"model": str(write_harmony_model(folder / name, script)), **common} for name, script in SCRIPTS.items()}
    with running(ServerConfig(port=0, access_log=False), specs) as server:
        made: Running = server
        with openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client


def test_channels_are_reasoning_and_content(client: Any) -> None:
    whole = client.chat.completions.create(model="answers", **ASK).choices[0]
    assert (whole.message.reasoning_content, whole.message.content, whole.finish_reason) == ("why not", "so be it", "stop")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(model="answers", stream=True, **ASK)]
    assert "".join(delta.content or "" for delta in deltas) == "so be it"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "why not"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_message_to_a_function_is_a_call(client: Any, choice: str) -> None:
    """The model's own, or one that a grammar enforces byte by byte."""
    body = {"model": "calls", "tools": [LOOK], "tool_choice": choice, **ASK, "max_tokens": 300}
    answer = client.chat.completions.create(**body).choices[0]
    [call] = answer.message.tool_calls
    assert call.function.name == "look" and answer.finish_reason == "tool_calls" and not answer.message.content
    arguments = json.loads(call.function.arguments)
    assert arguments == {"place": "tree", "times": 2} if choice == "auto" else arguments["place"] in ("tree", "river")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**body, stream=True)]
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    assert pieces[0].function.name == "look"
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == arguments
