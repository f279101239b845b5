"""Steps that several ranks run, in rank 0: it starts the others, announces each step to them and runs its own part."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from typing import Any

from tinygrad import Tensor

from tinyvllm.backends.cpu.threads import thread_pool
from tinyvllm.bridge import download, upload
from tinyvllm.config import EngineConfig
from tinyvllm.distributed.memory import SharedMemory
from tinyvllm.distributed.ranks import Ranks
from tinyvllm.runner.kv import KVPool
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.prepare import StepInputs

Forward = Callable[..., Any]


class RankedSteps:
    """Runs steps in all ranks. The others live as long as this object."""

    def __init__(self, config: EngineConfig, opened: OpenedModel, memory: SharedMemory, pool: KVPool):
        """Start the other ranks and wait until each has its part of the model, and a KV cache of as many blocks as `pool`."""
        options = asdict(replace(config, num_blocks=pool.num_blocks, kv_memory=None, kv_events_config=None, record=None))
        start = {"layout": asdict(memory.layout), "config": options, "stage_ends": opened.stage.ends if opened.stage else []}
        self._memory, self._pool, self._staged = memory, pool, opened.stage is not None
        self._announced, self._next = 0, 0  # numbers of steps
        self._ranks = Ranks(memory, start, thread_pool().num_threads)
        weakref.finalize(self, self._ranks.close)

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 and up."""
        return self._ranks.pids

    def run(self, inputs: StepInputs, forward: Forward, values: dict[str, int]) -> Any:
        """Run a step in all ranks; what rank 0's part of it returns. RankError if a rank has ended or hangs."""
        arrays = inputs.copied_arrays()
        self._memory.inputs(self._announced, len(arrays))[:] = arrays
        self._ranks.step_started()
        message = {
            "step": self._announced,
            "shape": astuple(inputs.shape),
            "all_rows": inputs.all_rows,
            "values": values,
            "count": len(arrays),
        }
        self._ranks.send(do="step", **message)
        self._announced += 1
        try:
            if self._staged:
                self._wait_for_stream(inputs)
            result = forward(**values)
        except BaseException:
            self._ranks.abandon()  # they wait for a meeting to which this rank does not come
            raise
        self._ranks.step_ended()
        return result

    def _wait_for_stream(self, inputs: StepInputs) -> None:
        """Do what was announced before the next step, and take its inputs."""
        while (message := self._ranks.receive())["do"] == "copy":
            self._pool.copy([tuple(pair) for pair in message["pairs"]])
        take_inputs(inputs, self._memory, 0, message)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in all ranks, before the steps that are announced after it."""
        self._ranks.send(do="copy", pairs=pairs)
        if not self._staged:
            self._pool.copy(pairs)

    def close(self) -> None:
        """End the other ranks. Again: nothing."""
        self._ranks.close()


def take_inputs(inputs: StepInputs, memory: SharedMemory, rank: int, message: dict[str, Any]) -> None:
    """The inputs of an announced step, and the residual stream from the stage before."""
    inputs.load(memory.inputs(message["step"], message["count"]))
    if inputs.arrived is not None:
        upload(inputs.arrived, memory.stream(rank, message["step"], int(inputs.arrived.shape[0])))


def pass_stream(stream: Tensor, memory: SharedMemory, rank: int, message: dict[str, Any]) -> None:
    """Leave the residual stream of an announced step, float32 [T, E], for the next stage."""
    numbers = download(stream).reshape(-1)
    memory.stream(rank - memory.layout.world_size, message["step"], len(numbers))[:] = numbers
