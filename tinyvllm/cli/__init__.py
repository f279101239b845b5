"""The command line: `main` picks the command, and turns an error into one line and an exit code.

0 done, 1 a failure, 2 bad arguments, 130 interrupted. Modules that are slow to import (tinygrad above all) are imported by the command that
needs them, after its arguments have been checked.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from tinyvllm.cli.arguments import parse
from tinyvllm.config.switches import parse_count
from tinyvllm.errors import OutOfMemoryError, TinyvllmError
from tinyvllm.host_memory import headroom, is_out_of_memory, limit_arenas, require_start

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. `argv` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not faulthandler.is_enabled():  # a fault in native code, as after a truncated file of weights, says where it was
        with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError):  # a stderr that is no file
            faulthandler.enable()
    debug = "--debug" in arguments
    try:
        command, options = _parsed(arguments)
        debug = options.debug
        code = 0 if command is None else _run(command, options)
        sys.stdout.flush()  # a closed pipe is handled here; at exit Python would complain about it
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return 0
    except Exception as error:  # noqa: BLE001  any error becomes one line; --debug shows its traceback
        return _report(error, debug)


def _parsed(arguments: list[str]) -> tuple[str | None, argparse.Namespace]:
    try:
        return parse(arguments)
    except SystemExit:  # argparse has printed --help or --version; its refusals are ArgumentErrors
        return None, argparse.Namespace(debug=False)


def _run(command: str, options: argparse.Namespace) -> int:
    require_start()
    limit_arenas()
    if (threads := getattr(options, "threads", None)) is not None:
        os.environ["TINYVLLM_THREADS"] = str(parse_count("--threads", str(threads)))  # also for the processes that the command starts
    module = importlib.import_module(f"tinyvllm.cli.{command.replace('-', '_')}")  # a command has a file of its name
    code: int = module.run(options)
    return code


def _report(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    if is_out_of_memory(error) and not isinstance(error, TinyvllmError):
        error = OutOfMemoryError(f"memory: it ran out ({type(error).__name__}: {text}); {headroom()}; free memory or raise the limit")
        text = str(error)
    if not isinstance(error, TinyvllmError):
        text = f"{type(error).__name__}: {text}" + ("" if debug else " (--debug shows the traceback)")
    print(f"tinyvllm: error: {text}", file=sys.stderr)
    return error.exit_code if isinstance(error, TinyvllmError) else 1


def _abandon_stdout() -> None:
    """The reader of stdout is gone: point it to the null device, or the interpreter complains when it flushes it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
