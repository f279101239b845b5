"""Chat templates: the environment that models' templates expect, its sandbox, and invalid messages."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.text.vocabularies import SPECIALS, byte_level, write_folder
from tinyvllm.errors import RequestError, TokenizerError
from tinyvllm.text.chat import render_chat
from tinyvllm.text.load import load_tokenizer
from tinyvllm.text.tokenizer import Tokenizer

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
USER = [{"role": "user", "content": "Hello <b>&amp; 'you' 日本"}]


def with_templates(folder: Path, templates: Any) -> Tokenizer:
    names = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[2]}
    return load_tokenizer(write_folder(folder, byte_level(), tokenizer_config=names | {"chat_template": templates}))


def test_a_conversation(tmp_path: Path) -> None:
    tokenizer = with_templates(tmp_path, LLAMA3)
    messages = [{"role": "system", "content": " Be brief. "}, *USER]
    head = f"{SPECIALS[0]}<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    body = f"<|start_header_id|>user<|end_header_id|>\n\n{USER[0]['content']}<|eot_id|>"
    assert render_chat(tokenizer, messages, add_generation_prompt=False) == head + body
    assert render_chat(tokenizer, messages) == head + body + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ids = tokenizer.encode(render_chat(tokenizer, messages), add_special_tokens=False)
    assert ids.count(tokenizer.bos_id) == 1 and ids.count(tokenizer.eos_ids[0]) == 2


def test_blocks_are_trimmed() -> None:
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert render_chat(template, [{"role": "user", "content": "x"}]) == "x\nend"


def test_loop_controls_and_generation() -> None:
    template = "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    assert render_chat(template, [{"role": "user", "content": c} for c in "abc"]) == "a"
    assert (
        render_chat("{% generation %}{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}!{{ x }}", USER[:1])
        == USER[0]["content"] + "!"
    )


def test_tojson_is_plain_json() -> None:
    template = (
        "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, separators=(',', ':')) }}"
    )
    text = render_chat(template, USER, tools=[{"name": "f<>&'é"}])
    assert text == '[{"name": "f<>&\'é"}]|[\n  {\n    "name": "f<>&\'é"\n  }\n]|{"a":"<é>","b":1}'


def test_variables() -> None:
    template = (
        "{{ tools is none }} {{ documents[0].title }} {{ add_generation_prompt }} {{ thinking }} {{ strftime_now('%Y') }}{{ bos_token }}"
    )
    text = render_chat(template, USER, add_generation_prompt=False, documents=[{"title": "t"}], thinking=True)
    assert text == f"True t False True {datetime.datetime.now():%Y}"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "rag"}]
    tokenizer = with_templates(tmp_path / "all", named)
    assert render_chat(tokenizer, USER) == "plain"
    assert render_chat(tokenizer, USER, tools=[{}]) == "tools"
    assert render_chat(tokenizer, USER, tools=[]) == "plain"
    assert render_chat(tokenizer, USER, chat_template="rag") == "rag"
    assert render_chat(tokenizer, USER, chat_template="{{ eos_token }}") == SPECIALS[2]
    with pytest.raises(TokenizerError, match="no default template; choose one of rag, tool_use"):
        render_chat(with_templates(tmp_path / "some", named[1:]), USER)


def test_parts_of_content_and_arguments_of_tools() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert render_chat("{{ messages[0].content }}", parts) == "one\ntwo"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3", "tool_call_id": "1"}]
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}{{ messages[1].content }}{{ messages[2].tool_call_id }}"
    assert render_chat(template, messages) == '{"x": [1, "é"]}1'
    assert call["function"]["arguments"] == '{"x": [1, "é"]}'  # the caller's object is unchanged


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="the model has no template"):
        render_chat(load_tokenizer(write_folder(tmp_path, byte_level())), USER)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejects these messages: roles must alternate$"),
        ("{% if %}", r"cannot be compiled: .*\(line 1\)"),
        ("{% for m in messages %}", "cannot be compiled"),
        ("{{ messages | nosuchfilter }}", "cannot be compiled: .*nosuchfilter"),
        ("{{ messages[0].absent.deeper }}", "fails on these messages: .*absent"),
        ("{{ 1 + 'a' }}", "fails on these messages"),
        ("{{ 1 // 0 }}", "fails on these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages"),
    ],
)
def test_broken_templates(template: str, match: str) -> None:
    with pytest.raises(TokenizerError, match=match) as caught:
        render_chat(template, USER)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ range(10**9) | list }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_rejects_attacks(template: str) -> None:
    with pytest.raises(TokenizerError):
        render_chat(template, USER)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list of objects, got str"),
        (None, "messages must be a list of objects, got NoneType"),
        (["hello"], r"messages\[0\] must be an object, got str"),
        ([{"content": "x"}], r"messages\[0\] must have a role"),
        ([{"role": "", "content": "x"}], r"messages\[0\] must have a role"),
        ([{"role": "usr", "content": "x"}], r"messages\[0\] must have one of the roles system, .*got 'usr'"),
        ([{"role": "user|>", "content": "x"}], r"must have one of the roles"),
        ([*USER, {"role": "user"}], r"messages\[1\] \(user\) must have a content"),
        ([{"role": "user", "content": 3}], "content must be a text or a list of text parts, got int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "only parts of the form"),
        ([{"role": "user", "content": ["text"]}], "only parts of the form"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "arguments must be JSON"),
    ],
)
def test_invalid_messages(messages: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        render_chat("{{ messages }}", messages)


@pytest.mark.parametrize(("name", "value"), [("tools", ["f"]), ("tools", "f"), ("documents", [1])])
def test_invalid_tools_and_documents(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        render_chat("x", USER, **{name: value})
