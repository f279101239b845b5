"""What a model writes, told apart while it comes: content, reasoning, tool calls and their arguments.

Where it is decided that a text is a call: at its head, a known name and the brace that opens the arguments. Until there nothing is given
out, and what turns out to be no call is content. From there on arguments are given out as they come; a call that breaks off then can
only be marked as broken. With `whole` nothing of a call is given out before all of it is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tinyvllm.text.parsing.dialects import READERS
from tinyvllm.text.parsing.formats import Format
from tinyvllm.text.parsing.source import NotThisError, Reading, Source, begun
from tinyvllm.text.parsing.tools import Tool, read_tools


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of an answer.

    kind: "content" and "reasoning" have a text; "tool_start" an index, an id and a name; "tool_arguments" an index and the next piece
    of the arguments' JSON text; "tool_end" an index, and `broken` where the call breaks off, its arguments then being a prefix of JSON.
    """

    kind: str
    text: str = ""
    index: int = -1
    id: str = ""
    name: str = ""
    broken: bool = False


class StreamParser:
    """One answer. tools: OpenAI's list, or None where none may be called (tool_choice "none"): then no text is a call.

    reasoning: whether reasoning is told apart; if not, its marks stay in the content. opened: the prompt ended with the opening mark
    (Format.opened). whole: a call is given out only when all of it is there and valid, and is content otherwise.
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
        self.calls = 0  # that have been started
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
        self._held: list[Event] = []  # of a call that is not whole yet
        self._committed = False  # a call has been started and not ended
        self._solid = _Solid()  # of the content
        self._fresh = True  # no content since the beginning, or since a call
        self._reading = self._read()
        next(self._reading)

    def add(self, text: str) -> list[Event]:
        """The events of the next piece of the answer."""
        self.source.add(text)
        return self._run()

    def finish(self) -> list[Event]:
        """The events of what was held back, after the last piece."""
        self.source.ended = True
        return self._run()

    def start_call(self, name: str) -> Tool:
        """For readers: what follows are the arguments of this tool. NotThisError if there is no such tool."""
        if name not in self.tools:
            raise NotThisError
        if not self._whole:
            self.source.pinned = False
        self._committed, self._solid = True, _Solid()
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
        self._committed, self._fresh = False, True

    def attempt(self, reader: Callable[[], Reading[None]]) -> Reading[bool]:
        """Whether the text goes on as `reader` wants. If it does not, nothing has been read, unless a call broke off after its head."""
        start, self.source.pinned = self.source.at, True
        solid = self._solid
        try:
            yield from reader()
            return True
        except NotThisError:
            if self._committed and not self._whole:
                self._end(broken=True)
                if self.source.ended:  # it did not go wrong, it was cut off: what is left of it is no content
                    self.source.at = len(self.source.text)
            else:
                self.source.at, self._held, self._committed, self._solid = start, [], False, solid
            return False
        finally:
            self.source.pinned = False

    def _run(self) -> list[Event]:
        try:
            next(self._reading)
        except StopIteration:
            pass
        if not self._whole:
            self._events += self._held
            self._held = []
        events, self._events = self._events, []
        return _joined(events)

    def _read(self) -> Reading[None]:
        yield  # the first piece has not come
        if self._think is not None:
            yield from self._read_reasoning(*self._think)
        while True:
            if self._read_call is not None and self._fresh and self.format.bare:
                yield from self._read_bare()
            if not (yield from self._read_content()):
                return

    def _read_reasoning(self, start: str, end: str) -> Reading[None]:
        """The reasoning at the beginning, if there is some, without the spaces around it."""

        def mark() -> Reading[None]:
            yield from self.source.spaces()
            yield from self.source.expect(start)

        marked = yield from self.attempt(mark)  # also where the prompt had it already: some models say it again
        if not marked and not self._opened:
            return
        yield from self.source.spaces()
        solid = _Solid()

        def write(text: str) -> None:
            if shown := solid.add(text):
                self._events.append(Event("reasoning", shown))

        try:
            yield from self.source.until(end, write)
        except NotThisError:  # the answer ended before the reasoning did
            write(self.source.text[self.source.at :])
            self.source.at = len(self.source.text)
            return
        yield from self.source.spaces()

    def _read_bare(self) -> Reading[None]:
        """Calls that begin without a mark, as far as there are any."""
        assert self._read_call is not None
        while (yield from self.attempt(partial(self._read_call, self))):
            pass

    def _read_content(self) -> Reading[bool]:
        """Content up to the next mark, and the calls behind it; False at the end of the text."""
        while (found := self._next_mark()) is None:
            self._pass_content(self._certain())
            if self.source.ended:
                after_call = self._fresh and self.calls
                if not after_call:
                    self._events.append(Event("content", self._solid.rest()))
                return False
            yield
        self._pass_content(found.start())
        calls = self.calls
        assert self._read_call is not None
        if not (yield from self.attempt(partial(self._read_call, self))) and self.calls == calls:
            self._pass_content(self.source.at + len(found.group()))
        return True

    def _next_mark(self) -> re.Match[str] | None:
        return self._pattern.search(self.source.text, self.source.at) if self._pattern else None

    def _certain(self) -> int:
        """Where the text ends that cannot be the beginning of a mark."""
        text, at = self.source.text, self.source.at
        return len(text) - (0 if self.source.ended else max((begun(text, at, mark) for mark in self._marks), default=0))

    def _pass_content(self, end: int) -> None:
        text = self.source.text[self.source.at : end]
        self.source.at = end
        shown = self._solid.add(text) if self._read_call is not None else text
        if shown:
            self._fresh = False
            self._events.append(Event("content", shown))


class _Solid:
    """A text whose spaces at the end are held back: given out if something follows, and dropped if a call or the end does."""

    def __init__(self) -> None:
        self._spaces: list[str] = []

    def add(self, text: str) -> str:
        """What is to be given out now."""
        solid = text.rstrip()
        spaces, self._spaces = self._spaces, [text[len(solid) :]]
        if solid:
            return "".join([*spaces, solid])
        self._spaces = spaces
        if text:
            spaces.append(text)
        return ""

    def rest(self) -> str:
        return "".join(self._spaces)


def _joined(events: list[Event]) -> list[Event]:
    """The same with fewer events: neighbours of one kind and call are one."""
    joined: list[Event] = []
    for event in events:
        if event.text and joined and joined[-1].kind == event.kind and joined[-1].index == event.index:
            joined[-1] = replace(joined[-1], text=joined[-1].text + event.text)
        elif event.text or event.kind in ("tool_start", "tool_end"):
            joined.append(event)
    return joined
