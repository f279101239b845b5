"""The boundary around each request: an exception in work on behalf of one request ends that request only.

Three kinds of work, three rules:

    for one request   `with boundary(request, stage):`. An exception inside ends the request with an error and frees its blocks and rows.
    for a whole step  StepRecovery in recovery.py: the sequences run again, one more at a time, until the one that fails is known.
    for observers     Observers in observer.py: a failing event of a step is logged; nothing depends on it.

An exception that leaves Engine.step all the same means that the engine's own bookkeeping is broken: it ends the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from tinyvllm.engine.output import ActiveRequest
from tinyvllm.errors import InternalError, OutOfMemoryError, TinyvllmError
from tinyvllm.host_memory import is_out_of_memory

log = logging.getLogger("tinyvllm")

EndRequest = Callable[[ActiveRequest, TinyvllmError], None]


class RequestBoundary:
    """Makes context managers: `with boundary(request, "output"):` hands an exception to `end`, as a TinyvllmError, and swallows it."""

    def __init__(self, end: EndRequest):
        self._end = end

    def __call__(self, request: ActiveRequest, stage: str) -> _Guard:
        """The boundary around work for `request`; `stage` names the work for the log and for the caller."""
        return _Guard(self._end, request, stage)


class _Guard:
    """A class, since a generator with contextlib costs four times as much and one is entered for every token."""

    __slots__ = ("_end", "_request", "_stage")

    def __init__(self, end: EndRequest, request: ActiveRequest, stage: str):
        self._end, self._request, self._stage = end, request, stage

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self._end(self._request, request_failure(self._request.request_id, self._stage, error))
        return True


def request_failure(request_id: str, stage: str, error: Exception) -> TinyvllmError:
    """The error that the caller of a request gets for an exception in `stage`; what is not a TinyvllmError is logged with its traceback.

    The text of an unexpected exception stays in the log: it may hold other requests' data.
    """
    if isinstance(error, OutOfMemoryError) or (isinstance(error, TinyvllmError) and not is_out_of_memory(error)):
        return error
    if is_out_of_memory(error):
        log.warning("request %s: out of memory in %s: %s", request_id, stage, error)
        return OutOfMemoryError(f"request {request_id}: out of memory in {stage}; try again later, or send a shorter request")
    log.error("request %s: %s failed; this request ends, the engine continues", request_id, stage, exc_info=error)
    return InternalError(
        f"request {request_id}: {type(error).__name__} in {stage}; this request has ended, the engine continues; "
        "the traceback is in the log: please report it"
    )
