"""How much memory the models of a server may take together: what each takes is planned from its headers before it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tinyvllm.config.engine import resolve
from tinyvllm.engine.api import plan_memory
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.host_memory import megabytes
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Need:
    """Bytes of one model: its weights, KV cache, scratch and drafter; `run` is what the process takes once, whatever is loaded.

    options  of its engine, with the number of KV blocks that was planned
    """

    weights: int
    kv_cache: int
    scratch: int
    drafter: int
    run: int
    options: Mapping[str, Any]

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.scratch + self.drafter

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "scratch": self.scratch, "drafter": self.drafter}
        return f"{megabytes(self.total)} ({', '.join(f'{name} {megabytes(nbytes)}' for name, nbytes in parts.items() if nbytes)})"


def plan_need(options: Mapping[str, Any], budget: int) -> Need:
    """What a model with these options of AsyncLLM takes of `budget` free bytes. OutOfMemoryError if it does not start there."""
    given = {name: value for name, value in options.items() if name != "served_model_name"}
    sizes = plan_memory(resolve(**given), budget, "--memory-budget")
    if sizes.start is None:
        raise OutOfMemoryError(f"{sizes.refusal}; {sizes}")
    memory, start = sizes.memory, sizes.start
    planned = {name: value for name, value in options.items() if name != "kv_memory"} | {"num_blocks": start.num_blocks}
    return Need(memory.weights, start.kv_bytes, memory.scratch, start.drafter_bytes, memory.run, planned)


class MemoryBudget:
    """Bytes for all models together. The need of a model is planned once."""

    def __init__(self, nbytes: int, plan: Callable[[Mapping[str, Any], int], Need] = plan_need):
        self.nbytes = nbytes
        self._plan = plan
        self._needs: dict[str, Need] = {}

    def need(self, name: str, options: Mapping[str, Any]) -> Need:
        """What a model takes. OutOfMemoryError if it is more than the budget alone; errors of its options and headers."""
        if name not in self._needs:
            try:
                self._needs[name] = self._plan(options, self.nbytes)
            except OutOfMemoryError as error:
                raise OutOfMemoryError(f"model {name!r} does not fit --memory-budget {megabytes(self.nbytes)}: {error}") from error
        need = self._needs[name]
        if need.total + need.run > self.nbytes:
            raise OutOfMemoryError(
                f"model {name!r} needs {need}, its process running {megabytes(need.run)}, and --memory-budget is "
                f"{megabytes(self.nbytes)}: raise it, or lower the model's --max-num-seqs, --max-model-len or --kv-memory"
            )
        return need

    def fits(self, name: str, loaded: Iterable[str]) -> bool:
        """Whether a planned model fits next to those that are loaded."""
        need = self._needs[name]
        return need.total + need.run + sum(self._needs[other].total for other in loaded) <= self.nbytes

    def refusal(self, name: str, loaded: Iterable[str]) -> OutOfMemoryError:
        """Why a model cannot be loaded while the others are in use."""
        others = ", ".join(f"{other!r} {megabytes(self._needs[other].total)}" for other in loaded)
        return OutOfMemoryError(
            f"model {name!r} needs {self._needs[name]}, and of --memory-budget {megabytes(self.nbytes)} models in use take {others}: try "
            "again when they are idle"
        )
