"""The C compiler of tinygrad's CPU device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from tinygrad.runtime.support import compiler_cpu

from tinyvllm.errors import KernelError


class _Command:
    """In place of the module `subprocess` in tinygrad's: its command is one word, CC, and zig's clang needs more."""

    def __init__(self, command: Callable[[], Sequence[str]]):
        self._command = command

    def check_output(self, arguments: Sequence[str], **options: Any) -> Any:
        compiler = self._command()
        try:
            return subprocess.check_output([*compiler, *arguments[1:]], **options)
        except (FileNotFoundError, PermissionError) as error:
            raise KernelError(f"kernels: {compiler[0]} cannot be started: {error.strerror}; CC names another compiler") from error


def use_c_compiler(command: Callable[[], Sequence[str]]) -> None:
    """Compile with this command, which is looked up when something is compiled: with a filled cache folder no compiler is needed."""
    compiler_cpu.subprocess = _Command(command)  # type: ignore[assignment]
