"""Steps that several ranks run, in rank 0: it starts the others, announces each step to them and runs its own part."""

from __future__ import annotations

import weakref
from dataclasses import asdict, astuple, replace

from tinygrad import Tensor

from tinyvllm.backends.cpu.threads import thread_pool
from tinyvllm.config import EngineConfig
from tinyvllm.distributed.memory import SharedMemory
from tinyvllm.distributed.ranks import Ranks
from tinyvllm.runner.step import PreparedStep


class RankedSteps:
    """Runs steps in all ranks. The others live as long as this object."""

    def __init__(self, config: EngineConfig, num_blocks: int, memory: SharedMemory):
        """Start the other ranks, with a KV cache of `num_blocks`, and wait until each has its part of the model."""
        options = asdict(replace(config, num_blocks=num_blocks, kv_memory=None, kv_events_config=None, record=None))
        self._memory = memory
        self._ranks = Ranks(memory, {"layout": asdict(memory.layout), "config": options}, thread_pool().num_threads)
        weakref.finalize(self, self._ranks.close)

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 and up."""
        return self._ranks.pids

    def run(self, step: PreparedStep) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run a step in all ranks; what the forward pass returns. RankError if a rank has ended or hangs."""
        inputs = step.plan.inputs
        arrays = inputs.copied_arrays()
        self._memory.inputs[: len(arrays)] = arrays
        self._ranks.step_started()
        self._ranks.send(do="step", shape=astuple(inputs.shape), all_rows=inputs.all_rows, values=step.values, count=len(arrays))
        try:
            result: tuple[Tensor, Tensor | None, Tensor | None] = step.plan.forward(**step.values)
        except BaseException:
            self._ranks.abandon()  # they wait for a meeting to which this rank does not come
            raise
        self._ranks.step_ended()
        return result

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Let the other ranks copy blocks before their next step."""
        self._ranks.send(do="copy", pairs=pairs)

    def close(self) -> None:
        """End the other ranks. Again: nothing."""
        self._ranks.close()
