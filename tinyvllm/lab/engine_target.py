"""The engine as a target: one loaded model, whose drafter, K and policy change from cell to cell."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm.config.engine import EngineConfig, resolve
from tinyvllm.engine.engine import Engine
from tinyvllm.engine.prompt import encode_all
from tinyvllm.engine.tools.one_off import prompt_logits_by_chunk
from tinyvllm.errors import ArgumentError, ModelError, RequestError
from tinyvllm.lab.costs import StepCosts
from tinyvllm.lab.drafters import OpenDrafters, config_of, files_of, model_files, require_files
from tinyvllm.lab.engine_counts import CountedController, Counter
from tinyvllm.lab.settings import digest_text
from tinyvllm.lab.sweep import Cell, DrafterSpec, Sweep
from tinyvllm.lab.target import Answer, DraftCounts, Job, Limits
from tinyvllm.request import RequestOptions, RequestOutput, SamplingParams
from tinyvllm.speculate.opening import open_controller
from tinyvllm.speculate.protocol import Controller
from tinyvllm.version import VERSION

CHUNK = 128  # tokens whose logits are in memory at the same time
COST_TOKENS, COST_PROMPT = 24, 16  # a batch of the cost curve: tokens that each sequence generates, tokens of its prompt
_NO_FIGURE = ("record", "profile", "energy", "warm_up", "max_num_seqs")  # options that change no figure of a cell


class EngineTarget:
    """`sweep.engine` are the options of the engine, which is loaded for the first cell.

    By default prompts are not shared through the prefix cache: a repeat would find those of the last one. `open_drafters` are kept while
    others run: as many as take turns.
    """

    reports_tokens = True

    def __init__(self, sweep: Sweep, progress: Callable[[int, int, str], None] | None = None, open_drafters: int = 1):
        self._progress, self._counter = progress, Counter()
        self._engine: Engine | None = None
        options = {"enable_prefix_caching": False, **dict(sweep.engine), "speculative_config": "off"}
        rows = sweep.cost_rows if sweep.costs is None else ()
        options.setdefault("max_num_seqs", max(EngineConfig.max_num_seqs, *sweep.batch_sizes, *rows))
        self.config = resolve(options.pop("model", None), **options)
        self.config.require_one_engine()
        self._drafters = OpenDrafters(open_drafters)
        self._controllers: dict[tuple[DrafterSpec, int | None, str], Controller] = {}
        self._num_requests = 0

    def about(self) -> Mapping[str, Any]:
        settings = {name: value for name, value in asdict(self.config).items() if name not in _NO_FIGURE}
        files = digest_of([VERSION, settings, model_files(Path(self.config.model))])
        return {"target": "engine", "model": self.config.model, "engine": files}

    def about_drafter(self, drafter: DrafterSpec) -> Mapping[str, Any]:
        return {"drafter_files": digest_of(files)} if (files := files_of(drafter)) else {}

    def check(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            if cell.batch_size > self.config.max_num_seqs:
                raise ArgumentError(f"batch_sizes: {cell.batch_size} is more than max_num_seqs={self.config.max_num_seqs}; raise that")
            if cell.drafter.speculates:
                config_of(cell.drafter, cell.k)
                require_files(cell.drafter)

    def run(self, cell: Cell, jobs: Sequence[Job], limits: Limits, trial: str) -> tuple[list[Answer], DraftCounts]:
        engine = self.loaded()
        self._switch_to(engine, cell)
        prompts = [one.token_ids for one in encode_all(engine.tokenizer, [job.prompt.engine_prompt() for job in jobs])]
        common: dict[str, Any] = {"temperature": cell.temperature, "max_tokens": limits.max_tokens, "ignore_eos": limits.ignore_eos}
        # drafters and the prefix cache keep what they have learned for requests of the same salt
        salt = hashlib.blake2b(f"{cell}/{trial}".encode(), digest_size=8).hexdigest()
        answers = self._complete(engine, prompts, [SamplingParams(seed=job.seed, **common) for job in jobs], salt)
        return answers, self._counter.counts

    def _switch_to(self, engine: Engine, cell: Cell) -> None:
        if cell.is_baseline:
            engine.stop_speculation()
            return
        config = config_of(cell.drafter, cell.k)
        drafter, key = self._drafters.get(cell.drafter, cell.k, engine), (cell.drafter, cell.k, cell.policy.label)
        if key not in self._controllers:
            self._controllers[key] = CountedController(open_controller(config, drafter), self._counter)
        engine.speculate(drafter, self._controllers[key], cell.policy)
        if (take_states := engine.stages.on_states) is not None:
            engine.stages.on_states = self._counter.timed(take_states)

    def _complete(self, engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], salt: str) -> list[Answer]:
        """Run prompts as one batch to their ends. The error of a request that failed."""
        self._counter.begin()
        names = [f"lab-{self._num_requests + i}" for i in range(len(prompts))]
        self._num_requests += len(prompts)
        start, ended = time.monotonic(), dict[str, RequestOutput]()
        try:
            for name, prompt, one in zip(names, prompts, params, strict=True):
                engine.add(name, prompt, one, None, RequestOptions(cache_salt=salt))
            while len(ended) < len(names):
                ended |= {output.request_id: output for output in engine.step() if output.finished}
        finally:
            _abort_rest(engine, [name for name in names if name not in ended])
            _learn(engine)
        return [_answer(ended[name], start) for name in names]

    def costs(self, rows: Sequence[int]) -> StepCosts:
        """Steps of this number of sequences without drafts: the median of their times, after a batch that captured them."""
        engine = self.loaded()
        engine.stop_speculation()
        return StepCosts.of([(n, self._step_ms(engine, n)) for n in rows if n <= self.config.max_num_seqs])

    def _step_ms(self, engine: Engine, rows: int) -> float:
        chance = np.random.default_rng(rows)
        params = SamplingParams(temperature=0.0, max_tokens=COST_TOKENS, ignore_eos=True)
        for number in range(2):
            prompts = chance.integers(0, engine.runner.config.vocab_size, (rows, COST_PROMPT)).tolist()
            self._complete(engine, prompts, [params] * rows, f"costs {number}")
        return self._counter.step_ms(rows)

    def logits(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        first, start, rows = len(prompt_ids) - 1, 0, list[np.ndarray]()
        for part in prompt_logits_by_chunk(self.loaded(), [*prompt_ids, *tokens[:-1]], CHUNK):
            rows.append(part[max(0, first - start) :].copy())
            start += len(part)
        logits = np.concatenate(rows)
        if not np.isfinite(logits).all():
            raise ModelError("its logits are not finite: its weights or its configuration are broken")
        return logits

    def loaded(self) -> Engine:
        """The engine, with its usual steps captured."""
        if self._engine is None:
            self._engine = Engine(self.config, self._progress, observers=[self._counter])
            while self._engine.warmup():
                pass
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()


def _learn(engine: Engine) -> None:
    """As while a server is idle: the drafter learns and forgets what has ended. The next cell's speculation would not know of it."""
    while engine.speculation is not None and engine.speculation.on_idle():
        pass


def _abort_rest(engine: Engine, names: Sequence[str]) -> None:
    """End the requests of a batch that failed, so that the next cell has the engine for itself."""
    for name in names:
        engine.abort(name)
    while names and engine.has_work():
        engine.step()


def _answer(output: RequestOutput, start: float) -> Answer:
    if output.failure is not None:
        raise output.failure
    part, metrics = output.outputs[0], output.metrics
    if metrics.first_token is None or metrics.finished is None or part.finish_reason not in ("stop", "length"):
        raise RequestError(f"a request ended with {part.finish_reason}: {part.error or 'no token'}")
    return Answer(tuple(output.prompt_token_ids), tuple(part.token_ids), metrics.first_token - start, metrics.finished - start)


def digest_of(value: Any) -> str:
    """Sixteen characters that identify a value of JSON types."""
    return hashlib.blake2b(digest_text(value).encode(), digest_size=8).hexdigest()
