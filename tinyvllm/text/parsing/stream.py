"""Splits a model's output into content, reasoning, tool calls and their arguments while it streams.

A text is a call once its head has been read: a known name and the brace that opens the arguments. Until then nothing is emitted, and text
that turns out to be no call is content. After that, arguments are emitted as they arrive; a call that breaks off later can only be
marked as broken. With `whole`, a call is emitted only when it is complete. Where max_tokens has cut the answer inside a call, the call is
emitted as far as it is known, marked as broken, and none of its text is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.text.parsing.dialects import READERS
from tinyvllm.text.parsing.formats import Format
from tinyvllm.text.parsing.harmony import read_messages
from tinyvllm.text.parsing.source import MismatchError, Reading, Source, partial_mark
from tinyvllm.text.parsing.tools import Tool, read_tools

_MIN_PARTIAL_MARK = 3  # characters of a mark that max_tokens has cut; fewer, such as a lone "<", are content
# a call that starts without a mark, cut before the end of its name
_CUT_HEADS = {"{": re.compile(r'\s*\{\s*"name"\s*:\s*(?:"([^"\\]*))?'), "[": re.compile(r"\s*\[\s*([\w.\-]+)")}


@dataclass(frozen=True, slots=True)
class Event:
    """A part of an answer.

    kind: "content" and "reasoning" have a text; "tool_start" an index, an id and a name; "tool_arguments" an index and the next piece
    of the arguments' JSON text; "tool_end" an index, and `broken` if the call breaks off; its arguments are then a prefix of JSON.
    """

    kind: str
    text: str = ""
    index: int = -1
    id: str = ""
    name: str = ""
    broken: bool = False


class StreamParser:
    """Parses one answer.

    tools      OpenAI's list, or None if no tool may be called (tool_choice "none"): then no text is a call
    reasoning  whether to separate reasoning; if not, its marks stay in the content
    opened     the prompt ended with the opening mark of reasoning (Format.opened)
    whole      emit a call only if it is complete and valid; otherwise it is content
    """

    def __init__(
        self,
        format: Format,
        tools: Sequence[Mapping[str, Any]] | None,
        reasoning: bool = True,
        *,
        opened: bool = False,
        whole: bool = False,
    ):
        self.calls = 0  # number started
        self.tools: dict[str, Tool] = read_tools(tools)
        self.format = format
        self.source = Source()
        self._whole = whole
        self._opened = opened
        self._think = format.think if reasoning else None
        self._read_call = READERS[format.name] if self.tools and format.name in READERS else None
        self._marks = format.marks if self._read_call else ()
        self._pattern = re.compile("|".join(map(re.escape, self._marks))) if self._marks else None
        self._events: list[Event] = []
        self._held: list[Event] = []  # of an incomplete call
        self._committed = False  # a call has started and not ended
        self._name: str | None = None  # of a call that has been named and not started
        self._marked = False  # a mark precedes the call that is being read
        self._cut = False  # max_tokens has ended the text
        self._trailing = _TrailingSpaces()  # of the content
        self._no_content = True  # since the start or the last call
        self._reading = self._read()
        next(self._reading)

    def add(self, text: str) -> list[Event]:
        """The events of the next piece of the answer."""
        self.source.add(text)
        return self._run()

    def finish(self, cut: bool = False) -> list[Event]:
        """The events of the text held back, after the last piece. cut: max_tokens has ended the answer, maybe inside a call."""
        self.source.ended, self._cut = True, cut
        return self._run()

    def knows(self, tool: str) -> bool:
        """For readers: whether there is a tool of this name."""
        return tool in self.tools

    def write_content(self, text: str) -> None:
        """For readers of whole answers."""
        self._no_content = self._no_content and not text
        self._events.append(Event("content", text))

    def write_reasoning(self, text: str) -> None:
        """For readers of whole answers; content if reasoning is not separated."""
        self._events.append(Event("reasoning" if self._think is not None else "content", text))

    def name_call(self, name: str) -> None:
        """For readers: the name of the call that is being read is known, its arguments are not."""
        self._name = name if name in self.tools else None

    def start_call(self, name: str) -> Tool:
        """For readers: the arguments of this tool follow. MismatchError if there is no such tool."""
        if name not in self.tools:
            raise MismatchError
        if not self._whole:
            self.source.pinned = False
        self._committed, self._trailing, self._name = True, _TrailingSpaces(), None
        self._held.append(Event("tool_start", index=self.calls, id=self.format.new_id(), name=name))
        return self.tools[name]

    def write_arguments(self, text: str) -> None:
        self._held.append(Event("tool_arguments", text, self.calls))

    def end_call(self) -> None:
        self._end(broken=False)

    def _end(self, broken: bool) -> None:
        self._events += [*self._held, Event("tool_end", index=self.calls, broken=broken)]
        self._held = []
        self.calls += 1
        self._committed, self._no_content, self._name = False, True, None

    def attempt(self, reader: Callable[[], Reading[None]]) -> Reading[bool]:
        """Whether the text matches `reader`. If not, nothing has been read, unless a call broke off after its head."""
        start, self.source.pinned = self.source.at, True
        trailing, was_open = self._trailing, not self.source.ended
        try:
            yield from reader()
            return True
        except MismatchError:
            if self._cut and was_open and self._is_call_so_far(start):
                self._end_cut_call()
            elif self._committed and not self._whole:
                self._end(broken=True)
                if self.source.ended:  # it is valid but cut off: the rest of it is not content
                    self.source.at = len(self.source.text)
            else:
                self.source.at, self._held, self._committed, self._trailing, self._name = start, [], False, trailing, None
            return False
        finally:
            self.source.pinned = False

    def _is_call_so_far(self, start: int) -> bool:
        """Whether the text from `start` on, which max_tokens has cut, is the beginning of a call."""
        if self._committed or self._name is not None or self._marked or (self.calls and self._no_content):
            return True
        head = _CUT_HEADS[self.format.bare].fullmatch(self.source.text, start) if self.format.bare in _CUT_HEADS else None
        return head is not None and any(name.startswith(head[1] or "") for name in self.tools)

    def _end_cut_call(self) -> None:
        """End the call that max_tokens has cut, with the arguments so far; the rest of the text is no content."""
        if not self._committed and self._name is not None:
            self.start_call(self._name)
        if self._committed:
            self._end(broken=True)
        self._held = []
        self.source.at = len(self.source.text)

    def _run(self) -> list[Event]:
        try:
            next(self._reading)
        except StopIteration:
            pass
        if not self._whole:
            self._events += self._held
            self._held = []
        events, self._events = self._events, []
        return _merged(events)

    def _read(self) -> Reading[None]:
        yield  # the first piece has not arrived
        if self.format.name == "harmony":
            yield from read_messages(self, self._opened and self._think is not None)
            return
        if self._think is not None:
            yield from self._read_reasoning(*self._think)
        while True:
            if self._read_call is not None and self._no_content and self.format.bare:
                yield from self._read_bare()
            if not (yield from self._read_content()):
                return

    def _read_reasoning(self, start: str, end: str) -> Reading[None]:
        """Reasoning at the start, if there is any, without the spaces around it."""

        def mark() -> Reading[None]:
            yield from self.source.spaces()
            yield from self.source.expect(start)

        marked = yield from self.attempt(mark)  # also if the prompt has it already: some models repeat it
        if not marked and not self._opened:
            return
        yield from self.source.spaces()
        trailing = _TrailingSpaces()

        def write(text: str) -> None:
            if shown := trailing.add(text):
                self._events.append(Event("reasoning", shown))

        try:
            yield from self.source.until(end, write)
        except MismatchError:  # the answer ended inside the reasoning
            write(self.source.text[self.source.at :])
            self.source.at = len(self.source.text)
            return
        yield from self.source.spaces()

    def _read_bare(self) -> Reading[None]:
        """Calls that start without a mark, if there are any."""
        assert self._read_call is not None
        while (yield from self.attempt(partial(self._read_call, self))):
            pass

    def _read_content(self) -> Reading[bool]:
        """Content up to the next mark, and the calls after it; False at the end of the text."""
        while (found := self._next_mark()) is None:
            self._emit_content(self._content_end())
            if self.source.ended:
                after_call = self._no_content and self.calls
                if not after_call:
                    self._events.append(Event("content", self._trailing.rest()))
                return False
            yield
        self._emit_content(found.start())
        calls = self.calls
        assert self._read_call is not None
        self._marked = True
        matched = yield from self.attempt(partial(self._read_call, self))
        self._marked = False
        if not matched and self.calls == calls and self.source.at < len(self.source.text):
            self._emit_content(self.source.at + len(found.group()))
        return True

    def _next_mark(self) -> re.Match[str] | None:
        return self._pattern.search(self.source.text, self.source.at) if self._pattern else None

    def _content_end(self) -> int:
        """The end of the text that cannot be the start of a mark."""
        text, at = self.source.text, self.source.at
        held = max((partial_mark(text, at, mark) for mark in self._marks), default=0)
        after_call = self.calls > 0 and self._no_content
        if self.source.ended and not (self._cut and (after_call or held >= _MIN_PARTIAL_MARK)):
            held = 0
        return len(text) - held

    def _emit_content(self, end: int) -> None:
        text = self.source.text[self.source.at : end]
        self.source.at = end
        shown = self._trailing.add(text) if self._read_call is not None else text
        if shown:
            self._no_content = False
            self._events.append(Event("content", shown))


class _TrailingSpaces:
    """Holds back spaces at the end of a text: they are emitted if text follows, and dropped before a call or the end."""

    def __init__(self) -> None:
        self._spaces: list[str] = []

    def add(self, text: str) -> str:
        """The text to emit now."""
        stripped = text.rstrip()
        spaces, self._spaces = self._spaces, [text[len(stripped) :]]
        if stripped:
            return "".join([*spaces, stripped])
        self._spaces = spaces
        if text:
            spaces.append(text)
        return ""

    def rest(self) -> str:
        return "".join(self._spaces)


def _merged(events: list[Event]) -> list[Event]:
    """The events with adjacent ones of the same kind and call merged."""
    merged: list[Event] = []
    for event in events:
        if event.text and merged and merged[-1].kind == event.kind and merged[-1].index == event.index:
            merged[-1] = replace(merged[-1], text=merged[-1].text + event.text)
        elif event.text or event.kind in ("tool_start", "tool_end"):
            merged.append(event)
    return merged
