"""Answers in harmony, the format of gpt-oss: messages with a header, which names a channel and perhaps the function that is called.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|channel|>final<|message|>content<|return|>

Analysis is reasoning, a message to a function a call; other commentary and the channel final are content. The prompt has the first
message's start. Text without a header is content.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Protocol

from tinyvllm.text.parsing.dialects import Parser
from tinyvllm.text.parsing.formats import CHANNEL, ENDS, MESSAGE, START
from tinyvllm.text.parsing.json_text import read_value
from tinyvllm.text.parsing.source import MismatchError, Reading, Source, Write, partial_mark

_MAX_HEADER = 512  # characters; a longer text is none
_HEADS = (START, CHANNEL, " to=")  # how a header begins
_BODY_END = re.compile("|".join(map(re.escape, (*ENDS, START))))
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class MessageParser(Parser, Protocol):
    """The part of a StreamParser that reads messages."""

    def knows(self, tool: str) -> bool: ...
    def write_content(self, text: str) -> None: ...
    def write_reasoning(self, text: str) -> None: ...


def read_messages(parser: MessageParser, opened: bool) -> Reading[None]:
    """The whole answer. `opened`: it begins inside a message of reasoning."""
    source = parser.source
    if opened:
        yield from _read_body(source, parser.write_reasoning)
    written: set[bool] = set()  # of the kinds reasoning and content
    while True:
        header = yield from _read_header(source)
        if header is None and source.ended and source.text.startswith(_HEADS, source.at):
            source.at = len(source.text)  # cut off inside a header
        if source.ended and source.at == len(source.text):
            return
        if header is None and source.text.startswith(START, source.at):  # too long to be one
            source.at += len(START)
        name, calls = _RECIPIENT.search(header or ""), parser.calls
        if name is not None and parser.knows(name[1]):
            yield from parser.attempt(partial(_read_call, parser, name[1]))
        if parser.calls > calls:  # perhaps a broken one
            yield from _read_body(source, _discard)
            continue
        reasoning = _ANALYSIS.search(header or "") is not None
        write = parser.write_reasoning if reasoning else parser.write_content
        if reasoning in written:
            write("\n")
        written.add(reasoning)
        yield from _read_body(source, write)


def _read_header(source: Source) -> Reading[str | None]:
    """The text before the mark of a message; None if no header follows."""
    while True:
        text = source.text[source.at : source.at + _MAX_HEADER]
        if not any(text.startswith(head) or head.startswith(text) for head in _HEADS):
            return None
        end = text.find(MESSAGE)
        if end >= 0:
            source.at += end + len(MESSAGE)
            return text[:end]
        if source.ended or len(text) == _MAX_HEADER:
            return None
        yield


def _read_body(source: Source, write: Write) -> Reading[None]:
    """Write the text up to the end of a message as it arrives, and read the end; not the start of another."""
    while (found := _BODY_END.search(source.text, source.at)) is None:
        held = 0 if source.ended else max(partial_mark(source.text, source.at, mark) for mark in (*ENDS, START))
        write(source.text[source.at : len(source.text) - held])
        source.at = len(source.text) - held
        if source.ended:
            return
        yield
    write(source.text[source.at : found.start()])
    source.at = found.start() if found.group() == START else found.end()


def _read_call(parser: MessageParser, name: str) -> Reading[None]:
    """The arguments of a call, perhaps none, up to the end of the message."""
    source = parser.source
    parser.name_call(name)
    yield from source.spaces()
    first = yield from source.peek()
    if first not in ("{", "<"):
        raise MismatchError
    parser.start_call(name)
    if first == "{":
        yield from read_value(source, parser.write_arguments)
    else:
        parser.write_arguments("{}")
    parser.end_call()


def _discard(text: str) -> None:
    """The writer of what follows the arguments."""
