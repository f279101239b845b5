"""What one rendering of a chat template may use: steps, sizes of values and of the output, and processor time.

A template is a program from a stranger, and jinja2's sandbox bounds neither its time nor its memory. Here every value that a template makes
is weighed before it can be used: its weight is the length of all that it holds, where something held twice counts twice. So nothing that
walks through a value (printing, comparing, hashing) takes longer than its weight, and shared parts cannot make values grow exponentially.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MAX_SECONDS = 5.0  # of processor time: waiting for other threads does not count
LOOP_SECONDS = 0.02  # on an event loop; what takes longer is rendered again in a thread
MAX_STEPS = 1_000_000  # iterations, calls, filters and outputs; a conversation of 1,000 messages takes about 20,000
MAX_OUTPUT = 8 << 20  # characters
MAX_WEIGHT = 8 << 20  # characters of a text, or of all that a list holds
MAX_CREATED = 256 << 20  # bytes of all values together, what they hold not included
MAX_REPEATED = 1 << 20  # characters or items by the operator `*`, a width or a fill
MAX_PARTS = 1 << 19  # items that one call makes from one text
MAX_BITS = 16_384  # of an integer
_CONTAINER, _ITEM = 256, 8  # the weight of a list or mapping, and of an item, next to what they hold
_STEPS_BETWEEN_CLOCKS = 256


class RefusalError(Exception):
    """The error of a template that called raise_exception."""


class LimitError(Exception):
    """A template that needs more than its budget."""


class SlowTemplateError(LimitError):
    """A template that needs more processor time."""


class Allowance:
    """Processor time of this thread from now on, for all renderings that share it."""

    def __init__(self, seconds: float, outer: Allowance | None = None):
        """`outer`: an allowance that this one is a part of."""
        self.seconds: float = seconds if outer is None else min(seconds, outer.seconds)
        end = time.thread_time() + seconds
        self._end: float = end if outer is None else min(end, outer._end)

    def check(self) -> None:
        if time.thread_time() > self._end:
            raise SlowTemplateError(f"it takes more than {self.seconds:g} seconds")


class Budget:
    """The budget of one rendering. Belongs to one thread."""

    def __init__(self, allowance: Allowance | None = None):
        self._allowance = allowance or Allowance(MAX_SECONDS)
        self._steps = self._created = self._output = 0
        self._weights: dict[int, tuple[object, int]] = {}  # of lists and mappings, which cannot change; held, so that no id comes twice

    def step(self, count: int = 1) -> None:
        before = self._steps // _STEPS_BETWEEN_CLOCKS
        self._steps += count
        if self._steps > MAX_STEPS:
            raise LimitError(f"it takes more than {MAX_STEPS} steps")
        if self._steps // _STEPS_BETWEEN_CLOCKS != before:
            self.check_clock()

    def check_clock(self) -> None:
        self._allowance.check()

    def spend_output(self, characters: int) -> None:
        self._output += characters
        if self._output > MAX_OUTPUT:
            raise LimitError(f"its output has more than {MAX_OUTPUT} characters")

    def made(self, value: Any) -> Any:
        """A value that the template has made, once it is known to be within the limits."""
        self.step()
        weight = self.weigh(value)
        self._created += weight if isinstance(value, (str, bytes)) else _CONTAINER + _ITEM * len(value) if isinstance(value, Sized) else 8
        if self._created > MAX_CREATED:
            raise LimitError(f"it makes values of more than {MAX_CREATED} bytes in total")
        return value

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value

    def weigh(self, value: object) -> int:
        """Characters of a text, and of all that a list, tuple, set or mapping holds. LimitError beyond MAX_WEIGHT."""
        if isinstance(value, (str, bytes)):
            weight = len(value)
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise LimitError(f"an integer has more than {MAX_BITS} bits")
            return 8
        elif isinstance(value, (list, tuple, set, frozenset, Mapping, _ITEMS, _VALUES, _KEYS)):
            return self._weigh_all(value)
        else:
            return 8
        if weight > MAX_WEIGHT:
            raise LimitError(f"a text has {weight} characters, more than {MAX_WEIGHT}")
        return weight

    def weigh_each(self, values: Iterable[object]) -> int:
        """The weight of several values. No list of them is remembered, unlike that of `weigh`."""
        return sum(map(self.weigh, values))

    def _weigh_all(self, values: Any) -> int:
        known = self._weights.get(id(values))
        if known is not None:
            return known[1]
        weight = _CONTAINER
        pairs: Iterable[Any] = values.items() if isinstance(values, Mapping) else values
        for index, value in enumerate(pairs):
            if isinstance(values, Mapping):
                key, value = value
                weight += self.weigh(key)
            weight += _ITEM + self.weigh(value)
            if weight > MAX_WEIGHT:
                raise LimitError(f"a {type(values).__name__} holds more than {MAX_WEIGHT} characters")
            if index % 4096 == 4095:
                self.check_clock()
        self._weights[id(values)] = values, weight
        return weight


_EMPTY: dict[str, str] = {}
_KEYS, _VALUES, _ITEMS = type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items())
_CURRENT: ContextVar[Budget] = ContextVar("template budget")
_ALLOWANCE: ContextVar[Allowance | None] = ContextVar("template seconds", default=None)


def current() -> Budget:
    """The budget of the rendering that runs in this thread."""
    return _CURRENT.get()


@contextmanager
def rendering() -> Iterator[Budget]:
    """A template runs in this block, at the expense of a new budget; its processor time is that of `at_most`, if there is one."""
    token = _CURRENT.set(Budget(_ALLOWANCE.get()))
    try:
        yield _CURRENT.get()
    finally:
        _CURRENT.reset(token)


def limited() -> bool:
    """Whether renderings have less time than usual: then nothing is compiled, either."""
    allowance = _ALLOWANCE.get()
    return allowance is not None and allowance.seconds < MAX_SECONDS


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Renderings in this block have this processor time together, as on an event loop. A block within such a block adds none.

    No argument of render_chat: clients name its variables.
    """
    token = _ALLOWANCE.set(Allowance(seconds, _ALLOWANCE.get()))
    try:
        yield
    finally:
        _ALLOWANCE.reset(token)
