"""Every text that a grammar accepts parses as calls that its tools allow: random walks through the grammars of all dialects."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tinyvllm.errors import RequestError
from tinyvllm.text.parsing import Format, StreamParser, grammar_for, parser_for

llguidance = pytest.importorskip("llguidance")

END = 256
SPECIAL = {"[TOOL_CALLS]": 257, "[ARGS]": 258, "<tool_call>": 259, "</tool_call>": 260}
TEXTS = [bytes([i]) for i in range(256)] + [b"<end>", *(s.encode() for s in SPECIAL), b'{"name": "', b"</function>"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "hourly": {"type": "boolean"},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "at"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}},
}
ENDS = (b"</parameter>", b'"', b"}", b"]", b")")  # of a part without a maximum length
LEADS = [*map(list, ENDS)]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}, {"type": "function", "function": {"name": "now"}}]
FORMATS = {
    "hermes": parser_for("<tool_call>"),
    "hermes-special": parser_for("<tool_call>", {name: SPECIAL[name] for name in ("<tool_call>", "</tool_call>")}),
    "llama3": parser_for("tools <|python_tag|>"),
    "mistral": parser_for("[TOOL_CALLS]", {"[TOOL_CALLS]": 257}),
    "mistral-text": parser_for("[TOOL_CALLS][ARGS]"),
    "mistral-args": parser_for("[TOOL_CALLS][ARGS]", {name: SPECIAL[name] for name in ("[TOOL_CALLS]", "[ARGS]")}),
    "qwen_xml": parser_for("<function= <parameter= <tool_call>"),
    "pythonic": parser_for("tools [func(a=b)]"),
    "pythonic-marks": parser_for("tools <|python_start|>"),
    "harmony": parser_for("<|channel|><|message|>"),
    "none": parser_for("x").forced(),
}


class Vocabulary:
    """Bytes, some special tokens, and two tokens that cross boundaries between the parts of the grammars."""

    eos_token_id, bos_token_id = END, None
    special_token_ids = list(range(END, END + 5))
    tokens = [b"\xff" + text if i in range(END, END + 5) else text for i, text in enumerate(TEXTS)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from llguidance._tokenizer import TokenizerWrapper

    return llguidance.LLTokenizer(TokenizerWrapper(Vocabulary()))


def walk(tokenizer: Any, grammar: str, seed: int) -> str:
    """A random text of the grammar. After a while, free texts and lists are steered to their end."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    choice, mask, text = random.Random(seed), allocate_token_bitmask(1, len(TEXTS)), b""
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for step in range(4000):
        fill_next_token_bitmask(matcher, mask)
        allowed = [i for i in range(len(TEXTS)) if mask[0, i // 32] >> (i % 32) & 1]
        if END in allowed and (step > 40 or len(allowed) == 1):
            return text.decode("utf-8", "replace")
        leads = [lead for lead in LEADS if step > 40 and matcher.validate_tokens(lead) == len(lead)]
        letters = [i for i in allowed if 32 <= i < 127 or i > END]
        for token in choice.choice(leads) if leads else [choice.choice(letters or allowed)]:
            if token == END:
                return text.decode("utf-8", "replace")
            assert matcher.consume_token(token), matcher.get_error()
            text += TEXTS[token]
    raise AssertionError(f"the walk found no end: {text[-200:]!r}")


def parsed_calls(format: Format, text: str) -> list[tuple[str, dict[str, Any]]]:
    calls: dict[int, list[str]] = {}
    parser = StreamParser(format, TOOLS, whole=True)
    for event in parser.add(text) + parser.finish():
        assert event.kind != "content" and not event.broken, (text, event)
        if event.kind == "tool_start":
            calls[event.index] = [event.name, ""]
        elif event.kind == "tool_arguments":
            calls[event.index][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("named", "parallel"), [(None, True), (None, False), ("weather", True), ("now", True)])
def test_accepted_texts_parse_as_allowed_calls(tokenizer: Any, name: str, named: str | None, parallel: bool) -> None:
    format = FORMATS[name]
    grammar = grammar_for(format, TOOLS, named, parallel)
    counts = set()
    for seed in range(6):
        calls = parsed_calls(format, walk(tokenizer, grammar, seed))
        counts.add(len(calls))
        for tool, arguments in calls:
            assert tool == named or (named is None and tool in ("weather", "now"))
            if tool == "now":
                assert arguments == {}
            else:
                assert {"city", "at"} <= set(arguments) <= {"city", "days", "unit", "hourly", "at"} and isinstance(arguments["city"], str)
                assert arguments.get("days", 0) in range(100) and arguments.get("unit", "C") in ("C", "F")
                assert arguments.get("hourly", True) in (True, False) and all(type(i) is int for i in arguments["at"])
    assert counts == {1} if named or not parallel else min(counts) >= 1


def matches(tokenizer: Any, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("unit", ["C", None])
@pytest.mark.parametrize("hourly", [True, None])
@pytest.mark.parametrize("city", ["Paris", None])
def test_only_optional_arguments_may_be_left_out(tokenizer: Any, unit: str | None, hourly: bool | None, city: str | None) -> None:
    given = {name: value for name, value in (("city", city), ("unit", unit), ("hourly", hourly), ("at", [3])) if value is not None}
    xml = "".join(f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in given.items())
    literals = ", ".join(f"{k}={json.dumps(v) if isinstance(v, str) else v}" for k, v in given.items()).replace('"C"', "'C'")
    call = json.dumps({"name": "weather", "arguments": given})
    texts = {
        "qwen_xml": f"<tool_call>\n<function=weather>\n{xml}</function>\n</tool_call>",
        "pythonic": f"[weather({literals})]",
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "llama3": call.replace("arguments", "parameters"),
        "mistral-text": f"[TOOL_CALLS]weather[ARGS]{json.dumps(given)}",
    }
    for name, text in texts.items():
        assert matches(tokenizer, grammar_for(FORMATS[name], TOOLS, "weather"), text) == (city is not None), text


def test_no_text_around_a_call(tokenizer: Any) -> None:
    grammar, call = grammar_for(FORMATS["hermes"], TOOLS, "now"), '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert matches(tokenizer, grammar, call)
    for text in ("so " + call, "<think>so</think>" + call, call + " so"):
        assert not matches(tokenizer, grammar, text)


def test_refusals() -> None:
    with pytest.raises(RequestError, match="'later', which is not one of the tools \\(weather, now\\)"):
        grammar_for(FORMATS["hermes"], TOOLS, "later")
    with pytest.raises(RequestError, match="no tools"):
        grammar_for(FORMATS["hermes"], [])
    with pytest.raises(RequestError, match="'none'"):
        grammar_for(parser_for("x"), TOOLS)
