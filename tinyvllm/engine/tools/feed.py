"""Many prompts through one engine, a bounded number of them in it at a time: memory does not grow with the prompts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from tinyvllm.engine.engine import Engine
from tinyvllm.engine.frontend import submit
from tinyvllm.engine.prompt import Encoded
from tinyvllm.errors import BusyError, TinyvllmError
from tinyvllm.request import RequestOptions, RequestOutput, SamplingParams

Result = RequestOutput | TinyvllmError


def feed(
    engine: Engine,
    prompts: Iterable[tuple[int, Encoded, SamplingParams]],
    window: int,
    after_step: Callable[[], None] = lambda: None,
    options: RequestOptions | None = None,
) -> Generator[tuple[int, Result], None, None]:
    """(number, output) of every prompt as the engine computes it, finished or growing as its parameters say; or the error of its refusal.

    At most `window` prompts are in the engine at a time, and `prompts` is read as room becomes free. `after_step` may raise, to end it.
    `options` are those of all of them.
    Prompts that run when the iterator is closed are aborted.
    """
    waiting, running = iter(prompts), dict[str, int]()
    pending = next(waiting, None)
    try:
        while pending is not None or running:
            while pending is not None and len(running) < window:
                number, encoded, params = pending
                request_id = f"feed-{number}"
                try:
                    submit(engine, request_id, encoded, params, options)
                except BusyError as error:
                    if running:
                        break  # the queue is full: try again after a step
                    yield number, error
                except TinyvllmError as error:
                    yield number, error
                else:
                    running[request_id] = number
                pending = next(waiting, None)
            if not running:
                continue
            outputs = engine.step()
            engine.between_steps()
            for output in outputs:
                if output.request_id in running:
                    number = running[output.request_id]
                    if output.finished:
                        del running[output.request_id]
                    yield number, output
            after_step()
    finally:
        for request_id in running:
            engine.abort(request_id)
