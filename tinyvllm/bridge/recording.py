"""What a captured function launches, written down in the order of the program: tinygrad's scheduler sees only what tinygrad computes.

A launch of a compiled kernel becomes a call on buffers at once. Its arguments that are not yet in a buffer are computed first: tinygrad
schedules them and hands the calls over here. A function that has been recorded can be repeated in another capture by its calls alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tinygrad import Tensor, UOp
from tinygrad.engine.realize import capturing, compile_linear
from tinygrad.nn.state import get_parameters
from tinygrad.uop.ops import Ops

_failures = 0  # captures that have raised: their kernels may have been replaced by others


class Recording:
    """The calls of one capture. tinygrad adds what it has scheduled, by `add_linear`."""

    def __init__(self) -> None:
        self.calls: list[UOp] = []
        self.results: list[Tensor] = []  # of the functions that other captures contain, too

    def add_linear(self, linear: UOp, var_vals: dict[str, int]) -> None:
        """Add generated kernels, compiled."""
        self.calls += compile_linear(linear).src

    def add_launch(self, program: UOp, arguments: list[Tensor]) -> list[Tensor]:
        """Add a launch of a compiled program after what its arguments need; the arguments as they are in buffers."""
        pending = [i for i, argument in enumerate(arguments) if not argument.uop.has_buffer_identity()]
        if pending:
            for i in pending:
                if arguments[i].uop.op is not Ops.AFTER:  # which is a buffer once something has been stored into it
                    arguments[i] = arguments[i].contiguous()
            Tensor.realize(*[arguments[i] for i in pending])
        self.calls.append(program.call(*[argument.uop.base for argument in arguments]))
        return arguments


def current_recording() -> Recording | None:
    """The recording of the capture that this call is part of, if it is part of one."""
    return capturing[0] if capturing else None


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Within it, nothing is launched or computed; what would be is in the recording."""
    if capturing:
        raise RuntimeError("a capture within a capture: a captured function calls another one")
    calls = Recording()
    capturing.append(calls)
    try:
        yield calls
    finally:
        capturing.clear()


def computed(result: Any) -> Any:
    """A function's result, with every tensor in it computed into a buffer."""
    if tensors := get_parameters(result):
        Tensor.realize(*tensors)
    return result


def forget_recorded() -> None:
    """A capture has failed: functions are recorded again, as their kernels may have been replaced by others."""
    global _failures
    _failures += 1


class Recorded:
    """A function that several captures contain: the first records it, the others repeat its calls, with the result in the same buffers.

    So it must be called with the same buffers each time; its variables may be bound to other values. Outside of a capture it is called.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._calls: list[UOp] = []
        self._result: Any = None
        self._failures = -1  # `_failures` when it was recorded

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        current = current_recording()
        if current is None:
            return self._function(*arguments, **named)
        if self._failures == _failures:
            current.calls += self._calls
            current.results += get_parameters(self._result)
            return self._result
        start = len(current.calls)
        self._result = computed(self._function(*arguments, **named))
        self._calls, self._failures = current.calls[start:], _failures
        return self._result
