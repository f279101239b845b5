"""What counts energy: one protocol for the counters of processors and GPUs."""

from __future__ import annotations

import logging
from dataclasses import field
from typing import Protocol

from tinyvllm.lazy_dataclass import dataclass

log = logging.getLogger("tinyvllm")


class CounterError(Exception):
    """Why a counter cannot be read, in one line."""


class Counter(Protocol):
    """Counts joules of one part of the machine, such as a CPU package or a GPU."""

    @property
    def name(self) -> str:
        """Such as "cpu package-0" or "gpu 0"."""
        ...

    def joules(self) -> float:
        """Joules since the last call, or since the counter was opened. CounterError if it cannot be read."""
        ...

    def close(self) -> None: ...


@dataclass
class Counters:
    """The counters that are open, and why others are not: reasons by part, "cpu" or "gpu", or by the counter's name."""

    open: list[Counter] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)

    def read(self) -> dict[str, float]:
        """Joules since the last call, by counter. One that fails is closed, and not read again."""
        joules = {}
        for counter in list(self.open):
            try:
                joules[counter.name] = counter.joules()
            except CounterError as error:
                self.fail(counter.name, str(error))
        return joules

    def fail(self, name: str, reason: str) -> None:
        """Close a counter that cannot be believed any more, and say why."""
        for counter in [each for each in self.open if each.name == name]:
            self.open.remove(counter)
            counter.close()
        self.not_measured[name] = reason
        log.warning("energy: %s is not measured any more: %s", name, reason)

    def close(self) -> None:
        for counter in self.open:
            counter.close()
        self.open = []
