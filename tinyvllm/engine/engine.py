"""The engine: requests come in, steps run, outputs go out. The loop that runs a step is in loop.py, its stages in stages.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tinyvllm.runner.lean_tinygrad  # noqa: F401  first
from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.switches import cache_folder
from tinyvllm.engine.adapters import Adapters
from tinyvllm.engine.boundary import request_failure
from tinyvllm.engine.constraints import TokenConstraints
from tinyvllm.engine.draft_loop import SpeculativeLoop
from tinyvllm.engine.kept_costs import KeptCosts
from tinyvllm.engine.loop import PlainLoop, StepLoop, new_loop
from tinyvllm.engine.observer import EngineObserver, Observers
from tinyvllm.engine.output import ActiveRequest
from tinyvllm.engine.prefix_store import PrefixStore
from tinyvllm.engine.recovery import StepRecovery
from tinyvllm.engine.recurrent import fitted_to_states
from tinyvllm.engine.request_builder import RequestBuilder
from tinyvllm.engine.requests import ActiveRequests
from tinyvllm.engine.scoring import PromptScoring
from tinyvllm.engine.second_model import open_any_drafter
from tinyvllm.engine.segments import Segments
from tinyvllm.engine.speculation import Speculation, time_without_captures
from tinyvllm.engine.stages import Stages
from tinyvllm.engine.startup import DEVICE_LOCK, Progress, cache_facts, eos_ids_of, load_model_tokenizer, new_scheduler, start_runner
from tinyvllm.engine.stats import Costs, EngineStats, memory_bandwidth
from tinyvllm.engine.status import engine_status, explain_prefix
from tinyvllm.engine.warmup import new_warmup, tune_next
from tinyvllm.errors import RequestError, TinyvllmError
from tinyvllm.metrics import engine_metrics
from tinyvllm.request import BeamSearchParams, RequestOptions, RequestOutput, SamplingParams
from tinyvllm.runner.device import start_device
from tinyvllm.scheduler import Scheduler
from tinyvllm.speculate.opening import open_controller, open_policy
from tinyvllm.speculate.policies import EXACT, Policy
from tinyvllm.speculate.protocol import Controller, Drafter, StateDrafter

if TYPE_CHECKING:
    from tinyvllm.engine.energy import EngineEnergy
    from tinyvllm.engine.tools.trace import StepTrace
    from tinyvllm.runner.runner import Runner

log = logging.getLogger("tinyvllm")


class Engine:
    """Serves requests step by step. Not thread-safe: one thread adds, aborts and steps.

    `runner` is the model if it is loaded already. `observers` get the events of observer.py; `clock` gives the seconds that deadlines are
    compared with. A recording (`config.record`) is an observer that the caller adds: see tools/record.py. `energy` is one of the observers,
    which bills finished requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        runner: Runner | None = None,
        observers: Sequence[EngineObserver] = (),
        energy: EngineEnergy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._closed = False
        self.config = config = replace(config, device=start_device(config.device, cache_folder()))
        self.runner = runner or start_runner(config, progress)
        self.config = config = fitted_to_states(self.runner.options, self.runner)
        self.max_model_len = self.runner.max_model_len
        self.tokenizer = load_model_tokenizer(config, self.runner)
        self.eos_ids = self.tokenizer.eos_ids if self.tokenizer else eos_ids_of(self.runner.checkpoint.config)
        self._builder = RequestBuilder(self.runner.config.vocab_size, self.max_model_len, self.tokenizer, self.eos_ids, config.seed, clock)
        self._store = PrefixStore.open(self.runner, config)
        outside = Observers(observers)
        outside.engine_started(config, self.runner)
        scheduler = new_scheduler(config, self.runner, self._store, outside.watch_clock(clock))
        outside.cache_opened(scheduler.prefix)
        self.metrics = engine_metrics(
            config.served_model_name or config.model,
            str(config.data_parallel_rank or 0),
            self.max_model_len,
            cache_facts(config, scheduler),
        )
        self.energy = energy
        self.trace: StepTrace | None = None  # of tracing.py
        if energy is not None:
            self.metrics.energy = energy.totals
        self._connect(scheduler, observers)

    def _connect(self, scheduler: Scheduler, observers: Sequence[EngineObserver]) -> None:
        """The parts around a scheduler: statistics, requests, the stages of a step and the loop."""
        from tinyvllm.sampling.sampler import Sampler  # tinygrad comes with it

        config, runner = self.config, self.runner
        several = config.more_devices or config.on_gpus
        costs = Costs(runner.bytes_per_token, runner.kv_token_bytes, lambda: 0.0 if several else memory_bandwidth(config.device))
        self.stats = EngineStats(self.metrics, costs, scheduler, lambda: runner.capture_work().count, runner.architecture)
        if self.energy is not None:
            self.stats.bill = self.energy.bill
        self.observer = Observers([self.stats, *observers])
        self.sampler = Sampler(runner.config.vocab_size, config.max_num_seqs, config.device, runner.kept_steps)
        self.constraints = TokenConstraints(self.sampler, self.tokenizer, self.eos_ids, self.metrics)
        self.requests = ActiveRequests(scheduler, self.sampler, self.constraints, self.observer, self.eos_ids)
        self.adapters = Adapters(runner, self.requests.adapters_in_use)
        self.scoring = PromptScoring(self.requests, config.max_num_batched_tokens)
        self.requests.on_failure = self.scoring.remove
        self.segments = Segments(scheduler, runner.block_bytes, self.observer)
        self.stages = Stages(runner, self.sampler, self.constraints, self.requests, self.scoring, self.observer)
        run_ahead = runner.overlaps if config.async_scheduling is None else config.async_scheduling
        self.loop: StepLoop = new_loop(self.stages, config.num_scheduler_steps, run_ahead, config.pipeline_parallel_size)
        self._plain_loop = self.loop
        self.speculation: Speculation | None = None
        self._kept_costs: KeptCosts | None = None
        if config.speculative_config is not None:
            chosen = config.speculative_config
            drafter = open_any_drafter(config, chosen, runner, self.tokenizer)
            self._kept_costs = KeptCosts(runner, config, chosen.method)
            self.speculate(drafter, open_controller(chosen, drafter, self._kept_costs.costs), open_policy(chosen))
        for name, path in config.lora_modules:
            self.adapters.load(name, path)
        self.recovery = StepRecovery(self.stages, lambda: self.loop)
        self._run_ahead = run_ahead
        self._warmup = new_warmup(runner, self.sampler, config, run_ahead, self.speculation)

    def speculate(self, drafter: Drafter, controller: Controller, policy: Policy = EXACT) -> None:
        """Let a drafter guess tokens from the next step on. The output is the same, unless the policy is lossy."""
        self.loop.read()  # a step in flight is of the loop that launched it
        loop = self._plain_loop
        reads_states = isinstance(drafter, StateDrafter)
        self.runner.keep_states(drafter.state_layers if isinstance(drafter, StateDrafter) else ())
        if reads_states:  # it has its turn after each step
            loop = PlainLoop(self.stages)
        vocab_size, clock = self.runner.config.vocab_size, partial(time_without_captures, self.runner)
        self.speculation = Speculation(drafter, controller, self.requests, vocab_size, self.max_model_len, clock)
        self.stages.on_states = self.speculation.take_states if reads_states else None
        self.stats.speculation = self.speculation.method
        self.loop = SpeculativeLoop(self.stages, loop, self.speculation, policy)

    def stop_speculation(self) -> None:
        """Run without drafts from the next step on."""
        self.loop.read()
        self.runner.keep_states(())
        self.loop, self.speculation, self.stages.on_states, self.stats.speculation = self._plain_loop, None, None, ""
        self.requests.on_release = lambda sequence: None

    @property
    def scheduler(self) -> Scheduler:
        return self.requests.scheduler

    @property
    def model_folder(self) -> Path:
        """The folder of the model's files, also of a model from a hub."""
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
        """Queue a request; RequestError if it can never run, BusyError if the queue is full. Nothing is queued then.

        Any other exception on the way becomes an InternalError or OutOfMemoryError: admission is inside the request's boundary.
        """
        self.check_open()
        self.adapters.check(options.adapter if options else None)
        if request_id in self.requests:
            raise RequestError(f"request {request_id}: a request with this id is running; choose another id")
        request: ActiveRequest | None = None
        try:
            request = self._builder.build(request_id, prompt_token_ids, params, prompt, options or RequestOptions())
            self._admit(request)
        except Exception as error:
            if request is not None:
                self.scoring.remove(request_id)
                self.requests.withdraw(request)
            if isinstance(error, TinyvllmError):
                raise
            raise request_failure(request_id, "admission", error) from error

    def _admit(self, request: ActiveRequest) -> None:
        params, token_ids = request.params, request.prompt_token_ids
        if request.options.explain:
            request.explanation = explain_prefix(self.scheduler.prefix, self.tokenizer, token_ids, request.options)
        self.requests.constrain(request)
        try:
            self.requests.add(request)
        except TinyvllmError as error:
            self.observer.request_refused(request, error)
            raise
        self.observer.request_added(request)
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            self.scoring.add(request.request_id, token_ids, params.prompt_logprobs, request.options)

    def abort(self, request_id: str) -> None:
        """End a request; its last output, with finish_reason "abort", comes with the next step. Unknown ids have finished: ignored."""
        if request_id in self.requests:
            with self.requests.boundary(self.requests[request_id], "its abort"):
                self.observer.request_aborted(request_id)
                self.scoring.remove(request_id)
                self.requests.finish_request(request_id, "abort")

    def has_work(self) -> bool:
        """Whether another step has something to do or to report."""
        return self.scheduler.has_work() or self.requests.have_output or bool(self.scoring) or self.loop.in_flight

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs, so far or final, of every request that changed and whose caller wants them now.

        A request that fails has an output with `failure`. Raises only if the engine cannot continue: see boundary.py.
        """
        self.observer.step_started()
        with DEVICE_LOCK:
            self.recovery.run(self._run_step)
        outputs = self.requests.take_outputs(withheld=self.scoring.request_ids)
        self.observer.phase_ended("output")
        self.observer.step_finished()
        return outputs

    def _run_step(self) -> None:
        if not self.loop.follow():
            self.scoring.step(self.runner.prompt_logits)
            schedule = self.stages.schedule()
            if not schedule.empty:
                self.loop.run(schedule)

    def status(self) -> dict[str, Any]:
        """Numbers for a live view; may be called from any thread."""
        return engine_status(self.stats, self.segments)

    def between_steps(self) -> None:
        """Between two steps of a busy engine: write some of the newly cached blocks to the prefix store."""
        if self._store:
            self._store.write_some(busy=True)

    def on_idle(self) -> float | None:
        """While nothing runs: write some newly cached blocks, learn from past outputs, capture a step, time a kernel.

        Seconds until there may be more to do, None for nothing.
        """
        pause = self._store.write_some(busy=False) if self._store else None
        learns = self.speculation is not None and self.speculation.on_idle()
        return 0.0 if learns or self.warmup() else pause

    def warmup(self) -> bool:
        """Capture the next common step shape, if `warm_up` is set, or time a kernel's next candidate; False if none is left.

        Nothing may run. Once all are timed, captures with a slower kernel than the best are dropped, and common ones made again. A
        failure, as for want of memory, is logged and ends the warm-up: perhaps no request ever needs that shape.
        """
        if self._warmup is not None:
            try:
                with DEVICE_LOCK:
                    if self._warmup.capture_next():
                        return True
            except (MemoryError, RuntimeError) as error:
                log.warning("warm-up: no more steps are captured ahead of time: %s: %s", type(error).__name__, error)
                self.runner.forget_device_state()
            self._warmup = None
        if tune_next(self.runner):
            return True
        if dropped := self.runner.drop_slower_captures():
            if self.speculation is not None:
                self.speculation.drop_captures()
            self._warmup = new_warmup(self.runner, self.sampler, self.config, self._run_ahead, self.speculation)
        return dropped

    def check_open(self) -> None:
        """TinyvllmError after `close`."""
        if self._closed:
            raise TinyvllmError("engine: it was closed, and its model is no longer in memory; make a new LLM")

    def close(self) -> None:
        """Write the cached blocks to the prefix store, if there is one, and the cost curve, and drop the model. Again: nothing."""
        if self._closed:
            return
        if self._store and self.scheduler.prefix:
            self._store.save(self.scheduler.prefix)
        if self._kept_costs is not None:
            self._kept_costs.save()
        self._store = self._warmup = None
        self._closed = True
        self.runner.drop_untimed_kernels()
        self.constraints.close()
        self.adapters.close()
        self.observer.engine_closed()
        self.trace = None
        self.requests.on_release = lambda sequence: None  # it was the drafter's, which holds the model
        self.runner.close()
        for name in ("runner", "sampler", "stages", "loop", "_plain_loop", "speculation", "recovery"):
            self.__dict__.pop(name, None)
