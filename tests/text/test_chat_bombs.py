"""Chat templates that would take any amount of memory or time: each ends with a TokenizerError, at limits that are lowered here.

With the real limits (`-m long`) each ends too, within the seconds of a rendering and within memory that the limits imply.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinyvllm.errors import TokenizerError
from tinyvllm.text import chat, template_budget, template_sandbox
from tinyvllm.text.chat import SlowRenderError, render_chat

USER = [{"role": "user", "content": "x" * 100}]
DOUBLING = "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(60) %}{% set ns.s = EXPR %}{% endfor %}{{ ns.s | length }}"
LONG = "{% for i in range(99999) %}" + "y" * 5000 + "{% endfor %}"
TEXT = "{% set s = 'x' * 100000 %}"


def doubling(expression: str) -> str:
    return DOUBLING.replace("EXPR", expression)


def repeated(start: str, expression: str, end: str) -> str:
    return f"{{% set ns = namespace(v={start}) %}}{{% for i in range(60) %}}{{% set ns.v = {expression} %}}{{% endfor %}}{{{{ {end} }}}}"


def doubled(before: str, name: str) -> str:
    """A macro whose output is twice that of another."""
    return f"{{% macro {name}() %}}{{{{ {before}() }}}}{{{{ {before}() }}}}{{% endmacro %}}"


BOMBS = {
    "~": doubling("ns.s ~ ns.s"),
    "~ many": doubling("ns.s ~ ns.s ~ ns.s ~ ns.s"),
    "+": doubling("ns.s + ns.s"),
    "*": doubling("ns.s * 2"),
    "* of a list": doubling("[ns.s] * 2"),
    "* of lists": repeated("[1]", "[ns.v] * 100", "ns.v"),
    "* of ints": repeated("12345", "ns.v * ns.v", "ns.v"),
    "**": "{{ 9 ** (9 ** 9) }}",
    "** nested": repeated("2", "ns.v ** 64", "1"),
    "replace": doubling("ns.s.replace('x', 'xx')"),
    "replace filter": doubling("ns.s | replace('x', 'xxxx')"),
    "replace empty": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "join": doubling("[ns.s, ns.s] | join"),
    "join with": TEXT + "{{ range(100000) | join(s) }}",
    "str.join": TEXT + "{{ s.join(s) }}",
    "str.join of a generator": TEXT + "{{ s.join(range(100000) | map('string')) }}",
    "format": doubling("'%s%s' | format(ns.s, ns.s)"),
    "format width": "{{ '%1000000000d' % 1 }}",
    "format width filter": "{{ '%1000000000d' | format(1) }}",
    "format width from a value": "{{ '%*d' % (1000000000, 1) }}",
    "format precision": "{{ '%.1000000000f' % 1 }}",
    "str.format": doubling("'{0}{0}'.format(ns.s)"),
    "str.format width": "{{ '{:1000000000}'.format(1) }}",
    "str.format nested width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format_map": doubling("'{a}{a}'.format_map({'a': ns.s})"),
    "indent": "{{ ('x\n' * 1000) | indent(1000000) }}",
    "indent huge": "{{ 'x\ny' | indent(10000000000) }}",
    "indent text": TEXT + "{{ ('x\n' * 10000) | indent(s) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "str.center": "{{ 'x'.center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t\t\t'.expandtabs(1000000000) }}",
    "expandtabs of many": "{{ ('\t' * 10000).expandtabs(100000) }}",
    "translate": "{{ ('x' * 10000).translate({120: 'y' * 100000}) }}",
    "encode": "{{ 'x'.encode().ljust(10000000000) }}",
    "to_bytes": "{{ (1).to_bytes(10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10000000000) | list | length }}",
    "slice fill": TEXT + "{{ [1] | slice(100000, s) | list }}",
    "round": "{{ 1.5 | round(10000000000, 'ceil') }}",
    "range": "{% for i in range(10000000000) %}x{% endfor %}",
    "range in range": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "constant output": LONG,
    "constant output of a macro": "{% macro m() %}" + LONG + "{% endmacro %}{{ m() | length }}",
    "constant output of a block": "{% set b %}" + LONG + "{% endset %}{{ b | length }}",
    "constant output of a filter": "{% filter length %}" + LONG + "{% endfilter %}",
    "output": TEXT + "{% for i in range(99999) %}{{ s }}{% endfor %}",
    "macros": "{% macro a() %}xx{% endmacro %}"
    + "".join(map(doubled, "abcdefghijklmnopqrstuvwxy", "bcdefghijklmnopqrstuvwxyz"))
    + "{{ z() }}",
    "macro recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "call blocks": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 18 + "x" + "{% endcall %}" * 18,
    "recursive loop": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "shared lists": repeated("[1]", "[ns.v, ns.v]", "ns.v == ns.v"),
    "shared tuples as a key": repeated("(1,)", "(ns.v, ns.v)", "{ns.v: 1}"),
    "shared dicts": repeated("{}", "{'a': ns.v, 'b': ns.v}", "ns.v | tojson"),
    "dict()": repeated("{}", "dict(a=ns.v, b=ns.v)", "ns.v"),
    "a list of references": TEXT + repeated("['y' * 100000]", "ns.v + ns.v", "ns.v"),
    "tojson indent": "{{ [[[[1]]]] | tojson(indent=1000000000) }}",
    "tojson separators": TEXT + "{{ range(100000) | list | tojson(separators=(s, s)) }}",
    "list": "{{ ('x' * 1000000) | list | length }}",
    "split": "{{ ('x ' * 524288 ~ 'x ' * 524288).split() | length }}",
    "slices kept": TEXT + "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + [s[i:]] %}{% endfor %}",
    "lists kept": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l, i] %}{% endfor %}",
    "sum of lists": "{% set l = [[1, 2, 3]] * 100000 %}{{ l | sum(start=[]) | length }}",
    "striptags": "{{ ('<!---->' * 100000) | striptags }}",
    "urlize": "{{ ('http://x.y ' * 50000) | urlize | length }}",
    "wordwrap": "{{ ('x ' * 100000) | wordwrap(1, wrapstring='y' * 100000) }}",
    "sort": TEXT + "{{ ([s] * 10 * 1000) | sort | length }}",
    "map of a filter": TEXT + "{{ range(99999) | map('center', 1000000) | list | length }}",
    "generators": "{{ range(99999) | map('string') | map('list') | list | length }}" * 30,
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "cycler": "{% set c = cycler(1) %}" + "{% for i in range(99999) %}" * 2 + "{{ c.next() }}" + "{% endfor %}" * 2,
    "strftime": "{{ strftime_now('%1000000000d') }}",
    "strftime of many": "{{ strftime_now('%c' * 100000) }}",
    "constants folded": "{{ 'x' | center(10000000000) | length }}{% if 'x' * 10000000000 %}{% endif %}",
    "constants folded in a set": "{% set a = 'x' ~ ('y' | center(1000000000)) %}",
}


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"MAX_STEPS": 20_000, "MAX_OUTPUT": 1 << 20, "MAX_WEIGHT": 1 << 20, "MAX_CREATED": 1 << 23, "MAX_PARTS": 1 << 17}
    for name, limit in limits.items():
        for module in (template_budget, template_sandbox):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, limit)


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.usefixtures("low_limits")
def test_bombs_end_with_an_error(name: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        render_chat(BOMBS[name], USER)
    assert len(str(caught.value)) <= 300


def test_an_output_of_many_small_parts_is_limited() -> None:
    """None of them is large, and together they are fewer bytes than a template may make."""
    with pytest.raises(TokenizerError, match=f"its output has more than {template_budget.MAX_OUTPUT} characters"):
        render_chat("{% for i in range(1000) %}{{ 'x' * 10000 }}{% endfor %}", USER)


def test_processor_time_is_limited() -> None:
    """Of the thread that renders: a loaded machine refuses no more than an idle one."""
    template = "{% for i in range(1000) %}{{ i }}{% endfor %}"
    assert len(render_chat(template, USER)) == 2890
    with template_budget.at_most(0.0), pytest.raises(SlowRenderError, match="takes more than 0 seconds"):
        render_chat(template, USER)


def test_variables_of_a_template_set_no_limit() -> None:
    template = "{% for i in range(1000) %}{{ max_seconds }}{% endfor %}"
    assert len(render_chat(template, USER, max_seconds=1)) == 1000
    with template_budget.at_most(0.0), pytest.raises(SlowRenderError, match="takes more than 0 seconds"):
        render_chat(template, USER, max_seconds=1e9, seconds=1e9, at_most=1e9)


def test_templates_are_bounded_before_they_are_compiled() -> None:
    with pytest.raises(TokenizerError, match=f"at most {chat.MAX_TEMPLATE} are compiled"):
        render_chat("{{ 1 }}" * 20_000, USER)


def test_long_conversations_are_far_from_the_limits() -> None:
    """1,000 messages, 2 MB, with the operations that templates use on each."""
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != m.role %}{% endif %}"
        "{% set ns.n = ns.n + (m.content | length) %}{{ '<|' + m['role'] + '|>' ~ m.content.split('</think>')[-1].strip() }}"
        "{% if loop.last %}{{ messages[1:] | selectattr('role', 'equalto', 'user') | list | length }}{% endif %}{% endfor %}{{ ns.n }}"
    )
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 400} for i in range(1000)]
    assert render_chat(template, messages).endswith("4992000000")


REAL = """
import resource, sys, time
from tests.text.test_chat_bombs import BOMBS, USER
from tinyvllm.errors import TokenizerError
from tinyvllm.text.chat import render_chat
start = time.thread_time()
try:
    render_chat(BOMBS[sys.argv[1]], USER)
except TokenizerError as error:
    print(f"{time.thread_time() - start:.2f} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} {error}")
"""


@pytest.mark.long
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_at_the_real_limits(name: str) -> None:
    """In a process of its own that may allocate 1.5 GB; MemoryError would not be a TokenizerError about a limit."""
    limit = 1536 << 20

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    command, root = [sys.executable, "-c", REAL, name], Path(__file__).parents[2]
    start = time.monotonic()
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, preexec_fn=bound, timeout=120, check=True)
    print(name, ended.stdout.strip()[:120], f"{time.monotonic() - start:.1f} s")
    assert ended.stdout and "MemoryError" not in ended.stdout
