"""Chat templates are untrusted code: what the sandbox forbids, and that every failure is a TokenizerError with a message of one line."""

from __future__ import annotations

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

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


# Everything that templates use, rendered as by jinja2 without limits.
EXPRESSIONS = (
    "messages | length", "messages[0].content | trim", "messages[-1]['role'] | upper | lower | title | capitalize",
    "messages[::-1] | length", "messages | map(attribute='role') | join(', ')",
    "messages | selectattr('role', 'equalto', 'user') | list | length",
    "messages | rejectattr('role', 'in', ['user', 'system']) | map(attribute='content') | list", "messages | first", "messages | last",
    "'a,b,,c'.split(',') | reject('equalto', '') | list", "'<think>x</think>y'.split('</think>')[-1].lstrip('\\n')",
    "'%s is %d (%5.2f)' | format('x', 3, 1.5)", "'%s-%s' % ('a', 2)", "'{} {name}'.format(1, name='n')", "'{a}'.format_map({'a': 1})",
    "[1, 2] + [3]", "(1, 2) + (3,)", "'ab' * 3", "[0] * 3", "(7 // 2) ~ (7 % 4) ~ (2 ** 8) ~ (7 / 2) ~ (3 - 1)", "-3 | abs",
    "1.55 | round(1)", "'x' ~ 1 ~ none ~ true", "{'b': 1, 'a': [1, {'c': none}]} | tojson", "{'b': 1, 'a': 2} | dictsort",
    "{'a': 1}.items() | list", "{'a': 1} | items | list", "{'a': {'b': 2}}.get('a').get('b')", "{'a': 1}.get('z', 'd')",
    "dict(a=1, b=[2])", "{'a': 1, 'b': 2}.keys() | list", "range(3) | list", "range(10) | batch(4, 0) | list",
    "range(10) | slice(3) | list", "range(5) | sum", "[[1], [2]] | sum(start=[])", "[3, 1, 2] | sort | reverse | list",
    "['b', 'a', 'b'] | unique | list", "[3, 1] | max ~ [3, 1] | min", "'abc' | list", "'abc' | reverse", "'a\\nb' | indent(2)",
    "'a\\nb' | indent('> ', true)", "'x' | center(5)", "'x'.center(5) ~ '|' ~ '7'.zfill(3) ~ 'x'.ljust(3)", "'a b c' | wordcount",
    "'a long text' | truncate(6)", "'a b' | replace(' ', '_') | replace('a', 'b', 1)", "'abab'.replace('a', 'x', 1)", "'<b>' | e",
    "'<b>x</b>' | striptags", "'x' | default('y') ~ undefined_name | default('y')", "'12' | int + '1.5' | float", "'ff' | int(base=16)",
    "messages is iterable", "1 in [1, 2] and 'a' in 'ab'", "'x' if messages[0].role == 'user' else 'y'",
    "messages | groupby('role') | map('first') | list", "['a', 'b'] | map('upper') | join", "'ab'[0] ~ 'abc'[1:] ~ 'abc'[::-1]",
    "'a.b'.partition('.')", "'Ab'.startswith('A') ~ 'Ab'.find('b') ~ 'aa'.count('a') ~ ' x '.strip() ~ 'x'.isdigit()",
    "['a'].index('a') ~ [1].count(1)", "'a' 'b'", "cycler('a', 'b').next()", "namespace(a=1).a", "'x' | string | length",
    "2.0 | int ~ (5).bit_length()", "messages[0] | tojson(indent=2)", "'a|b' | urlize",
    "[1, 2, 3] | select('odd') | list ~ [0, 1] | select | list", "'  a  b ' | trim ~ 'x y'.split() | length ~ 'x\\ny'.splitlines()",
    "none | default('d', true)", "{1: 'a', 'k': (1, 2)}", "[[], {}, ()]", "1 < 2 < 3", "not messages", "'tab\\t'.expandtabs(4)",
    "'-'.join(['a', 'b']) ~ '-'.join('ab')", "joiner(',')()",
)  # fmt: skip
STATEMENTS = (
    "{% for m in messages %}{{ loop.index }}{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ m.role }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index0 }}{{ loop.previtem }}{{ loop.nextitem }}{% else %}none{% endfor %}",
    (
        "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }}{{ loop.cycle(',', ';') }}{% endfor %}"
        "{% for x in none or [] %}{% else %}e{% endfor %}"
    ),
    (
        "{% for m in messages | selectattr('role', 'ne', 'x') %}{{ loop.last }}{% endfor %}"
        "{% for c in 'abc' %}{{ c }}{{ loop.changed(c) }}{% endfor %}"
    ),
    (
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller else '' }}"
        "{% endmacro %}{{ f(1, 2, 3, c=4) }}{% call f(5) %}x{% endcall %}"
    ),
    (
        "{% set ns = namespace(a=[], n=0) %}{% for m in messages %}{% set ns.a = ns.a + [m.role] %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.a }}{{ ns.n }}"
    ),
    (
        "{% set x %}a{{ 1 }}b{% endset %}{{ x }}{% filter upper %}a{{ x }}{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}"
        "{% set a, b = (1, 2) %}{{ b }}"
    ),
    "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for n in [[1, [2]], [3]] recursive %}{{ loop.depth }}{{ loop(n) if n is not number else n }}{% endfor %}",
    (
        "{% if messages[0].content is string and messages[0].tools is not defined %}{{- ' x ' -}}{% endif %}\n  "
        "{%- for m in messages %}\n a\n  {%- endfor %}"
    ),
    (
        "{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}{% for m in messages[1:] %}{{ m.content }}"
        "{% endfor %}{{ {'a': 1}['a'] }}{{ messages.0.role }}"
    ),
    (
        "{% autoescape true %}{{ '<' ~ '>' ~ (messages[0].content | safe) }}{{ '<b>' | safe }}"
        "{% set x %}<{{ '<' }}{% endset %}{{ x }}{% endautoescape %}"
    ),
)
CONVERSATION = [{"role": "system", "content": " Be <b>. "}, {"role": "user", "content": "Hé\nyou"}, {"role": "assistant", "content": "ok"}]


@pytest.mark.parametrize("template", [*(f"{{{{ {expression} }}}}" for expression in EXPRESSIONS), *STATEMENTS])
def test_limits_change_no_text(template: str) -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    assert render_chat(template, CONVERSATION) == environment.from_string(template).render(messages=CONVERSATION)
