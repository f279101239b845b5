"""Steps that several ranks run, in rank 0: it starts the others, announces each step to them and runs its own part."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from typing import Any

from tinygrad import Tensor

from tinyvllm.backends.cpu.threads import num_threads_wanted
from tinyvllm.bridge import download, synchronize, upload
from tinyvllm.config.engine import EngineConfig
from tinyvllm.distributed.memory import SharedMemory
from tinyvllm.distributed.ranks import Ranks
from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.runner.adapters import AdapterPool, PreparedAdapter
from tinyvllm.runner.device import unbound_cores
from tinyvllm.runner.grid import rank_environments
from tinyvllm.runner.kv import KVPool
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.passed import Message, PassedMessages, copy_blocks
from tinyvllm.runner.prepare import StepInputs

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Announced:
    """A step that other stages run."""

    number: int
    place: int
    inputs: StepInputs
    values: dict[str, int]


class RankedSteps:
    """Runs steps in all ranks. The others live as long as this object."""

    def __init__(self, config: EngineConfig, opened: OpenedModel, memory: SharedMemory, pool: KVPool, adapters: AdapterPool | None):
        """Start the other ranks and wait until each has its part of the model, and a KV cache of as many blocks as `pool`. `adapters` are
        rank 0's.
        """
        own = replace(config, num_blocks=pool.num_blocks, kv_memory=None, kv_events_config=None, record=None, lora_modules=())
        options = asdict(own)
        start = {"layout": asdict(memory.layout), "config": options, "stage_ends": opened.stage.ends if opened.stage else []}
        self._memory, self._pool, self._staged = memory, pool, opened.stage is not None
        self._number, self._in_flight = 0, list[int]()  # numbers of the next step, and of those that are not finished
        self._places = [*range(memory.layout.places)]  # that are free
        # a GPU is waited for: it may wait for one of a rank that has ended, and then its results must not be used
        self._device, self._waits = config.device, config.on_gpus and config.tensor_parallel_size * config.context_parallel_size > 1
        self._adapters, self._placing = adapters, deque[tuple[int, PreparedAdapter]]()  # announced, and not placed in rank 0
        with unbound_cores():
            self._ranks = Ranks(memory, start, num_threads_wanted(), rank_environments(config))
        self._passed = PassedMessages(self._ranks.receive, self._do)
        weakref.finalize(self, self._ranks.close)

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 and up."""
        return self._ranks.pids

    def run(self, inputs: StepInputs, forward: Forward, values: dict[str, int]) -> Any:
        """Run a step in all ranks, whatever is in flight; what rank 0's part of it returns. RankError if a rank has ended or hangs."""
        return self.finish(self.announce(inputs, values), forward)

    def announce(self, inputs: StepInputs, values: dict[str, int]) -> Announced:
        """Let the stages before rank 0's run a step. As many may be announced and not finished as there are stages."""
        self._ranks.check()  # a step that failed has kept its place
        arrays, number, place = inputs.copied_arrays(), self._number, self._places.pop()
        self._memory.inputs(place, len(arrays))[:] = arrays
        self._ranks.step_started()
        shape = {"shape": astuple(inputs.shape), "all_rows": inputs.all_rows, "values": values}
        self._ranks.send(do="step", number=number, place=place, count=len(arrays), **shape)
        self._number += 1
        self._in_flight.append(number)
        return Announced(number, place, inputs, values)

    def finish(self, step: Announced, forward: Forward) -> Any:
        """Run rank 0's part of an announced step, the last one for all ranks; what it returns."""
        self._ranks.check()  # a step that was given up while it ran is no longer in flight
        try:
            if self._staged:
                aside = step.number != self._in_flight[0]
                self._ranks.send_last(do="step", number=step.number, aside=aside)
                take_inputs(step.inputs, self._memory, 0, self._passed.take(step.number, aside))
            result = forward(**step.values)
            if self._waits:
                synchronize(self._device)
        except BaseException:
            self._ranks.abandon()  # they wait for a meeting to which this rank does not come
            raise
        self._in_flight.remove(step.number)
        self._places.append(step.place)
        self._ranks.step_ended(len(self._in_flight))
        return result

    def _do(self, message: Message) -> None:
        """What passes in front of a step: copies of blocks, and adapters."""
        if message["do"] == "copy":
            copy_blocks(self._pool, message)
        else:
            self._place_next()

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in all ranks, before the steps that are announced after it."""
        self._ranks.send(do="copy", pairs=pairs)
        if not self._staged:
            self._pool.copy(pairs)

    def place_adapter(self, number: int, adapter: PreparedAdapter, path: str) -> None:
        """Make an adapter the one of this number in all ranks, before the steps that are announced after it; each rank reads the folder
        `path` itself. ModelError if one finds something else there.
        """
        self._placing.append((number, adapter))
        done = self._ranks.ask(do="adapter", number=number, path=path, digest=adapter.digest)
        if not self._staged:
            self._place_next()
        if not done:
            raise ModelError(f"adapter: the files of {path!r:.200} have changed while they were loaded; load it again")

    def _place_next(self) -> None:
        assert self._adapters is not None
        self._adapters.place(*self._placing.popleft())

    def close(self) -> None:
        """End the other ranks. Again: nothing."""
        self._ranks.close()


def take_inputs(inputs: StepInputs, memory: SharedMemory, rank: int, message: dict[str, Any]) -> None:
    """The inputs of an announced step, and the residual stream from the stage before."""
    inputs.load(memory.inputs(message["place"], message["count"]))
    if inputs.arrived is not None:
        upload(inputs.arrived, memory.stream(rank, message["place"], int(inputs.arrived.shape[0])))


def pass_stream(stream: Tensor, memory: SharedMemory, rank: int, message: dict[str, Any]) -> None:
    """Leave the residual stream of an announced step, float32 [T, E], for the next stage."""
    numbers = download(stream).reshape(-1)
    memory.stream(rank - memory.layout.world_size, message["place"], len(numbers))[:] = numbers
