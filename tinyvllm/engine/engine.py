"""The engine: one loop of schedule, run, sample, advance. Owns the requests; the rooms it calls own everything else."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.config import EngineConfig, cache_folder
from tinyvllm.engine.beam import BeamState
from tinyvllm.engine.constraints import TokenConstraints
from tinyvllm.engine.output import ActiveRequest, RequestState
from tinyvllm.engine.prefix_store import PrefixStore
from tinyvllm.engine.request_builder import RequestBuilder
from tinyvllm.engine.segments import Segments
from tinyvllm.engine.stats import Costs, EngineStats
from tinyvllm.engine.tools import one_off
from tinyvllm.engine.tools.record import Recorder, header_of, record_to
from tinyvllm.engine.tools.scoring import Scores
from tinyvllm.engine.warmup import Warmup
from tinyvllm.errors import BusyError, ModelError, OutOfMemoryError, RequestError, TinyvllmError
from tinyvllm.metrics import engine_metrics
from tinyvllm.request import BeamSearchParams, Logprob, RequestOptions, RequestOutput, SamplingParams, Sequence
from tinyvllm.runner.device import start_device
from tinyvllm.scheduler import Schedule, Scheduler, SchedulerLimits
from tinyvllm.text.load import load_tokenizer, tokenizer_from_gguf
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Choice, PreparedStep, Reading
    from tinyvllm.sampling.sampler import SamplingFlags


# tinygrad's state of a capture under way is the process's, so engines in several threads take turns. They would in any case: a device does
# one step at a time.
_TURN = threading.RLock()
log = logging.getLogger("tinyvllm")
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

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int, str], None] | None = None,
        *,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`recorder` is told everything that a replay needs; `clock` is what deadlines are held against, in seconds."""
        device = start_device(config.device, cache_folder())
        config = replace(config, device=device)
        from tinyvllm.runner.runner import Runner  # behind start_device, which sets what tinygrad reads at import
        from tinyvllm.sampling.sampler import Sampler

        try:
            with _TURN:
                self.runner = Runner(config, device, progress)
        except MemoryError as error:
            raise OutOfMemoryError(f"engine: the model and its cache do not fit {device}: {error}; {_SMALLER}") from error
        self.config, self.max_model_len = config, self.runner.max_model_len
        self.tokenizer = self._load_tokenizer()
        self.eos_ids = self.tokenizer.eos_ids if self.tokenizer else _eos_ids(self.runner.checkpoint.config)
        self.clock = clock
        self.recorder = recorder
        if config.record is not None and recorder is None:
            checkpoint, blocks = self.runner.checkpoint, self.runner.pool.num_blocks
            header = header_of(config, blocks, str(self.runner.dtype), checkpoint.config, checkpoint.tensors)
            self.recorder = record_to(config.record, header)
        self._folder = PrefixStore.open(self.runner, config)
        self.scheduler = self._new_scheduler(self.recorder.watched(clock) if self.recorder else clock)
        self.segments = Segments(self.scheduler, self.runner.pool.block_bytes, self.recorder)
        self.sampler = Sampler(self.runner.config.vocab_size, config.max_num_seqs, device)
        self.metrics = engine_metrics(config.served_model_name or config.model, "0", self.runner.max_model_len, self._cache_facts())
        self.constraints = TokenConstraints(self.sampler, self.tokenizer, self.eos_ids, self.metrics)
        costs = Costs(self.runner.bytes_per_token, self.runner.pool.block_bytes // config.block_size, self.read_bandwidth)
        self.stats = EngineStats(self.metrics, costs, self.scheduler)
        self._requests: dict[str, ActiveRequest] = {}
        self._owners: dict[int, ActiveRequest] = {}  # by sequence id
        self._rows: dict[int, int] = {}  # sequence id -> the row under which the sampler knows it
        self._changed: dict[str, ActiveRequest] = {}
        self._scores = Scores(self.scheduler, config.max_num_batched_tokens)
        V, longest = self.runner.config.vocab_size, self.runner.max_model_len
        self._builder = RequestBuilder(V, longest, self.tokenizer, self.eos_ids, config.seed, clock)
        self._warmup = Warmup(self.runner, self.sampler, self.config, self._overlaps) if config.warm_up else None
        self._ahead: Launched | None = None
        self.num_steps = 0  # since the start; each has streamed the weights once
        self._bandwidth: float | None = None

    def _new_scheduler(self, clock: Callable[[], float]) -> Scheduler:
        config, blocks = self.config, self.runner.pool
        limits = SchedulerLimits(
            config.max_num_seqs, config.max_num_batched_tokens, self.runner.max_model_len, config.max_num_queued_reqs,
            config.max_num_queued_tokens, blocks.block_bytes, config.preemption_mode,
        )  # fmt: skip
        pool = BlockPool(blocks.num_blocks, config.block_size)
        prefix = PrefixCache(pool, self._folder.key if self._folder else secrets.token_bytes(32)) if config.enable_prefix_caching else None
        if self._folder and prefix:
            self._folder.restore(prefix)
        hosted = self.runner.swap_blocks
        return Scheduler(limits, pool, prefix, BlockPool(hosted, config.block_size) if hosted else None, clock)

    def _cache_facts(self) -> dict[str, object]:
        config = self.config
        return {
            "block_size": config.block_size,
            "num_gpu_blocks": self.scheduler.pool.num_blocks,
            "enable_prefix_caching": config.enable_prefix_caching,
            "swap_space": config.swap_space,
        }

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

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        prompt: str | None = None,
        options: RequestOptions | None = None,
    ) -> None:
        """Queue a request; RequestError if it can never run, BusyError if it must not wait now. Nothing is queued then."""
        if request_id in self._requests:
            raise RequestError(f"request {request_id}: a request of this name is running already; choose another")
        options = options or RequestOptions()
        state = self._builder.state_of(request_id, prompt_token_ids, params, prompt, options)
        if options.explain:
            state.explanation = self.explain(prompt_token_ids, options.cache_salt)
        if isinstance(params, SamplingParams):
            self.constraints.admit(state.sequences)
            self._begin(state)
        try:
            self.scheduler.add(state.sequences[0], state.sequences[1:])
        except TinyvllmError as error:
            for sequence in state.sequences:
                self.constraints.leave(sequence)
            if isinstance(error, BusyError):
                self.metrics.rejected(error.reason)
            if self.recorder is not None:
                self.recorder.refused(request_id, str(error), state.metrics.arrival)
            raise
        if self.recorder is not None:
            asked = state.params if isinstance(state, (RequestState, BeamState)) else params
            self.recorder.added(request_id, prompt_token_ids, asked, options, state.metrics.arrival)
        self._requests[request_id] = state
        self._owners |= {sequence.sequence_id: state for sequence in state.sequences}
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            self._scores.add(request_id, prompt_token_ids, params.prompt_logprobs)

    def _begin(self, state: ActiveRequest) -> None:
        """Give the outputs of a new request the tokens that they must begin with, if that does not end them at once."""
        for sequence in state.sequences:
            forced = self.constraints.begun(sequence)
            if state.max_tokens is None or len(forced) < state.max_tokens:
                for token in forced:
                    state.append(sequence, token, None)
                    self.constraints.took(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now; its last output, with finish_reason "abort", comes with the next step. Unknown names are over already."""
        state = self._requests.get(request_id)
        if state is not None:
            if self.recorder is not None:
                self.recorder.aborted(request_id)
            self._scores.end(request_id)
            for sequence in [s for s in state.sequences if not s.finished]:
                self._finish(state, sequence, "abort")

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._changed) or bool(self._scores) or self._ahead is not None

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs, so far or final, of every request that changed and wants to be told.

        Where a launch does not wait for the device, decodes run one step ahead of the host: the next step is launched before the tokens of
        the last one are looked at. What it computes for a sequence that turns out to have ended is surplus; it may write into blocks
        that are given away meanwhile, but whoever gets them writes behind it.
        """
        self.stats.begin()
        if self.recorder is not None:
            self.recorder.begin_step()
        with _TURN:
            if self._ahead is None or not self._follow(self._ahead):
                if self._scores:
                    self._score()
                schedule = self.scheduler.schedule()
                if not schedule.reused:
                    self._settle(schedule)
                self.stats.spent("schedule")
                if not schedule.empty:
                    self._run(schedule)
        outputs = self._outputs()
        self.stats.spent("output")
        self.stats.end()
        return outputs

    def _follow(self, before: Launched) -> bool:
        """Look at the tokens of the step that is ahead; whether the next one could be launched before that."""
        following = self.scheduler.follow(before.schedule) if self._continues(before) else None
        self._ahead = None
        self.stats.spent("schedule")
        try:
            if following is not None:
                self._launch_ahead(following, self.runner.prepare(following), before.flags)
        finally:  # a launch that fails must not take the last step's tokens with it
            self._collect(before)
        return following is not None

    def _continues(self, before: Launched) -> bool:
        """Whether somebody will want another token, as far as can be known without looking at the last."""
        if self._scores:
            return False
        return any(s.params.max_tokens is None or len(s.output_token_ids) + 1 < s.params.max_tokens for s in before.sequences)

    def _launch_ahead(self, schedule: Schedule, step: PreparedStep, flags: SamplingFlags) -> None:
        tokens = self.runner.decode(step, self.sampler.step(step.num_logits, flags), flags, plain=not flags)
        self.sampler.mark_drawn(step.num_logits, flags, 1)
        self.num_steps += 1
        self._launched(schedule, 1)
        self.scheduler.advance(schedule)
        self._ahead = Launched(schedule, [entry.sequence for entry in step.logit_rows], flags, tokens)
        self.stats.spent("prepare")

    def _collect(self, launched: Launched) -> None:
        tokens = launched.tokens.get()[: len(launched.sequences)].tolist()
        self.stats.spent("run")
        for sequence, token in zip(launched.sequences, tokens, strict=True):
            if not sequence.finished:
                self._append(sequence, token, None)

    def _run(self, schedule: Schedule) -> None:
        if not schedule.reused:
            self._join(schedule)
        rounds = self._rounds(schedule)
        step = self.runner.prepare(schedule)
        sequences = [entry.sequence for entry in step.logit_rows]
        flags = self.sampler.prepare(sequences, step.num_logits, schedule.reused)
        self.constraints.begin(sequences)
        if self._overlaps and step.decodes and rounds == 1 and not self._looks_at_each(sequences):
            self._launch_ahead(schedule, step, flags)
            return
        self.stats.spent("prepare")
        self._launched(schedule, rounds)
        result = self.runner.launch(step)
        self.num_steps += rounds
        self.scheduler.advance(schedule, rounds)
        if not sequences:
            self.stats.spent("run")
            return
        failures = self.constraints.finish(result.logits, sequences)
        plain = result.best is not None and not flags and not self.constraints.processes(sequences)
        sampled = result.best if plain and result.best is not None else self.sampler.draw(result.logits, flags)
        if step.decodes and not self._searches(sequences):
            draw = None if plain else self.sampler.call(result.logits, flags)
            self.sampler.mark_drawn(step.num_logits, flags, rounds - 1)
            drawn = self.runner.advance(step, sampled, draw, rounds)
        else:
            drawn = iter([self.runner.tokens(sampled)])
        if rounds > 1:
            for tokens in drawn:  # while the device is at the next
                self._append_rounds(sequences, tokens)
            self.stats.spent("run")
            return
        (tokens,) = drawn
        self.stats.spent("run")
        chosen = tokens[0, : len(sequences)].tolist()
        logprobs = self.sampler.logprobs(result.logits, sequences, chosen)
        self.stats.spent("sample")
        for sequence, token, logprob in zip(sequences, chosen, logprobs, strict=True):
            if sequence.sequence_id in failures:
                self._finish(self._owners[sequence.sequence_id], sequence, "error", failures[sequence.sequence_id])
            else:
                self._append(sequence, token, logprob)

    def _searches(self, sequences: list[Sequence]) -> bool:
        """Whether one of them is a beam: what follows it need not be the token drawn, which the device would go on with."""
        return any(s.logprobs is not None and isinstance(self._owners[s.sequence_id], BeamState) for s in sequences)

    def _launched(self, schedule: Schedule, rounds: int) -> None:
        if self.recorder is not None:
            self.recorder.launched(schedule, rounds)
        self.stats.launched(schedule, self._owners, rounds)

    def _append_rounds(self, sequences: list[Sequence], tokens: np.ndarray) -> None:
        """Tokens [rounds, B]; what came after a sequence's end is surplus, which the device could not know."""
        for b, sequence in enumerate(sequences):
            for token in tokens[:, b].tolist():
                if not sequence.finished:
                    self._append(sequence, token, None)

    @property
    def _overlaps(self) -> bool:
        """Whether a step of decodes is launched before the last one's tokens are looked at."""
        wanted = self.config.async_scheduling
        return self.runner.overlaps if wanted is None else wanted

    def _rounds(self, schedule: Schedule) -> int:
        """How many tokens each sequence of a schedule may get before the host must look; blocks for them are reserved."""
        wanted = self.config.num_scheduler_steps
        if wanted == 1 or any(entry.num_tokens != 1 or entry.num_logits != 1 for entry in schedule.entries):
            return 1
        sequences = [entry.sequence for entry in schedule.entries]
        if self.scheduler.waiting or self._scores or self._looks_at_each(sequences):
            return 1
        longest = max(wanted if s.params.max_tokens is None else s.params.max_tokens - len(s.output_token_ids) for s in sequences)
        room = min(self.runner.max_model_len - len(s) for s in sequences)
        return self.scheduler.reserve(schedule, max(1, min(wanted, longest, room)))

    def _looks_at_each(self, sequences: list[Sequence]) -> bool:
        """Whether the host has something to do between a token and the next."""
        return (
            self.sampler.withholds(sequences) or self.constraints.looks_at_each(sequences) or any(s.logprobs is not None for s in sequences)
        )

    def _join(self, schedule: Schedule) -> None:
        """Tell the sampler about those that were admitted, or admitted again, since their last token."""
        for sequence in [entry.sequence for entry in schedule.entries if entry.num_logits]:
            if self._rows.get(sequence.sequence_id) != sequence.row:
                self.sampler.add(sequence, self.eos_ids)
                self.constraints.joined(sequence)
                self._rows[sequence.sequence_id] = sequence.row

    def _append(self, sequence: Sequence, token: int, logprobs: dict[int, Logprob] | None) -> None:
        state = self._owners[sequence.sequence_id]
        if token < 0:  # no row of finite logits has no token: the weights or the activations of this request are broken
            self._finish(state, sequence, "error", "the model gave no finite logits; its weights or its cache are broken")
            return
        reason = state.append(sequence, token, logprobs)
        self.stats.waited(state, 1)
        self._changed[state.request_id] = state
        if isinstance(state, BeamState):
            if state.ready:
                self._turn(state)
        elif reason is not None:
            self._release(sequence, reason)
        else:
            self._shape(state, sequence)

    def _shape(self, state: ActiveRequest, sequence: Sequence) -> None:
        """What follows from a token that was drawn: others that are forced, or the end."""
        forced, reason, error = self.constraints.took(sequence)
        while forced and reason is None:
            token = forced.pop(0)
            self.stats.stats.forced_tokens += 1
            self.stats.waited(state, 1)
            ended = state.append(sequence, token, None)
            if ended is not None:
                self._release(sequence, ended)
                return
            more, reason, error = self.constraints.took(sequence)
            forced = forced or more
        if reason is not None:
            self._finish(state, sequence, reason, error)

    def _turn(self, search: BeamState) -> None:
        """The next round of a beam search: forks first, while what they come from is as it was."""
        turn = search.turn()
        for parent, child in turn.forks:
            self._owners[child.sequence_id] = search
            self.scheduler.fork(parent, child)
        for sequence, token in turn.tokens:
            sequence.output_token_ids.append(token)
        for sequence in turn.over:
            self._release(sequence, "stop")

    def _finish(self, state: ActiveRequest, sequence: Sequence, reason: str, error: str | None = None) -> None:
        state.finish(sequence, reason, error)
        self._changed[state.request_id] = state
        self._release(sequence, reason)
        if isinstance(state, BeamState):  # its beams stand and fall together
            for other in [s for s in state.sequences if not s.finished]:
                self._release(other, reason)

    def _release(self, sequence: Sequence, reason: str) -> None:
        self._leave(sequence)
        self.constraints.leave(sequence)
        self.scheduler.finish(sequence, reason)
        self._owners.pop(sequence.sequence_id, None)

    def _leave(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence.sequence_id, None)
        if row is not None:
            self.sampler.remove(row)

    def _settle(self, schedule: Schedule) -> None:
        """Preempted sequences leave the sampler; those that outgrew the whole cache or their time are reported; blocks move.

        Beams fall together: whom a finished one takes along may be reported himself, or be among the entries.
        """
        if self.recorder is not None:
            self.recorder.settled(schedule)
        for sequence in schedule.preempted:
            self._leave(sequence)
        for ended, reason in ((schedule.exhausted, "length"), (schedule.expired, "deadline")):
            for sequence in ended:
                if (state := self._owners.get(sequence.sequence_id)) is not None:
                    self._finish(state, sequence, reason)
        if schedule.exhausted or schedule.expired:
            schedule.entries = [entry for entry in schedule.entries if not entry.sequence.finished]
        if schedule.preempted:
            self.stats.preempted(schedule)
        if schedule.swap_out or schedule.swap_in or schedule.copies:
            start = time.perf_counter()
            self.runner.move(schedule)
            if schedule.swap_out or schedule.swap_in:
                self.stats.moved(schedule, time.perf_counter() - start, self.runner.pool.block_bytes)

    def _score(self) -> None:
        """One piece of one prompt whose log-probabilities are wanted."""
        score = self._scores.step(self.runner.prompt_logits)
        if score is None:
            return
        state = self._requests[score.request_id]
        assert isinstance(state, RequestState)
        if score.done:
            state.prompt_logprobs = state.named(score.logprobs)
            self._changed[score.request_id] = state
            return
        for sequence in [s for s in state.sequences if not s.finished]:
            self._finish(state, sequence, "error", f"prompt_logprobs: the KV cache has no room for {len(score)} tokens once more")

    def _outputs(self) -> list[RequestOutput]:
        """Of those that changed; who waits for its prompt's log-probabilities is told nothing before."""
        changed, self._changed = self._changed, {}
        outputs: list[RequestOutput] = []
        for request_id, state in changed.items():
            if request_id in self._scores:
                continue
            output = state.output()
            if output is None:
                continue
            if output.finished:
                del self._requests[request_id]
                self.stats.finished(output, state)
                if self.recorder is not None:
                    self.recorder.finished(request_id, _ends(state, output))
            outputs.append(output)
        return outputs

    def explain(self, prompt_token_ids: list[int], cache_salt: str | None = None) -> str:
        """Why the prefix cache has of a prompt what it has: blocks found and evicted, and where the nearest cached prompt differs."""
        prefix = self.scheduler.prefix
        if prefix is None:
            return "prefix caching is off"
        found = prefix.explain(prompt_token_ids, cache_salt)
        blocks = len(prompt_token_ids) // self.config.block_size
        text = f"{found.hit_blocks} of {blocks} blocks hit, {found.evicted_blocks} were evicted"
        if found.first_difference is None:
            return text
        return f"{text}; diverged at token {found.first_difference}: {self._shown(found.ours)} vs {self._shown(found.theirs)}"

    def _shown(self, token_ids: list[int]) -> str:
        return repr(self.tokenizer.decode(token_ids, skip_special_tokens=False) if self.tokenizer else token_ids)

    def status(self) -> dict[str, Any]:
        """Numbers for a live view; may be called from any thread."""
        scheduler, pool, prefix, stats = self.scheduler, self.scheduler.pool, self.scheduler.prefix, self.stats.stats
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "blocks": {"used": pool.num_blocks - pool.num_free, "cached": pool.num_evictable, "total": pool.num_blocks},
            "prefix": {"queries": prefix.queries, "hits": prefix.hits, "evictions": prefix.evictions} if prefix else None,
            "segments": self.segments.status(),
            "steps": self.num_steps,
            "tokens": self.stats.num_tokens,
            "step_seconds": {name: getattr(stats, name) for name in ("schedule", "prepare", "run", "sample", "output")},
            "predicted_wait": scheduler.predicted_wait(),
        }

    def prompt_logits(self, token_ids: list[int]) -> np.ndarray:
        """Float32 logits [T, V] of every position of one prompt, computed beside whatever is running."""
        with _TURN:
            return one_off.prompt_logits(self.runner, self.scheduler, token_ids)

    def embed(self, token_ids: list[int], pooling: str = "mean", normalize: bool = True) -> np.ndarray:
        """One prompt as a vector float32 [E]: its hidden states' mean, or the last of them, made of length 1 where `normalize` says so."""
        with _TURN:
            return one_off.embed(self.runner, self.scheduler, token_ids, pooling, normalize)

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

    def tend(self, busy: bool) -> float | None:
        """What has time, between two steps: some of what is newly cached goes to its folder, and where nothing runs a step is captured.

        Seconds until there may be more to do, None for nothing.
        """
        pause = self._folder.tend(busy) if self._folder else None
        return 0.0 if not busy and self.warm() else pause

    def warm(self) -> bool:
        """Capture one of the usual steps, if `warm_up` asks for it; False where none is left. Nobody must be running.

        Where that fails, as for want of memory, it is said through the log and ends: perhaps nobody ever needs that step.
        """
        if self._warmup is None:
            return False
        try:
            with _TURN:
                more = self._warmup.next()
        except (MemoryError, RuntimeError) as error:
            log.warning("no more steps are captured beforehand: %s: %s", type(error).__name__, error)
            more = False
        if not more:
            self._warmup = None
        return more

    def close(self) -> None:
        """Write what is cached to its folder, if there is one, and drop the model. No use afterwards; a second call does nothing."""
        if self._folder and self.scheduler.prefix:
            self._folder.keep(self.scheduler.prefix)
        self._ahead = self._folder = self._warmup = None
        self.constraints.close()
        self.__dict__.pop("runner", None)
        self.__dict__.pop("sampler", None)


def _ends(state: ActiveRequest, output: RequestOutput) -> list[tuple[list[int], str | None]]:
    """Token ids and reason of everything that ran: of best_of more than is given out, of beams what is."""
    if isinstance(state, BeamState):
        return [(part.token_ids, part.finish_reason) for part in output.outputs]
    return [(sequence.output_token_ids, sequence.finish_reason) for sequence in state.sequences]


def _eos_ids(config: dict[str, object]) -> tuple[int, ...]:
    """End-of-sequence ids of a model without its tokenizer."""
    key = "tokenizer.ggml.eos_token_id" if "general.architecture" in config else "eos_token_id"
    eos: Any = config.get(key)
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(i) is not int for i in ids):
        raise ModelError(f"engine: {key} must be a token id or a list of them, got {eos!r:.80}")
    return tuple(i for i in ids if i >= 0)
