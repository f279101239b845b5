"""Runs schedules: lays them out as steps, captures these and launches them. Knows sequences and blocks, no text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from tinygrad import Tensor, UOp, dtypes

from tinyvllm.backends import autotune
from tinyvllm.backends.cpu.binding import release
from tinyvllm.bridge import (
    Captured,
    CapturedCall,
    CaptureWork,
    KeptStep,
    Reading,
    Recorded,
    capture_work,
    compile_clock,
    copied,
    download,
    peek,
    read_async,
    recover_device,
    repeat,
    spans,
    upload,
)
from tinyvllm.config.engine import MAX_SCHEDULER_STEPS, EngineConfig
from tinyvllm.errors import ArgumentError, RequestError
from tinyvllm.ops.advance import History, advance
from tinyvllm.runner.adapters import PreparedAdapter
from tinyvllm.runner.ahead import StepOutlines
from tinyvllm.runner.grid import max_rows
from tinyvllm.runner.kept import kept_steps
from tinyvllm.runner.loaded import LoadedModel
from tinyvllm.runner.memory import NO_DRAFTER, DrafterMemory
from tinyvllm.runner.opened import OpenedModel, open_model
from tinyvllm.runner.prepare import Shape, StepInputs, shape_of, split
from tinyvllm.runner.step import Logits, PreparedStep, StepPlan
from tinyvllm.runner.tested import StepKernels
from tinyvllm.scheduler import Schedule, Scheduled

if TYPE_CHECKING:
    from tinyvllm.distributed.memory import SharedMemory
    from tinyvllm.runner.ranked import Announced, RankedSteps

__all__ = ["Logits", "PreparedStep", "Reading", "Runner"]


class Runner(LoadedModel):
    """The model on its device. `prepare` and `launch` run a schedule; `prompt_logits` serves evaluation."""

    def __init__(
        self,
        config: EngineConfig,
        device: str,
        progress: Callable[[int, int, str], None] | None = None,
        opened: OpenedModel | None = None,
        drafter: DrafterMemory = NO_DRAFTER,
    ):
        """`opened` is the model if it was opened before; `drafter` the memory that must be left for drafts."""
        opened = opened or open_model(config, device)
        super().__init__(config, device, opened, progress, drafter)
        self.one_off = threading.Lock()  # held for a pass outside the schedule
        self._table_width = -(-self.max_model_len // config.block_size)
        self._cascade = config.enable_cascade
        self._steps: dict[tuple[Shape, bool, tuple[int, ...]], StepPlan] = {}  # the last part: `_state_layers`
        self._last: tuple[Schedule, PreparedStep] | None = None
        self._state_layers: tuple[int, ...] = ()
        self._choices_changed = autotune.changes()
        self._embeddings: dict[Shape, tuple[StepInputs, Captured]] = {}
        hosted = config.swap_space // self.pool.block_bytes if config.swap_space else 0
        self._hosted = np.zeros((hosted, self.pool.block_bytes), np.uint8)  # its pages come as they are written
        rows = max_rows(config) * self.config.dim if opened.takes_stream else 0
        self._arrived = Tensor.empty(rows, dtype=dtypes.float32, device=device).contiguous().realize() if rows else None
        self.kept_steps = kept_steps(self.placement, config, self._roots()) if config.num_ranks == 1 and opened.keeps_steps else None
        self._kernels = StepKernels(self.placement, self.kept_steps)
        outlines = StepOutlines(self.model, self.pool, self.caches, self._constants, self.placement, self._inputs, self._history)
        tested = self._kernels.test(outlines, config, opened.likely_draw)
        self.self_test = tested if self.placement.is_cpu else self.packing_test + tested  # the CPU's grows with the steps
        self.rounds_in_background = True  # rounds that the device runs alone are in the background: the host has something to do meanwhile
        self.ranks = None if opened.memory is None else self._start_ranks(config, opened, opened.memory)

    def _start_ranks(self, config: EngineConfig, opened: OpenedModel, memory: SharedMemory) -> RankedSteps:
        """The other ranks of rank 0, started."""
        from tinyvllm.runner.ranked import RankedSteps  # 5 ms, for engines of several ranks

        return RankedSteps(config, opened, memory, self.pool, self.adapters)

    def close(self) -> None:
        """End the other ranks, note what a later start finds, and let the thread run where it ran before."""
        self._kernels.close()
        release()
        if self.ranks is not None:
            self.ranks.close()

    def plan_of(self, shape: Shape, all_rows: bool = False) -> StepPlan:
        """The inputs and captures of steps of a shape, made when they are first wanted."""
        return self._steps.get((shape, all_rows, self._state_layers)) or self._new_step(shape, all_rows)

    def _roots(self) -> dict[str, object]:
        """What all steps read, and what decides their kernels."""
        pool = self.pool
        return {"model": self.model, "layers": self.caches, "constants": self._constants, "block_size": pool.block_size}

    def prepare(self, schedule: Schedule) -> PreparedStep:
        """Lay a schedule out on the device. The copy may wait for the step in flight, so it comes before anything is launched.

        The result is valid until the next call, which returns the same object for a schedule that is reused.
        """
        if schedule.reused and self._last is not None and self._last[0] is schedule and self._last[1].plan.inputs.ready:
            step = self._last[1]
            blocks = step.plan.inputs.reuse(schedule.changed, self.pool.block_size)
            if step.values:
                step.values["num_blocks"] = blocks
            return step
        singles, chunks = split(schedule)
        step = self._prepare(singles, chunks, all_rows=False)
        self._last = schedule, step
        return step

    def forget_device_state(self) -> None:
        """A step failed: the next one is laid out completely, whatever the device had ready. Shapes that were not captured are dropped."""
        self._last = None
        self._steps = {key: plan for key, plan in self._steps.items() if plan.captured}
        self._embeddings = {shape: made for shape, made in self._embeddings.items() if made[1].captured}
        self.pool.forget_failed_copies()
        recover_device(self.device)
        for plan in self._steps.values():
            plan.inputs.forget_advanced()

    @property
    def has_untimed_kernels(self) -> bool:
        """Whether `tune_next` has something to do."""
        return autotune.is_waiting()

    def tune_next(self) -> bool:
        """Time one candidate of a kernel that has several, for which nothing may be in flight; False if none waits for it."""
        return autotune.time_next()

    def drop_untimed_kernels(self) -> None:
        """Time none of the kernels that wait for it: they hold the model's weights."""
        autotune.drop_waiting()

    def drop_slower_captures(self) -> bool:
        """Drop all captures if timing has changed the choice of a kernel since the last call; whether it did. Nothing may run."""
        if autotune.changes() == self._choices_changed:
            return False
        self._choices_changed = autotune.changes()
        self._last = None
        self._steps.clear()
        self._embeddings.clear()
        return True

    def padded(self, shape: Shape) -> PreparedStep | None:
        """A step of this shape that holds only padding, to capture it before a request needs it; None if it was captured."""
        if (shape, False, self._state_layers) in self._steps:
            return None
        plan = self._new_step(shape, all_rows=False)
        blocks = plan.inputs.fill([], [], self.pool.block_size)
        return PreparedStep([], shape.sequences, {"num_blocks": blocks} if self._table_width > 1 else {}, plan, not shape.chunks, [])

    def place_adapter(self, number: int, adapter: PreparedAdapter, path: str) -> None:
        """Make an adapter, read from the folder `path`, the one of this number, in all ranks. Errors of `RankedSteps.place_adapter`."""
        assert self.adapters is not None
        if self.ranks is None:
            self.adapters.place(number, adapter)
        else:
            self.ranks.place_adapter(number, adapter, path)

    @property
    def swap_blocks(self) -> int:
        """Blocks that the host has room for."""
        return len(self._hosted)

    def move(self, schedule: Schedule) -> None:
        """Move blocks as a schedule requires before its step: to the host, from there, and copies."""
        if schedule.swap_out:
            self._hosted[[host for _, host in schedule.swap_out]] = self.pool.read([block for block, _ in schedule.swap_out])
        if schedule.swap_in:
            self.pool.write([block for _, block in schedule.swap_in], self._hosted[[host for host, _ in schedule.swap_in]])
        if schedule.copies:
            (self.pool if self.ranks is None else self.ranks).copy(schedule.copies)

    def launch(self, step: PreparedStep) -> Logits:
        """Start a prepared step. Its results are in buffers that the next step of this shape overwrites."""
        return Logits(*self._run(step.plan.inputs, step.plan.forward, step.values))

    def announce(self, step: PreparedStep) -> Announced:
        """Let the stages before this one run a prepared step, of a model in several stages."""
        assert self.ranks is not None
        return self.ranks.announce(step.plan.inputs, step.values)

    def finish(self, step: PreparedStep, announced: Announced) -> Logits:
        """This stage's part of the step that was announced first. Its results are as those of `launch`."""
        assert self.ranks is not None
        return Logits(*self.ranks.finish(announced, step.plan.forward))

    def _run(self, inputs: StepInputs, forward: Captured, values: dict[str, int]) -> Any:
        """Run a captured step, in all ranks if there are several."""
        return forward(**values) if self.ranks is None else self.ranks.run(inputs, forward, values)

    def advance(self, step: PreparedStep, sampled: Tensor, draw: CapturedCall | None, rounds: int) -> Iterator[np.ndarray]:
        """Advance a step of decodes by the tokens just `sampled` [B], then `rounds` - 1 times by its own; tokens [n, B] as they come.

        `draw` is the sampler's call that gave `sampled`, None if the forward pass did. The device runs all rounds alone, and
        what a round has drawn is returned after the launch of the next. The iterator must be exhausted.
        """
        forward: CapturedCall = (step.plan.forward, (), step.values)
        advance_call: CapturedCall = (self._advance(step.plan, sampled), (sampled,), {})
        calls = [call for call in (forward, draw, advance_call) if call is not None]
        if self.overlaps:
            return self._queued(step, sampled, calls, rounds)
        return self._repeated(step, sampled, calls, rounds)

    def _queued(self, step: PreparedStep, sampled: Tensor, calls: list[CapturedCall], rounds: int) -> Iterator[np.ndarray]:
        """Put all rounds into the device's queue, and after each a copy of its tokens."""
        readings = []
        for turn in range(rounds):
            for captured, tensors, values in calls if turn else calls[-1:]:
                captured(*tensors, **values)
            readings.append(read_async(sampled))
        step.plan.inputs.mark_advanced(rounds)
        for reading in readings:
            yield reading.get().reshape(1, -1)

    def _repeated(self, step: PreparedStep, sampled: Tensor, calls: list[CapturedCall], rounds: int) -> Iterator[np.ndarray]:
        """Run all rounds as one job and read its history meanwhile."""
        upload(step.plan.history.round, np.zeros(1, np.int32))
        calls[-1][0](sampled)
        step.plan.inputs.mark_advanced(rounds)
        pending = repeat(calls, rounds - 1, self.rounds_in_background)
        seen, tokens = 0, step.plan.history.tokens
        try:
            while seen < rounds:
                done = rounds if pending.wait() else int(peek(step.plan.history.round)[0])
                if done > seen:
                    yield peek(tokens)[seen:done]
                seen = done
        finally:
            while not pending.wait():  # also if the caller fails: what comes next must find the device idle
                pass

    @property
    def overlaps(self) -> bool:
        """Whether a launch comes back before the step has run, so that the host can do something else meanwhile. Steps of several ranks
        are announced one by one.
        """
        return self.ranks is None and (self.placement.is_cuda or self.placement.is_metal)

    def decode(self, step: PreparedStep, draw: Callable[[Tensor], Tensor], kind: Hashable, plain: bool) -> Reading:
        """Start a prepared step of decodes, draw its tokens and move on to the next step, all in one graph; the tokens int32 [B].

        `draw` makes tokens [B] of logits [B, V] and is known by `kind`; `plain` says that it only takes the largest, which the step may
        have found on the way.
        """
        plan = step.plan
        if kind not in plan.rounds:

            def function(num_blocks: int | UOp = 1) -> Tensor:
                logits, best, _ = plan.function(num_blocks)
                tokens = best if plain and best is not None else draw(logits)
                advance(plan.inputs.batch(1), tokens, plan.history, self.pool.block_size)
                return tokens

            draws = getattr(draw, "__self__", draw)
            kept = self._kept("round", inputs=plan.inputs.tensors, history=plan.history, draw=draws, plain=plain)
            plan.rounds[kind] = Captured(function, {"num_blocks": (1, self._table_width)}, kept)
        tokens = plan.rounds[kind](**step.values)
        plan.inputs.mark_advanced(1)
        return read_async(tokens)

    def _advance(self, plan: StepPlan, sampled: Tensor) -> Captured:
        if id(sampled) not in plan.advances:

            def function(tokens: Tensor) -> Tensor:
                advance(plan.inputs.batch(1), tokens, plan.history, self.pool.block_size)
                return plan.history.round

            kept = self._kept("advance", inputs=plan.inputs.tensors, history=plan.history)
            plan.advances[id(sampled)] = Captured(function, kept=kept)
        return plan.advances[id(sampled)]

    def prompt_logits(self, entry: Scheduled) -> np.ndarray:
        """Logits float32 [T, V] of every token of one chunk."""
        singles, chunks = ([entry], []) if entry.num_tokens == 1 else ([], [entry])
        return download(self.launch(self._prepare(singles, chunks, all_rows=True)).logits)[: entry.num_tokens]

    def states(self, entry: Scheduled) -> np.ndarray:
        """Hidden states float32 [T, E] of every token of one chunk, after the final norm."""
        if self._divides:
            raise RequestError("embeddings: hidden states are not available with tensor_parallel_size above 1; leave it out")
        shape = shape_of([], [entry])
        if shape not in self._embeddings:
            inputs = self._inputs(shape, all_rows=True)

            def function(num_blocks: int | UOp = 1) -> Tensor:
                states: Tensor = self.model.states(inputs.batch(num_blocks), self.caches, **self._constants)[-1]
                states = self.model.final_norm(states)
                return states.contiguous().realize()

            kept = self._kept("states", inputs=inputs.tensors, shape=shape)
            self._embeddings[shape] = inputs, Captured(function, {"num_blocks": (1, self._table_width)}, kept)
        inputs, captured = self._embeddings[shape]
        blocks = inputs.fill([], [entry], self.pool.block_size)
        states: np.ndarray = download(self._run(inputs, captured, {"num_blocks": blocks} if self._table_width > 1 else {}))
        return states[: entry.num_tokens]

    def capture_work(self) -> CaptureWork:
        """How many captures this process has made, and the seconds that they took, with all compiling for them."""
        return capture_work()

    def compile_seconds(self) -> float:
        """Seconds in which this process has run compilers."""
        return compile_clock.seconds

    def _prepare(self, singles: list[Scheduled], chunks: list[Scheduled], all_rows: bool) -> PreparedStep:
        shape = shape_of(singles, chunks)
        plan = self.plan_of(shape, all_rows)
        blocks = plan.inputs.fill(singles, chunks, self.pool.block_size)
        rows = [entry for entry in singles + chunks for _ in range(entry.num_logits)]
        values = {"num_blocks": blocks} if self._table_width > 1 else {}
        first = list(zip(singles, accumulate((e.num_tokens for e in singles), initial=0)))
        first += zip(chunks, accumulate((e.num_tokens for e in chunks), initial=shape.decodes))
        return PreparedStep(rows, shape.sequences, values, plan, not chunks and len(rows) == len(singles), first)

    def _new_step(self, shape: Shape, all_rows: bool) -> StepPlan:
        inputs = self._inputs(shape, all_rows)

        @Recorded
        def forward(num_blocks: int | UOp = 1) -> tuple[Tensor, Tensor | None, Tensor | None]:
            return self._forward(inputs, num_blocks)

        # blocks of the longest context are a variable of the captured step, so that contexts grow without a new capture
        kept = self._kept("forward", inputs=inputs.tensors, shape=shape, all_rows=all_rows)
        captured = Captured(forward, {"num_blocks": (1, self._table_width)}, kept)
        plan = StepPlan(inputs, forward, captured, self._history(shape), {}, {})
        self._steps[shape, all_rows, self._state_layers] = plan
        if shape.decodes:  # the last of what was compiled ahead is used now
            self._kernels.note_first_start()
        return plan

    def _kept(self, name: str, **roots: object) -> KeptStep | None:
        """Where a captured step is kept that reads `roots`, too."""
        return None if self.kept_steps is None else self.kept_steps.step(name, states=self._state_layers, **roots)

    def _inputs(self, shape: Shape, all_rows: bool = False) -> StepInputs:
        arrived = None if self._arrived is None else spans(self._arrived, [(0, shape.tokens * self.config.dim)])[0]
        parts = self.groups.parts
        return StepInputs(shape, self._table_width, self.device, all_rows, self._cascade, arrived, parts, self.state_slots)

    def _history(self, shape: Shape) -> History:
        tokens = np.full((MAX_SCHEDULER_STEPS, shape.sequences), -1, np.int32)
        return History(copied(tokens, self.device), copied(np.zeros(1, np.int32), self.device))

    def keep_states(self, layers: tuple[int, ...]) -> None:
        """From the next step on, `Logits.states` has the hidden states of these layers: the residual stream after i of them, -1 after
        the final norm. ArgumentError for a layer that the model lacks. Captures for other layers are kept: the lab alternates between a
        drafter and none.
        """
        if layers == self._state_layers:
            return
        count = self.config.num_blocks
        for layer in layers:
            if not -1 <= layer <= count:
                raise ArgumentError(f"speculation: hidden states of layer {layer}: the model has {count} layers; expected -1 to {count}")
        self._state_layers = layers
        self._last = None

    def _forward(self, inputs: StepInputs, num_blocks: int | UOp) -> tuple[Tensor, Tensor | None, Tensor | None]:
        batch = inputs.batch(num_blocks)
        stream = self.model.states(batch, self.caches, **self._constants)
        logits, best = self.model.logits(stream[-1], batch)
        states = None
        if self._state_layers:
            states = Tensor.cat(
                *(stream[i] if i >= 0 else self.model.final_norm(stream[-1]) for i in self._state_layers), dim=1
            ).contiguous()
        logits = logits if best is not None else logits.contiguous()
        Tensor.realize(*(result for result in (logits, best, states) if result is not None))
        return logits, best, states

    def tokens(self, sampled: Tensor) -> np.ndarray:
        """Token ids [1, B] that a captured step left on the device, once they are there."""
        return peek(sampled).reshape(1, -1)
