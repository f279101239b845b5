"""Variants of ops that a Mac's GPU has proved unable to run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tinyvllm.backends.metal.launch import UnusableKernelError
from tinyvllm.errors import ReplacedKernelError

log = logging.getLogger("tinyvllm")


class WithUnusable:
    """A base of backends: `_unusable` has, by device, op and variant, why a kernel of it cannot run."""

    def __init__(self) -> None:
        self._unusable: dict[tuple[str, str, str], str] = {}


Method = TypeVar("Method", bound=Callable[..., Any])


def of_op(stem: str) -> Callable[[Method], Method]:
    """Of a method that launches the op's kernels: where the GPU cannot run one, its variant is not chosen for the op any more."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def launching(self: WithUnusable, variant: str, *arguments: Any) -> Any:
            try:
                return method(self, variant, *arguments)
            except UnusableKernelError as error:
                self._unusable[error.device, stem, variant] = error.reason
                log.warning("%s: %s; %s does without the variant %s, which may be slower", error.device, error.reason, stem, variant)
                raise ReplacedKernelError(f"{error}; the same call again runs {stem} without the variant {variant}") from error

        return cast(Method, launching)

    return wrap
