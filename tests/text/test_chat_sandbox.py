"""Chat templates are untrusted code: what the sandbox forbids, and that every failure is a TokenizerError with a message of one line."""

from __future__ import annotations

import pytest

from tinyvllm.errors import RequestError, TokenizerError
from tinyvllm.text.chat import render_chat

USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'a' * 10**10 }}", "exceeds the limit of 1048576"),
        ("{{ 10 ** (10 ** 10) }}", "too large"),
        ("{{ ().__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='system') }}", "unsafe"),
        ("{{ render_chat.__globals__ }}", "undefined"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ namespace() | tojson }}", "JSON"),
        ("{{ raise_exception('first\nsecond') }}", "first second"),
        ("{% if %}", "compiled"),
        ("{{ 1 | nosuch }}", "nosuch"),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "compiled"),
    ],
)
def test_forbidden_operations(template: str, said: str) -> None:
    with pytest.raises(TokenizerError) as error:
        render_chat(template, USER)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("template", ["{{ 'x' | attr('__class__') }}", "{{ '{0.__class__}'.format(1) }}"])
def test_other_ways_to_private_attributes_fail(template: str) -> None:
    assert render_chat(template, USER) == ""


def test_the_conversation_is_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "n"}]
    assert render_chat("{{ messages[0].content }}/{{ messages[0].name }}", messages) == "one\ntwo/n"
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "n"}]


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        [],
        ["hi"],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_objects_that_are_not_messages(messages: object) -> None:
    with pytest.raises(RequestError) as error:
        render_chat("x", messages)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_json_has_no_html_escapes_and_blocks_leave_no_lines() -> None:
    template = "{% for t in tools %}\n  {% if 1 %}\n{{ t | tojson }}\n  {% endif %}\n{% endfor %}\n{% generation %}g{% endgeneration %}"
    assert render_chat(template, USER, tools=[{"a": "<b> & 'ü'"}]) == '{"a": "<b> & \'ü\'"}\ng'
    assert render_chat("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", USER) == "01"
    assert render_chat("{{ strftime_now('%Y') | length }}", USER) == "4"
