"""Tool results with chat templates that have no role for them, and calls that were cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")

from tinyvllm.errors import TokenizerError
from tinyvllm.server.core.conversation import Conversation, _render_with_results
from tinyvllm.server.core.tool_turns import as_plain_turns, with_ended_calls
from tinyvllm.text.load import load_tokenizer

DEMO = Path(__file__).parents[3] / "tinyvllm" / "demo" / "model"
LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
RAISES = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SKIPS = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
QUOTES = "{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}\n{% endfor %}"
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"place": "tree"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": 'a "bird"'},
]
PLAIN = 'user: Look.\nassistant: {"name": "look", "parameters": {"place": "tree"}}\nuser: a "bird"\n'


def render(template: str, messages: list[dict[str, Any]] = MESSAGES) -> str:
    return _render_with_results(load_tokenizer(DEMO), Conversation(messages, template=template))[1]


@pytest.mark.parametrize("template", [RAISES, SKIPS])
def test_results_become_turns_of_the_user(template: str) -> None:
    assert render(template) == PLAIN


def test_templates_with_a_tool_role_are_as_they_are() -> None:
    assert render(LOOP) == 'user: Look.\nassistant: \ntool: a "bird"\n'
    assert render(QUOTES).endswith('tool: "a \\"bird\\""\n')  # not the text itself, and yet shown


def test_a_template_that_refuses_something_else_says_so() -> None:
    with pytest.raises(TokenizerError, match="the roles are system, user and assistant"):
        _render_with_results(load_tokenizer(DEMO), Conversation([{"role": "developer", "content": "a"}, *MESSAGES]))


def test_roles_alternate() -> None:
    """Several results and the user's next message are one turn; turns of the user's that were apart before stay apart."""
    more = [
        *MESSAGES,
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "a tree"}]},
        {"role": "user", "content": "Well?"},
    ]
    plain = as_plain_turns([{"role": "user", "content": "Hello."}, *more])
    assert [m["role"] for m in plain] == ["user", "user", "assistant", "user"] and plain[-1]["content"] == 'a "bird"\n\na tree\n\nWell?'
    texts = as_plain_turns(
        [{"role": "assistant", "content": "I look.", "tool_calls": [{**CALL, "function": {"name": "look", "arguments": {}}}]}]
    )
    assert texts == [{"role": "assistant", "content": 'I look.\n{"name": "look", "parameters": {}}'}]


@pytest.mark.parametrize(
    ("arguments", "ended"),
    [
        ('{"place": "ri', {"place": "ri"}), ('{"a": [1, {"b": "c', {"a": [1, {"b": "c"}]}), ('{"a": 1, "b": tr', {"a": 1}), ("{", {}),
        ('{"a": 1}', '{"a": 1}'), ('{"a": 1}}', '{"a": 1}}'), ('{"a" 1', '{"a" 1'), ("[1", "[1"), ("", ""), (None, None),
        ({"a": 1}, {"a": 1}),
        ('{"a": ' * 5000, '{"a": ' * 5000), ('{"a": ' + "9" * 5000, '{"a": ' + "9" * 5000),
    ],
)  # fmt: skip
def test_calls_that_max_tokens_has_cut_get_an_end(arguments: Any, ended: Any) -> None:
    """A prefix of an object becomes the object of what is there; nothing else is changed."""
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
    first, second = with_ended_calls([{"role": "user", "content": "a"}, message])
    assert first == {"role": "user", "content": "a"} and second["tool_calls"][0]["function"] == {"name": "look", "arguments": ended}
