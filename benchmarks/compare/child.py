"""The side of a contestant: a process of its own that loads one model and then does what it is told, line by line.

Standard input brings JSON lists, `["tune", test, B, T]`, `["begin", B, C]`, `["steps", N]`, `["prefill", T]`; each is answered by one
JSON line on standard output, `{"seconds": s}`, or `{"error": text}`. What the libraries print goes to standard error. This file and those
of the contestants are run by whatever interpreter has the contestant installed: the standard library and numpy are all that may be
expected of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Player(Protocol):
    """What every contestant can do. All decode greedily; a call returns when its last token is known to Python.

    A call that returns seconds has timed itself.
    """

    def begin(self, batch: int, context: int) -> None:
        """Forget everything; then `batch` sequences of `context` tokens each, ready for the next."""

    def steps(self, count: int) -> float | None:
        """Each of the sequences `count` tokens further."""

    def prefill(self, tokens: int) -> float | None:
        """Forget everything; then one prompt of `tokens`, up to its first answer's token."""


class Tunable(Player, Protocol):
    """A contestant that has settings to choose among."""

    def tune(self, test: str, batch: int, tokens: int) -> str:
        """Keep the fastest settings for a test, and name them."""


class Unable(Exception):
    """This contestant does not do that at all (batches, say): no figure, no error."""


def options() -> argparse.Namespace:
    """What every contestant is told when it starts: where its weights lie and how much it will have to hold at most."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence at most")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt at a time")
    parser.add_argument("--engine", type=json.loads, default={}, help="more options of tinyvllm's engine")
    return parser.parse_args()


def prompt(tokens: int, sequence: int = 0) -> list[int]:
    """Token ids that every vocabulary of the shapes has; each sequence has its own, so that nothing can be shared."""
    return [3 + (7 * i + 31 * sequence + i * i % 13) % 1000 for i in range(tokens)]


def serve(load: Callable[[argparse.Namespace], Player]) -> None:
    """Load, say so, and answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = time.perf_counter()
    try:
        player = load(options())
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=answers)
        return
    print(json.dumps({"seconds": time.perf_counter() - start}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_answer(player, *json.loads(line))), file=answers)


def _answer(player: Player, what: str, *arguments: int | str) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        if what == "tune" and not hasattr(player, "tune"):
            return {"seconds": 0.0}
        result = getattr(player, what)(*arguments)
    except Unable as error:
        return {"unable": str(error)}
    except Exception as error:  # the parent reports it with the others' figures
        return {"error": f"{type(error).__name__}: {error}"}
    if isinstance(result, float):
        return {"seconds": result}
    return {"seconds": time.perf_counter() - start} | ({"settings": result} if result is not None else {})
