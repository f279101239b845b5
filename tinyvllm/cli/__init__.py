"""The command line: `main` picks the command, and turns what went wrong into one line and an exit code.

0 done, 1 a failure, 2 bad arguments, 130 interrupted. Modules that cost time to import (tinygrad above all) are imported by the command
that needs them, after its arguments have been checked.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from tinyvllm.cli.arguments import COMMANDS, parse
from tinyvllm.errors import TinyvllmError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. `argv` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here a closed pipe is quiet, at exit it would not be
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return 0
    except Exception as error:  # noqa: BLE001  the last door: a person gets one line, --debug the rest
        return _report(error, debug="--debug" in arguments)


def _run(arguments: list[str]) -> int:
    try:
        command, options = parse(arguments)
    except SystemExit:  # argparse has printed what --help or --version asks for; its refusals are ArgumentErrors
        return 0
    if command == "chat":
        from tinyvllm.cli import chat

        return chat.run(options)
    if command == "serve":
        from tinyvllm.cli import serve

        return serve.run(options)
    if command == "batch":
        from tinyvllm.cli import batch

        return batch.run(options)
    if command == "kernels":
        from tinyvllm.cli import kernels

        return kernels.run(options)
    if command == "verify":
        from tinyvllm.cli import verify

        return verify.run(options)
    if command == "replay":
        from tinyvllm.cli import replay

        return replay.run(options)
    assert command == "generate", f"no branch for one of {COMMANDS}"
    from tinyvllm.cli import generate

    return generate.run(options)


def _report(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    if not isinstance(error, TinyvllmError):
        text = f"{type(error).__name__}: {text}" + ("" if debug else " (--debug shows where)")
    print(f"tinyvllm: error: {text}", file=sys.stderr)
    return error.exit_code if isinstance(error, TinyvllmError) else 1


def _abandon_stdout() -> None:
    """Nobody reads stdout any more: point it to nowhere, or the interpreter complains when it flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
