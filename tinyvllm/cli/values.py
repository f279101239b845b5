"""Values of options with where they are from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

UNSET: Any = object()  # null in a file: the default, whatever a lower layer says


class Origin(NamedTuple):
    """Where a value is from. `kind` is default, file, environment or command line."""

    kind: str
    file: str | None = None
    line: int | None = None
    preset: str | None = None
    variable: str | None = None

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.file}:{self.line}" + (f" (preset {self.preset})" if self.preset is not None else "")
        return f"{self.kind} {self.variable}" if self.variable is not None else self.kind


DEFAULT, COMMAND_LINE = Origin("default"), Origin("command line")


class Value(NamedTuple):
    value: Any
    origin: Origin


Layer = dict[str, Value]  # values of options by key; a later layer outranks an earlier one


class NamedModel(NamedTuple):
    """A model of a configuration file: its served name, and its own options, which replace those of all models."""

    name: str
    options: Mapping[str, Value]

    def fields(self) -> dict[str, Any]:
        """The options as fields of EngineConfig."""
        return {key.replace("-", "_"): value.value for key, value in self.options.items() if value.value is not UNSET}
