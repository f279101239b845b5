"""Parsing of streamed answers: every dialect, any splitting, and texts that only look like a call."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyvllm.errors import RequestError
from tinyvllm.text.parsing import Event, Format, StreamParser, parser_for

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "share": {"type": "number"},
                    "hourly": {"type": "boolean"},
                    "places": {"type": "array"},
                    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "far": {"$ref": "#/$defs/far"},
                },
                "$defs": {"far": {"type": ["object", "null"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
HERMES = parser_for("{{ tools }} <tool_call> <think> </think>")
LLAMA3 = parser_for("{{ tools }} <|python_tag|>")
MISTRAL = parser_for("[TOOL_CALLS] [THINK] [/THINK]")
XML = parser_for("<tool_call><function=x><parameter=y> </think>")
PYTHONIC = parser_for("{{ tools }} [name(key=value)]")
LLAMA4 = parser_for("{{ tools }} <|python_start|>")
HARMONY = parser_for("<|start|>assistant<|channel|>final<|message|>")
FORMATS = (HERMES, LLAMA3, MISTRAL, XML, PYTHONIC, LLAMA4, HARMONY)


def read(format: Format, pieces: list[str], tools: Any = TOOLS, **options: Any) -> list[Event]:
    parser = StreamParser(format, tools, **options)
    return [event for piece in pieces for event in parser.add(piece)] + parser.finish()


def joined(events: list[Event]) -> list[tuple[str, ...]]:
    """Adjacent events of a kind merged, without the random ids."""
    out: list[tuple[str, ...]] = []
    for e in events:
        if e.text and out and out[-1][:2] == (e.kind, str(e.index)):
            out[-1] = (*out[-1][:2], out[-1][2] + e.text)
        elif e.kind == "tool_end":
            out.append((e.kind, str(e.index), "broken" if e.broken else ""))
        else:
            out.append((e.kind, str(e.index), e.name or e.text))
    return out


def answer(format: Format, text: str, **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """(reasoning, content, calls with their arguments as values) of a text that arrives character by character."""
    events = joined(read(format, list(text), **options))
    calls: dict[str, list[str]] = {}
    for kind, index, text_or_name in events:
        if kind == "tool_start":
            calls[index] = [text_or_name, ""]
        elif kind == "tool_arguments":
            calls[index][1] += text_or_name
        elif kind == "tool_end":
            assert not text_or_name, events
    texts = ["".join(e[2] for e in events if e[0] == kind) for kind in ("reasoning", "content")]
    return texts[0], texts[1], [(name, json.loads(arguments)) for name, arguments in calls.values()]


PARIS = ("get_weather", {"city": "Paris"})
NOW = ("now", {})


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        (HERMES, "Hi\n", ("", "Hi\n", [])),
        (HERMES, 'Hi \n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', ("", "Hi", [NOW])),
        (HERMES, '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', ("", "", [PARIS])),
        (HERMES, '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "now", "arguments": {}}', ("", "", [NOW, NOW])),
        (HERMES, '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', ("", "", [PARIS])),
        (HERMES, '<think>\nhm </thin\n\n</think>\n\nSo.\n<tool_call>{"name": "now"}</tool_call>', ("hm </thin", "So.", [NOW])),
        (HERMES, '<tool_call>{"id": [1, {"a": null}], "name": "now", "type": "x"}</tool_call> And?', ("", " And?", [NOW])),
        (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\t"}}', ("", "", [("get_weather", {"city": "a\nb\t"})])),
        (LLAMA3, '{"name": "get_weather", "parameters": {"city": "Paris"}}', ("", "", [PARIS])),
        (LLAMA3, ' <|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', ("", "", [NOW, NOW])),
        (LLAMA3, 'Say {"name": "now"}', ("", 'Say {"name": "now"}', [])),
        (LLAMA3, '<|python_tag|>print("x")', ("", '<|python_tag|>print("x")', [])),
        (MISTRAL, 'ok[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris"}}]',
         ("", "ok", [NOW, PARIS])),
        (MISTRAL, '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]a1B2[ARGS]{"city": "Paris"}', ("", "", [NOW, PARIS])),
        (MISTRAL, '[THINK]one[/THINK][TOOL_CALLS]get_weather{"city": "Paris"}', ("one", "", [PARIS])),
        (MISTRAL, "[TOOL_CALLS][]", ("", "[TOOL_CALLS][]", [])),
        (XML, "<tool_call>\n<function=now>\n</function>\n</tool_call>", ("", "", [NOW])),
        (XML, "go <function=get_weather><parameter=city>Paris</parameter></function>", ("", "go", [PARIS])),
        (PYTHONIC, "[get_weather(city='Paris'), now()]", ("", "", [PARIS, NOW])),
        (PYTHONIC, "[1] says so", ("", "[1] says so", [])),
        (PYTHONIC, "[now() or so", ("", " or so", [NOW])),
        (LLAMA4, '<|python_start|>[get_weather(city="Paris")]<|python_end|>', ("", "", [PARIS])),
        (HARMONY, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>", ("hm", "So.", [])),
        (HARMONY, '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather '
         '<|constrain|>json<|message|>{"city": "Paris"}<|call|>', ("hm", "", [PARIS])),
        (HARMONY, " to=functions.now<|channel|>commentary json<|message|><|call|>", ("", "", [NOW])),
        (HARMONY, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{}",
         ("", "I look.", [NOW])),
        (HARMONY, '<|channel|>commentary to=functions.other<|message|>{"a": 1}<|call|>', ("", '{"a": 1}', [])),
        (HARMONY, "no header <|endless", ("", "no header <|endless", [])),
        (LLAMA4, 'Well: <|python_start|>[now()]<|python_end|>', ("", "Well:", [NOW])),
    ],
)  # fmt: skip
def test_answers(format: Format, text: str, expected: tuple[str, str, list[Any]], whole: bool) -> None:
    assert answer(format, text, whole=whole) == expected


def test_parameters_of_xml_have_the_types_of_the_schema() -> None:
    values = {"city": '\n12\n "<b>" \\\n', "days": "3", "share": "4", "hourly": "True", "places": '["a", 1]', "either": "x7", "far": "null"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    [(_, arguments)] = answer(XML, f"<tool_call>\n<function=get_weather>\n{text}</function>\n</tool_call>")[2]
    assert arguments == {
        "city": '\n12\n "<b>" \\\n', "days": 3, "share": 4, "hourly": True, "places": ["a", 1], "either": "x7", "far": None,
    }  # fmt: skip
    [(_, arguments)] = answer(XML, "<function=get_weather><parameter=days>soon</parameter><parameter=new>1</parameter></function>")[2]
    assert arguments == {"days": "soon", "new": "1"}  # what the schema does not foresee is not lost


def test_python_literals() -> None:
    call = r"""[get_weather(city='it\'s\n\u00e9 "x" \d', days=-3, share=1e3, hourly=true, places=[(1,), {'a, ]': None}, "b)"], far={})]"""
    [(_, arguments)] = answer(PYTHONIC, call)[2]
    assert arguments == {
        "city": 'it\'s\n\u00e9 "x" \\d', "days": -3, "share": 1e3, "hourly": True, "places": [[1], {"a, ]": None}, "b)"], "far": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>'),
        (HERMES, "<tool_call>" * 20),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", '),
        (HERMES, "<tool_cal"),
        (LLAMA3, '{"name": "weather", "parameters": {}}'),
        (LLAMA3, '{"temperature": 3, "unit": "C"}'),
        (MISTRAL, "[TOOL_CALLS] nothing"),
        (XML, "<function=other><parameter=a>1</parameter></function>"),
        (PYTHONIC, "[other(a=1)]"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_what_only_looks_like_a_call_is_content(format: Format, text: str, whole: bool) -> None:
    assert answer(format, text, whole=whole) == ("", text, [])


@pytest.mark.parametrize(
    ("format", "text", "prefix"),
    [
        (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "Par', '{"city":"Par'),
        (XML, "<function=get_weather><parameter=city>Par", '{"city": "Par'),
        (PYTHONIC, '[get_weather(city="Par', '{"city": "Par'),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>', '{"a":'),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>', '{"a":'),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "\\x"}}</tool_call>', '{"a":"'),
        (PYTHONIC, "[now(a=1e999)]", '{"a": '),
        (PYTHONIC, "[now(a=open('x'))]", '{"a": '),
        (PYTHONIC, "[now(a=" + "[" * 5000 + "]" * 5000 + ")]", '{"a": '),
    ],
)
def test_a_call_that_breaks_off_is_marked_in_a_stream_and_content_in_an_answer(format: Format, text: str, prefix: str) -> None:
    events = joined(read(format, list(text)))
    assert events[:3] == [("tool_start", "0", events[0][2]), ("tool_arguments", "0", prefix), ("tool_end", "0", "broken")]
    assert joined(read(format, list(text), whole=True)) == [("content", "-1", text)]


def test_deep_nesting_is_no_recursion() -> None:
    deep = '{"a":' * 3000 + "[" * 3000 + "]" * 3000 + "}" * 3000
    events = joined(read(HERMES, [f'<tool_call>{{"name": "now", "arguments": {deep}}}</tool_call>']))
    assert events[1] == ("tool_arguments", "0", deep)


def test_arguments_and_content_do_not_wait_for_the_end() -> None:
    parser = StreamParser(HERMES, TOOLS)
    assert joined(parser.add('Hello <tool_call>{"name": "get_weather", "arguments": {"city": "Pa')) == [
        ("content", "-1", "Hello"), ("tool_start", "0", "get_weather"), ("tool_arguments", "0", '{"city":"Pa'),
    ]  # fmt: skip
    assert joined(parser.add("ris")) == [("tool_arguments", "0", "ris")]
    assert parser.calls == 0 and [e.kind for e in parser.add('"}}')] == ["tool_arguments", "tool_end"] and parser.calls == 1
    xml = StreamParser(XML, TOOLS)
    xml.add("<function=get_weather><parameter=city>\nPa")
    assert joined(xml.add("ris\n</par")) == [("tool_arguments", "0", "ris")]


def test_part_of_a_mark_is_never_emitted() -> None:
    parser = StreamParser(HERMES, TOOLS, opened=True)
    assert [e.text for e in parser.add("a </thi")] == ["a"]
    assert [e.text for e in parser.add("nk> b <tool_")] == ["b"]
    assert [e.text for e in parser.add("box>")] == [" <tool_box>"]


def test_reasoning() -> None:
    assert answer(HERMES, "why\n</think>\n\nso", opened=True) == ("why", "so", [])
    assert answer(HERMES, "<think>again</think>so", opened=True) == ("again", "so", [])
    assert answer(HERMES, "<think>cut off  ") == ("cut off", "", [])
    assert answer(HERMES, "a <think>b</think>") == ("", "a <think>b</think>", [])
    assert answer(HERMES, "<think>b</think>", reasoning=False) == ("", "<think>b</think>", [])
    assert answer(HERMES, "  \n x") == ("", "  \n x", [])


def test_without_tools_no_text_is_a_call() -> None:
    text = '<tool_call>{"name": "now"}</tool_call> \n'
    assert answer(HERMES, text, tools=None) == ("", text, [])


def test_ids() -> None:
    def ids(format: Format, text: str) -> list[str]:
        return [e.id for e in read(format, [text]) if e.kind == "tool_start"]

    text = '<tool_call>{"name": "now"}</tool_call>'
    first, second = ids(HERMES, text * 2)
    assert first != second and all(re.fullmatch(r"call_[0-9a-f]{24}", i) for i in (first, second))
    assert re.fullmatch(r"[A-Za-z0-9]{9}", ids(MISTRAL, "[TOOL_CALLS]now{}")[0])


@pytest.mark.parametrize("tools", [[{"type": "function"}], [{"function": {"name": ""}}], [TOOLS[1], TOOLS[1]],
                                   [{"function": {"name": "f", "parameters": [1]}}]])  # fmt: skip
def test_tools_of_another_form_are_refused(tools: Any) -> None:
    with pytest.raises(RequestError, match=r"tools\["):
        StreamParser(HERMES, tools)


MARKS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    "<|python_start|>", "<|python_end|>", "<function=", "get_weather", "now", ">", "</function>", "<parameter=", "city", "days",
    "</parameter>", "{", "}", "[", "]", "(", ")", '"', "'", "name", "arguments", "parameters", ":", ",", "=", ";", "1", "-2.5e3",
    "true", "None", "\\", "\\n", "\\u00e9", "é", "x", "<", "/",
]  # fmt: skip
HEADS = ['{"name": "now", "arguments": {', '{"name": "get_weather", "parameters": {"city": "', "[get_weather(city=", "<function=now>\n"]
WORDS = st.sampled_from([*MARKS, *HEADS, "\n", " "])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(WORDS, max_size=25).map("".join), st.data(), st.booleans(), st.booleans())
def test_the_cuts_of_a_text_do_not_matter(format: Format, text: str, data: st.DataObject, opened: bool, whole: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = joined(read(format, pieces, opened=opened, whole=whole))
    for other in ([text], list(text)):
        assert events == joined(read(format, other, opened=opened, whole=whole))
    arguments = {e[1]: e[2] for e in events if e[0] == "tool_arguments"}
    ends = {e[1]: e[2] for e in events if e[0] == "tool_end"}
    started = [e[1] for e in events if e[0] == "tool_start"]
    assert started == list(ends) and (not whole or not any(ends.values()))
    if not started and not opened and not text.lstrip().startswith(("<think>", "[THINK]")):
        assert "".join(e[2] for e in events) == text  # nothing is lost
    for index, end in ends.items():
        if not end:
            assert isinstance(json.loads(arguments[index]), dict)


KEYS = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.integers(1, 9))
def test_arguments_arrive_as_they_were_written(arguments: dict[str, Any], size: int) -> None:
    call = json.dumps({"name": "now", "arguments": arguments}, ensure_ascii=False)
    literals = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    texts = {HERMES: f"<tool_call>\n{call}\n</tool_call>", MISTRAL: f"[TOOL_CALLS][{call}]", LLAMA3: call, PYTHONIC: f"[now({literals})]"}
    for format, text in texts.items():
        events = read(format, [text[i : i + size] for i in range(0, len(text), size)])
        assert [(e.kind, e.broken) for e in events if e.kind != "tool_arguments"] == [("tool_start", False), ("tool_end", False)]
        assert json.loads("".join(e.text for e in events)) == arguments


PLACE = '{"city": "Paris", "days": 12, "places": [1, {"a": "b"}]}'
CALLS = {
    "hermes": (HERMES, f'Hi.\n<tool_call>\n{{"name": "get_weather", "arguments": {PLACE}}}\n</tool_call>', "Hi."),
    "hermes, arguments first": (HERMES, f'<tool_call>{{"arguments": {PLACE}, "name": "get_weather"}}</tool_call>', ""),
    "hermes, as a text": (HERMES, f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(PLACE)}}}</tool_call>', ""),
    "hermes, two": (HERMES, '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "now", "arguments": {"x": [1]}}</tool_call>', ""),
    "llama3": (LLAMA3, f'{{"name": "get_weather", "parameters": {PLACE}}}; {{"name": "now", "parameters": {{}}}}', ""),
    "llama3 with its mark": (LLAMA3, f'Hm. <|python_tag|>{{"name": "get_weather", "parameters": {PLACE}}}', "Hm."),
    "mistral": (MISTRAL, f'Hm. [TOOL_CALLS][{{"name": "get_weather", "arguments": {PLACE}}}, {{"name": "now", "arguments": {{}}}}]', "Hm."),
    "mistral, named": (MISTRAL, f"[TOOL_CALLS]get_weather[ARGS]{PLACE}[TOOL_CALLS]now[ARGS]{{}}", ""),
    "qwen_xml": (XML, "Hi.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n12\n"
                 "</parameter>\n</function>\n</tool_call>", "Hi."),
    "pythonic": (PYTHONIC, "[get_weather(city='Paris', days=12, places=[1, {'a': 'b'}]), now()]", ""),
    "pythonic with marks": (LLAMA4, "Hm. <|python_start|>[get_weather(city='Paris'), now()]<|python_end|>", "Hm."),
}  # fmt: skip


def cut_read(format: Format, pieces: list[str], whole: bool) -> list[tuple[str, ...]]:
    parser = StreamParser(format, TOOLS, whole=whole)
    return joined([event for piece in pieces for event in parser.add(piece)] + parser.finish(cut=True))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_cut_by_max_tokens_is_a_call_at_every_character(name: str) -> None:
    """With the arguments so far, which grow to those of the whole call; no text of it is content, whole or streamed."""
    format, text, before = CALLS[name]
    complete = [e[2] for e in cut_read(format, [text], False) if e[0] == "tool_arguments"]
    start = len(before) + 1 + (6 if format.bare and not before else 3)  # a shorter beginning may be anything else
    longest = 0
    for end in range(start, len(text) + 1):
        events = cut_read(format, [text[:end]], False)
        assert cut_read(format, list(text[:end]), False) == cut_read(format, list(text[:end]), True) == events, text[:end]
        content = "".join(e[2] for e in events if e[0] == "content")
        if '"na' not in text[end - 3 : end] and (not format.bare or before or end > len('{"name"')):
            assert content.strip() in (before, before[: len(content)]), (text[:end], content)
        for arguments, expected in zip((e[2] for e in events if e[0] == "tool_arguments"), complete):
            assert expected.startswith(arguments), text[:end]
        longest = max(longest, sum(len(e[2]) for e in events if e[0] == "tool_arguments"))
        assert [e[0] for e in events].count("tool_start") == [e[0] for e in events].count("tool_end")
    assert longest == sum(map(len, complete)) > 0


def test_a_cut_call_with_a_known_name_has_no_arguments_yet() -> None:
    for format, text in ((HERMES, '<tool_call>{"name": "get_weather", "argu'), (LLAMA3, '{"name": "get_weather"')):
        for whole in (False, True):
            assert cut_read(format, list(text), whole) == [("tool_start", "0", "get_weather"), ("tool_end", "0", "broken")]


@pytest.mark.parametrize(
    "text",
    ['{"answer": {"name": "now"', "a < b", '{"name": "Ann"', "[1, 2", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x'],
)
def test_what_is_no_call_stays_content_when_it_is_cut(text: str) -> None:
    for format in (HERMES, LLAMA3, PYTHONIC):
        for whole in (False, True):
            assert "".join(e[2] for e in cut_read(format, list(text), whole) if e[0] == "content") == text


HOSTILE = {
    "hermes": (HERMES, '<tool_call>{"name": "now", "arguments": %s}</tool_call>'),
    "llama3": (LLAMA3, '{"name": "now", "parameters": %s}'),
    "mistral": (MISTRAL, "[TOOL_CALLS]now[ARGS]%s"),
    "qwen_xml": (XML, "<tool_call><function=get_weather><parameter=places>%s</parameter></function></tool_call>"),
    "pythonic": (PYTHONIC, "[now(x=%s)]"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "value",
    ['{"a":' * 5_000 + "1" + "}" * 5_000, "[" * 50_000, "-" * 5_000 + "1", '"' + "\\\\" * 5_000],
    ids=["deep", "open", "signs", "escapes"],
)
def test_hostile_arguments_never_raise(name: str, value: str) -> None:
    format, call = HOSTILE[name]
    for whole in (False, True):
        for cut in (False, True):
            parser = StreamParser(format, TOOLS, whole=whole)
            events = [*parser.add(call % value), *parser.finish(cut)]
            assert events and sum(len(event.text) for event in events) <= 12 * len(call % value)
