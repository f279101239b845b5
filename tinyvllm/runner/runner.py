"""Runs schedules: owns the model, the KV pool and the captured steps. Knows sequences and blocks, no text."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp, dtypes

from tinyvllm.backends import autotune
from tinyvllm.backends.cpu.threads import thread_pool, threads_in_words
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.packed import packed_caches, packed_weights
from tinyvllm.backends.registry import (
    Choice,
    Need,
    architecture_of,
    choices,
    usable_variants,
)
from tinyvllm.backends.selftest import Report, test_before_first_run, test_kernels
from tinyvllm.bridge import (
    Captured,
    CapturedCall,
    CaptureWork,
    KeptStep,
    Reading,
    Recorded,
    capture_work,
    captures_steps,
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
from tinyvllm.models.config import ModelConfig
from tinyvllm.ops.advance import History, advance
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout, formats_in
from tinyvllm.quant.layouts import BLOCK
from tinyvllm.quant.random_rows import packable_width
from tinyvllm.runner.adapters import AdapterPool
from tinyvllm.runner.ahead import StepOutlines
from tinyvllm.runner.kept import keep_needs, kept_needs, kept_steps
from tinyvllm.runner.memory import NO_DRAFTER, DrafterMemory, free_memory
from tinyvllm.runner.opened import OpenedModel, open_model
from tinyvllm.runner.prepare import Shape, StepInputs, shape_of, split
from tinyvllm.runner.ranked import Announced, RankedSteps
from tinyvllm.runner.sizes import block_bytes, check_all_weights, groups_of, pool_size
from tinyvllm.runner.split import max_rows
from tinyvllm.runner.states import all_caches, checked_slots, new_states
from tinyvllm.runner.step import Logits, PreparedStep, StepPlan
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.scheduler import Schedule, Scheduled
from tinyvllm.weights.checkpoint import open_checkpoint
from tinyvllm.weights.quantized.notes import describe

__all__ = ["Choice", "Logits", "PreparedStep", "Reading", "Runner"]

log = logging.getLogger("tinyvllm")


class Runner:
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
        self.placement = Placement(device)
        self.architecture = architecture_of(self.placement)
        opened = opened or open_model(config, device)
        self.checkpoint, plan, recipes = opened.checkpoint, opened.plan, opened.recipes
        self.config: ModelConfig = opened.config
        self.dtype, self.model = opened.dtype, opened.model
        loader = opened.loader(progress)
        if opened.leads and not loader.maps_all:
            check_all_weights(opened)
        packing = self._test_packing(plan, plan.matrix_formats(recipes, opened.stored))
        loader.load(self.model, recipes)
        if note := describe(self.checkpoint.tensors, self.checkpoint.unused, loader.unpacked):
            log.warning(note)
        if self.checkpoint.left_out:
            log.warning(self.checkpoint.left_out)
        whole = opened.whole or loader
        self.weight_bytes, self.bytes_per_token = whole.bytes + opened.copies, whole.streamed
        self.kv_token_bytes, self.block_bytes = opened.block_bytes // config.block_size, block_bytes(config, opened)
        self.weight_formats, self.weight_layout, self.weight_identity = loader.formats, plan.layout, plan.identity
        # the other ranks of this machine load their weights after this one
        free = None if opened.whole is None or opened.division else free_memory(device) - (self.weight_bytes - loader.bytes)
        size = pool_size(config, opened, drafter, free)
        self.max_model_len, self.groups = size.max_model_len, groups_of(config, self.config)
        groups = self.groups.layers if self.groups.blocks.count > 1 else None
        self.pool = opened.pool(opened.own_kv_layers, size.num_blocks, groups)
        self.options, self.one_off = config, threading.Lock()  # the engine's options; held for a pass outside the schedule
        self.state_slots = checked_slots(config, self.config, device)
        self.caches = all_caches(self.config, self.pool, new_states(self.config, self.state_slots, device))
        self.adapters = AdapterPool(config, opened, device) if config.enable_lora else None
        self.max_num_seqs = config.max_num_seqs
        # a pool too small for the model's context shortens sequences, but must not change what the positions mean
        constants = self.model.constants(self.max_model_len, config.max_model_len or self.config.max_context)
        self._constants = {name: copied(np.asarray(a), device) for name, a in constants.items()}
        self._table_width = -(-self.max_model_len // config.block_size)
        self._cascade = config.enable_cascade
        self._steps: dict[tuple[Shape, bool, tuple[int, ...]], StepPlan] = {}  # the last part: `_state_layers`
        self._last: tuple[Schedule, PreparedStep] | None = None
        self._state_layers: tuple[int, ...] = ()
        self._choices_changed = autotune.changes()
        self._embeddings: dict[Shape, tuple[StepInputs, Captured]] = {}
        hosted = config.swap_space // self.pool.block_bytes
        self._hosted = np.zeros((hosted, self.pool.block_bytes), np.uint8)  # its pages come as they are written
        self._stage, self._divides = opened.stage, opened.split is not None
        rows = max_rows(config) * self.config.dim if opened.takes_stream else 0
        self._arrived = Tensor.empty(rows, dtype=dtypes.float32, device=device).contiguous().realize() if rows else None
        self._is_first_start, self._likely_draw = False, opened.likely_draw
        self.kept_steps = kept_steps(self.placement, config, self._roots()) if config.num_ranks == 1 and opened.keeps_steps else None
        tested = self._test_kernels(config)
        self.self_test = tested if self.placement.is_cpu else packing + tested  # the CPU's grows with the steps
        self.rounds_in_background = True  # rounds that the device runs alone are in the background: the host has something to do meanwhile
        self.ranks = None if opened.memory is None else RankedSteps(config, opened, opened.memory, self.pool)

    def close(self) -> None:
        """End the other ranks."""
        if self.ranks is not None:
            self.ranks.close()

    def plan_of(self, shape: Shape, all_rows: bool = False) -> StepPlan:
        """The inputs and captures of steps of a shape, made when they are first wanted."""
        return self._steps.get((shape, all_rows, self._state_layers)) or self._new_step(shape, all_rows)

    def _roots(self) -> dict[str, object]:
        """What all steps read, and what decides their kernels."""
        pool = self.pool
        return {"model": self.model, "layers": self.caches, "constants": self._constants, "block_size": pool.block_size}

    def _test_kernels(self, config: EngineConfig) -> Report:
        """Compile what steps will launch, and test it. An engine that has started before has its kernels in the cache folder.

        On the CPU each step's kernels are tested before it runs for the first time: compiling those of the tests takes as long as those of
        the model.
        """
        needs = kept_needs(self.kept_steps, self.placement)
        if self.placement.is_cpu and captures_steps():
            report = test_before_first_run(self.placement)
            if needs is None:
                self._outlines().compile_ahead(config, self._likely_draw)
            self._is_first_start = needs is None
            return report
        outlines = self._outlines()
        if needs is None and (self.placement.is_cpu or self.placement.is_cuda):
            outlines.compile_ahead(config, self._likely_draw)
        collected: list[list[Need]] = [] if needs is None else [needs]

        def next_needs() -> list[Need]:
            return collected.pop() if collected else outlines.kernel_needs()

        report = test_kernels(self.placement, next_needs)
        if needs is None:
            keep_needs(self.kept_steps, outlines.kernel_needs())
        return report

    def _outlines(self) -> StepOutlines:
        return StepOutlines(self.model, self.pool, self.caches, self._constants, self.placement, self._inputs, self._history)

    def _test_packing(self, plan: WeightPlan, formats: set[str]) -> Report:
        """The self-test of the kernels that pack weights, before they do."""
        if plan.layout is not Layout.TILES:
            return Report()
        formats &= {*formats_in(Layout.TILES)}
        facts = [ShapeFacts(self.placement, inputs=packable_width(format, BLOCK), format=format) for format in sorted(formats)]
        return test_kernels(self.placement, lambda: [("pack_tiles", each) for each in facts])

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

    @property
    def packed_types(self) -> dict[str, list[str]]:
        """What kernels of the device compute with as packed: weight formats, and values of `kv_cache_dtype`."""
        return {"weights": [*packed_weights(self.placement)], "kv_cache": [*packed_caches(self.placement)]}

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
    def device(self) -> str:
        """tinygrad's name of the device."""
        return self.placement.device

    @property
    def overlaps(self) -> bool:
        """Whether a launch comes back before the step has run, so that the host can do something else meanwhile."""
        return self.placement.is_cuda or self.placement.is_metal

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

    @property
    def kv_bytes_by_layer(self) -> list[float]:
        """Bytes of the keys and values of one token that each layer of this process reads."""
        c, pool = self.config, self.pool
        shapes = [pool.shapes[c.kv_source(layer)] for layer in range(c.num_blocks)] if c.window_heads else [pool.block] * len(self.windows)
        return [shape.nbytes / pool.block_size for shape in shapes]

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer that this process has, 0 for full attention."""
        windows = tuple(self.config.windows) or (0,) * self.config.num_blocks
        return windows if self._stage is None else windows[self._stage.layers.start : self._stage.layers.stop]

    def choices(self) -> list[Choice]:
        """Every choice of a kernel that was made in this process so far."""
        return choices()

    def variants(self) -> list[str]:
        """The kernel variants that this machine can run on the engine's devices; which of them run decides the last bits of all results."""
        return [name for device in self.options.devices for name in usable_variants(Placement(device))]

    def num_threads(self) -> int:
        """Threads of the CPU's thread pool; 0 on other devices."""
        return thread_pool().num_threads if self.placement.is_cpu else 0

    def threads_in_words(self) -> str:
        """The number of threads and what it follows from."""
        return threads_in_words() if self.placement.is_cpu else "0 threads"

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
        if shape.decodes and self._is_first_start:  # all that was compiled ahead is used soon: later starts find it on disk
            self._is_first_start = False
            keep_needs(self.kept_steps, ())
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

    @staticmethod
    def gguf_metadata(path: Path) -> dict[str, object]:
        """The metadata of a GGUF file that is not the model's own."""
        return open_checkpoint(path).config
