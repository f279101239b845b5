"""The engine: one loop of schedule, run, sample, advance. Owns the requests; the rooms it calls own everything else."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.config import EngineConfig, cache_folder
from tinyvllm.engine.output import RequestState
from tinyvllm.errors import ModelError, OutOfMemoryError, RequestError
from tinyvllm.request import Logprob, RequestOutput, SamplingParams, Sequence
from tinyvllm.runner.device import start_device
from tinyvllm.scheduler import Schedule, Scheduled, Scheduler, SchedulerLimits
from tinyvllm.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Choice, PreparedStep, Reading
    from tinyvllm.sampling.sampler import SamplingFlags


# tinygrad's state of a capture under way is the process's, so engines in several threads take turns. They would in any case: a device does
# one step at a time.
_TURN = threading.RLock()
_SMALLER = "lower --num-blocks or --kv-memory, or take --quantization q8_0 or q4_0"


@dataclass(frozen=True)
class Launched:
    """A step of decodes that is running on the device and whose tokens nobody has looked at."""

    schedule: Schedule
    sequences: list[Sequence]  # by rows
    flags: SamplingFlags
    tokens: Reading


class Engine:
    """Serves requests step by step. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, config: EngineConfig, progress: Callable[[int, int, str], None] | None = None):
        device = start_device(config.device, cache_folder())
        from tinyvllm.runner.runner import Runner  # behind start_device, which sets what tinygrad reads at import
        from tinyvllm.sampling.sampler import Sampler

        try:
            with _TURN:
                self.runner = Runner(config, device, progress)
        except MemoryError as error:
            raise OutOfMemoryError(f"engine: the model and its cache do not fit {device}: {error}; {_SMALLER}") from error
        self.config = replace(config, device=device, max_model_len=self.runner.max_model_len)
        self.tokenizer = self._load_tokenizer()
        self.eos_ids = self.tokenizer.eos_ids if self.tokenizer else _eos_ids(self.runner.checkpoint.config)
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, self.runner.max_model_len)
        self.scheduler = Scheduler(limits, BlockPool(self.runner.pool.num_blocks, config.block_size))
        self.sampler = Sampler(self.runner.config.vocab_size, config.max_num_seqs, device)
        self._requests: dict[str, RequestState] = {}
        self._owners: dict[int, RequestState] = {}  # by sequence id
        self._rows: dict[int, int] = {}  # sequence id -> the row under which the sampler knows it
        self._changed: dict[str, RequestState] = {}
        self._next_id = 0
        self._ahead: Launched | None = None
        self.num_steps = 0  # since the start; each has streamed the weights once
        self._bandwidth: float | None = None

    def _load_tokenizer(self) -> Tokenizer | None:
        if self.config.skip_tokenizer_init:
            return None
        if self.config.tokenizer is not None:
            path = Path(self.config.tokenizer).expanduser()
            return load_tokenizer(path) if path.is_dir() else tokenizer_from_gguf(self.runner.gguf_metadata(path))
        checkpoint = self.runner.checkpoint
        return tokenizer_from_gguf(checkpoint.config) if checkpoint.kind == "gguf" else load_tokenizer(checkpoint.folder)

    @property
    def model_folder(self) -> Path:
        """Where the model's files lie, also those of a model that was named on a hub."""
        return self.runner.checkpoint.folder

    @property
    def model_bytes_per_token(self) -> int:
        """Bytes of weights that a decode step streams."""
        return self.runner.bytes_per_token

    def add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, prompt: str | None = None) -> None:
        """Queue a request; RequestError if it can never run. Nothing is queued then."""
        if request_id in self._requests:
            raise RequestError(f"request {request_id}: a request of this name is running already; choose another")
        V = self.runner.config.vocab_size
        if bad := next((t for t in prompt_token_ids if not 0 <= t < V), None):
            raise RequestError(f"request {request_id}: token id {bad} is outside the vocabulary of {V}")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if bad := next((t for t in ids or () if t >= V), None):
                raise RequestError(f"request {request_id}: {name} names token id {bad}, the vocabulary ends at {V - 1}")
        if params.seed is None:
            seed = secrets.randbits(63) if self.config.seed is None else (self.config.seed + self._next_id) % 2**64
            params = params.with_seed(seed)
        state = RequestState(
            request_id, prompt, prompt_token_ids, params, self.tokenizer, self.eos_ids, self.runner.max_model_len, time.monotonic(),
            first_sequence_id=self._next_id,
        )  # fmt: skip
        for sequence in state.sequences:
            self.scheduler.add(sequence)  # the first raises if any would: they are alike
        self._next_id += len(state.sequences)
        self._requests[request_id] = state
        self._owners |= {sequence.sequence_id: state for sequence in state.sequences}

    def abort(self, request_id: str) -> None:
        """End a request now; its last output, with finish_reason "abort", comes with the next step. Unknown names are over already."""
        state = self._requests.get(request_id)
        if state is not None:
            for sequence in [s for s in state.sequences if not s.finished]:
                self._finish(state, sequence, "abort")

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._changed) or self._ahead is not None

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs, so far or final, of every request that changed.

        Where a launch does not wait for the device, decodes run one step ahead of the host: the next step is launched before the tokens of
        the last one are looked at. What it computes for a sequence that turns out to have ended is surplus; it may write into blocks
        that are given away meanwhile, but whoever gets them writes behind it.
        """
        with _TURN:
            if self._ahead is None or not self._follow(self._ahead):
                schedule = self.scheduler.schedule()
                self._settle(schedule)
                if not schedule.empty:
                    self._run(schedule)
        return self._outputs()

    def _follow(self, before: Launched) -> bool:
        """Look at the tokens of the step that is ahead; whether the next one could be launched before that."""
        following = self.scheduler.follow(before.schedule) if self._goes_on(before) else None
        self._ahead = None
        try:
            if following is not None:
                self._launch_ahead(following, self.runner.prepare(following), before.flags)
        finally:  # a launch that fails must not take the last step's tokens with it
            self._collect(before)
        return following is not None

    def _goes_on(self, before: Launched) -> bool:
        """Whether somebody will want another token, as far as can be known without looking at the last."""
        return any(s.params.max_tokens is None or len(s.output_token_ids) + 1 < s.params.max_tokens for s in before.sequences)

    def _launch_ahead(self, schedule: Schedule, step: PreparedStep, flags: SamplingFlags) -> None:
        tokens = self.runner.decode(step, self.sampler.step(step.B, flags), flags, plain=not flags)
        self.sampler.drawn(step.B, flags, 1)
        self.num_steps += 1
        self.scheduler.advance(schedule)
        self._ahead = Launched(schedule, [entry.sequence for entry in step.sampling], flags, tokens)

    def _collect(self, launched: Launched) -> None:
        for sequence, token in zip(launched.sequences, launched.tokens.get()[: len(launched.sequences)].tolist(), strict=True):
            if not sequence.finished:
                self._append(sequence, token, None)

    def _run(self, schedule: Schedule) -> None:
        sequences = [entry.sequence for entry in schedule.entries if entry.samples]
        self._join(sequences)
        rounds = self._rounds(schedule)
        step = self.runner.prepare(schedule)
        sequences = [entry.sequence for entry in step.sampling]
        flags = self.sampler.prepare(sequences, step.B)
        if self.runner.overlaps and step.decodes and rounds == 1 and not self._looks_at_each(sequences):
            self._launch_ahead(schedule, step, flags)
            return
        result = self.runner.launch(step)
        self.num_steps += rounds
        self.scheduler.advance(schedule, rounds)
        if not sequences:
            return
        plain = result.best is not None and not flags
        sampled = self.sampler.draw(result.logits, flags) if result.best is None or flags else result.best
        if step.decodes:
            draw = None if plain else self.sampler.call(result.logits, flags)
            self.sampler.drawn(step.B, flags, rounds - 1)
            drawn = self.runner.advance(step, sampled, draw, rounds)
        else:
            drawn = iter([self.runner.tokens(sampled)])
        if rounds > 1:
            for tokens in drawn:  # while the device is at the next
                self._append_rounds(sequences, tokens)
            return
        (tokens,) = drawn
        chosen = tokens[0, : len(sequences)].tolist()
        logprobs = self.sampler.logprobs(result.logits, sequences, chosen)
        for sequence, token, logprob in zip(sequences, chosen, logprobs, strict=True):
            self._append(sequence, token, logprob)

    def _append_rounds(self, sequences: list[Sequence], tokens: np.ndarray) -> None:
        """Tokens [rounds, B]; what came after a sequence's end is surplus, which the device could not know."""
        for b, sequence in enumerate(sequences):
            for token in tokens[:, b].tolist():
                if not sequence.finished:
                    self._append(sequence, token, None)

    def _rounds(self, schedule: Schedule) -> int:
        """How many tokens each sequence of a schedule may get before the host must look; blocks for them are reserved."""
        wanted, sequences = self.config.num_scheduler_steps, [entry.sequence for entry in schedule.entries]
        if wanted == 1 or any(entry.num_tokens > 1 or not entry.samples for entry in schedule.entries):
            return 1
        if self.scheduler.waiting or self._looks_at_each(sequences):
            return 1
        longest = max(wanted if s.params.max_tokens is None else s.params.max_tokens - len(s.output_token_ids) for s in sequences)
        room = min(self.runner.max_model_len - len(s) for s in sequences)
        return self.scheduler.reserve(schedule, max(1, min(wanted, longest, room)))

    def _looks_at_each(self, sequences: list[Sequence]) -> bool:
        """Whether the host has something to do between a token and the next."""
        return self.sampler.withholds(sequences) or any(s.params.logprobs is not None for s in sequences)

    def _join(self, sequences: list[Sequence]) -> None:
        """Tell the sampler about those that were admitted, or admitted again, since their last token."""
        for sequence in sequences:
            if self._rows.get(sequence.sequence_id) != sequence.row:
                self.sampler.join(sequence, self.eos_ids)
                self._rows[sequence.sequence_id] = sequence.row

    def _append(self, sequence: Sequence, token: int, logprobs: dict[int, Logprob] | None) -> None:
        state = self._owners[sequence.sequence_id]
        if token < 0:  # no row of finite logits has no token: the weights or the activations of this request are broken
            self._finish(state, sequence, "error")
            return
        reason = state.append(sequence, token, logprobs)
        self._changed[state.request_id] = state
        if reason is not None:
            self._release(sequence, reason)

    def _finish(self, state: RequestState, sequence: Sequence, reason: str) -> None:
        state.finish(sequence, reason)
        self._changed[state.request_id] = state
        self._release(sequence, reason)

    def _release(self, sequence: Sequence, reason: str) -> None:
        row = self._rows.pop(sequence.sequence_id, None)
        if row is not None:
            self.sampler.leave(row)
        self.scheduler.finish(sequence, reason)
        del self._owners[sequence.sequence_id]

    def _settle(self, schedule: Schedule) -> None:
        """Preempted sequences leave the sampler; those that outgrew the whole cache are reported."""
        for sequence in schedule.preempted:
            row = self._rows.pop(sequence.sequence_id, None)
            if row is not None:
                self.sampler.leave(row)
        for sequence in schedule.exhausted:
            self._finish(self._owners[sequence.sequence_id], sequence, "length")

    def _outputs(self) -> list[RequestOutput]:
        changed, self._changed = self._changed, {}
        outputs = [state.output() for state in changed.values()]
        for output in outputs:
            if output.finished:
                del self._requests[output.request_id]
        return outputs

    def prompt_logits(self, token_ids: list[int]) -> np.ndarray:
        """Float32 logits [T, V] of every position of one prompt, computed beside whatever is running."""
        pool = self.scheduler.pool
        if not token_ids or len(token_ids) > self.runner.max_model_len:
            raise RequestError(f"prompt_logits: expected 1 to {self.runner.max_model_len} tokens, got {len(token_ids)}")
        sequence = Sequence(-1, "prompt_logits", list(token_ids), SamplingParams())
        sequence.block_table = pool.allocate(pool.blocks_for(len(token_ids)))
        try:
            size = self.config.max_num_batched_tokens
            starts = range(0, len(token_ids), size)
            entries = [Scheduled(sequence, start, min(size, len(token_ids) - start), False) for start in starts]
            with _TURN:
                return np.concatenate([self.runner.prompt_logits(entry) for entry in entries])
        finally:
            pool.release(sequence.block_table)

    def kernels(self) -> list[Choice]:
        """What runs each op of this model here. A prompt of two tokens and a decode are run for it, beside whatever is running."""
        self.prompt_logits([0, 0])
        self.prompt_logits([0])
        return self.runner.choices()

    def lanes(self) -> int:
        """Threads that the kernels of the CPU run on; 0 where another device computes."""
        return self.runner.lanes()

    def read_bandwidth(self) -> float:
        """Bytes a second that this machine reads from memory, measured at the first call."""
        if self._bandwidth is None:
            from tinyvllm.runner.memory import read_bandwidth

            self._bandwidth = read_bandwidth(self.config.device)
        return self._bandwidth

    def close(self) -> None:
        """Drop the model and the cache; the engine cannot be used afterwards. A second call does nothing."""
        self._ahead = None
        self.__dict__.pop("runner", None)
        self.__dict__.pop("sampler", None)


def _eos_ids(config: dict[str, object]) -> tuple[int, ...]:
    """End-of-sequence ids of a model without its tokenizer."""
    key = "tokenizer.ggml.eos_token_id" if "general.architecture" in config else "eos_token_id"
    eos: Any = config.get(key)
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(i) is not int for i in ids):
        raise ModelError(f"engine: {key} must be a token id or a list of them, got {eos!r:.80}")
    return tuple(i for i in ids if i >= 0)
