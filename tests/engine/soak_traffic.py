"""Random traffic for minutes: arrivals of every kind, cancellations, bad requests, processors that raise, more work than there are blocks.

    nice -n 19 python -m tests.engine.soak_traffic --minutes 10 --seed 1

No request is lost: each ends, and for the expected reason. No request is wrong: a sample of them is compared with what an engine
gives that has nothing else to do. Nothing leaks: blocks, rows and tables are empty at the end and memory is what it was after warming up.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TINYVLLM_THREADS", "1")

import numpy as np  # noqa: E402

from tinyvllm import LLM, RequestOutput, SamplingParams  # noqa: E402
from tinyvllm.engine.engine import Engine  # noqa: E402
from tinyvllm.errors import BusyError, RequestError  # noqa: E402
from tinyvllm.request import BeamSearchParams, RequestOptions, StructuredOutputsParams  # noqa: E402

LONGEST, ROWS, BLOCKS, VOCAB = 160, 12, 20, 3072
RECURRENT_VOCAB = 256  # of the recorded models
WARM = 0.4  # of the time, before memory is looked at for the first time
GROWTH = 16.0  # MiB that it may grow after that; hashes of evicted blocks alone are remembered up to 14
CAPTURE = 0.15  # MiB of one captured step: each new shape, and each new set of sampling filters for a batch size, makes one and keeps it
STRUCTURES: tuple[dict[str, Any], ...] = (
    dict(regex="[a-z]{2,9} [0-9]{1,3}"),
    dict(choice=["yes", "no", "perhaps not"]),
    dict(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}),
)


def pushing(prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
    logits[40 + len(output) % 9] += 3.0
    return logits


class Raising:
    """A processor that raises after a number of tokens."""

    def __init__(self, after: int):
        self.after = after

    def __call__(self, prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
        if len(output) >= self.after:
            raise ValueError("on purpose")
        return logits


@dataclass
class Asked:
    """A request and what has been heard of it."""

    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    options: RequestOptions
    kind: str
    aborted: bool = False
    heard: dict[int, list[int]] = field(default_factory=dict)  # tokens that deltas gave, by index
    reasons: dict[int, str | None] = field(default_factory=dict)  # a delta is silent about a continuation that ended before


class Traffic:
    """Requests at random for an engine, and an engine that computes a sample of them alone. With `recurrent` the folder of a model with
    recurrent states, which has no tokenizer: without swapping, requests of several kinds, and texts.
    """

    def __init__(self, seed: int, check_every: int = 6, drafter: str | None = None, recurrent: Path | None = None):
        self.random, self.recurrent = random.Random(seed), recurrent is not None
        self.vocabulary = RECURRENT_VOCAB if self.recurrent else VOCAB
        common: dict[str, Any] = dict(device="CPU", max_model_len=LONGEST)
        if recurrent is not None:
            common |= dict(model=str(recurrent), dtype="float32", skip_tokenizer_init=True)
        self.llm = LLM(
            max_num_seqs=ROWS, max_num_batched_tokens=48, num_blocks=BLOCKS, swap_space=0 if self.recurrent else "1MB",
            max_num_queued_reqs=24, speculative_config=drafter and {"method": drafter, "num_speculative_tokens": 4}, **common
        )  # fmt: skip
        self.calm = LLM(max_num_seqs=8, max_num_batched_tokens=256, num_blocks=100, enable_prefix_caching=False, **common)
        self.engine = self.llm.engine
        self.engine.scheduler.prefixes.inflight.min_blocks = 1  # prompts are short here
        self.check_every = check_every
        self.asked: dict[str, Asked] = {}
        self.seen: Counter[str] = Counter()
        self.count = self.steps = 0
        self.preemptions = self.cached = 0  # of requests that have ended; tokens of prompts that were cached

    # ---- what is asked ----

    def prompt(self) -> list[int]:
        """Of four families, so that beginnings are shared; mostly short."""
        rng = self.random
        length = rng.choice((1, 3, 12, 16, 17, 30, 33, 48, 60, rng.randint(1, 110)))
        family = np.random.default_rng(rng.randrange(4)).integers(10, self.vocabulary, LONGEST)
        own = np.random.default_rng(rng.randrange(40)).integers(10, self.vocabulary, LONGEST)
        return [0, *family[: length * 3 // 4].tolist(), *own.tolist()][:length]

    def options(self) -> RequestOptions:
        rng = self.random
        return RequestOptions(
            priority=rng.choice((0, 0, 0, 0, 1, -1)),
            deadline_ms=rng.choice((None, None, None, None, None, 30.0, 400.0, 60_000.0)),
            ttft_deadline_ms=rng.choice((None, None, None, None, None, 100.0, 60_000.0)),
            key=rng.choice(("", "a", "b")),
            cache_salt=rng.choice((None, None, None, "salt")),
            receipt=rng.random() < 0.1,
            explain=rng.random() < 0.05,
        )

    def ask(self) -> Asked:
        rng, options = self.random, self.options()
        kinds = ("plain",) * 8 + ("shaped", "shaped", "several", "best", "beams", "scored", "grammar", "grammar", "processor", "raises")
        kind = rng.choice([kind for kind in kinds if not (self.recurrent and kind == "grammar")])
        tokens = rng.choice((1, 2, 5, 9, 17, 30, 45))
        if kind == "beams":
            stopping = rng.choice((True, False, "never"))
            return Asked(self.prompt(), BeamSearchParams(rng.choice((2, 3)), min(tokens, 9), early_stopping=stopping), options, kind)
        fields: dict[str, Any] = dict(max_tokens=tokens, temperature=0.0, ignore_eos=rng.random() < 0.7)
        if rng.random() < 0.5:
            fields |= dict(temperature=0.8, seed=rng.randrange(1000)) | rng.choice(({}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.03}))
        fields["output_kind"] = rng.choice(("cumulative", "delta", "final_only"))
        fields |= {
            "shaped": lambda: rng.choice((
                dict(repetition_penalty=1.3), dict(presence_penalty=0.5, frequency_penalty=0.3), dict(logit_bias={50: 5.0}),
                dict(min_tokens=tokens, stop_token_ids=[42]), dict(allowed_token_ids=list(range(30, 200))), dict(logprobs=2),
                *([] if self.recurrent else [dict(bad_words=[" the", "a", "once upon"]), dict(stop=["e", "on a"])]),
            )),
            "several": lambda: dict(n=rng.choice((2, 3))),
            "best": lambda: dict(n=1, best_of=2, temperature=0.9, seed=rng.randrange(1000)),
            "scored": lambda: dict(prompt_logprobs=1, output_kind="cumulative"),
            "grammar": lambda: dict(structured_outputs=StructuredOutputsParams(**rng.choice(STRUCTURES)), max_tokens=30),
            "processor": lambda: dict(logits_processors=[pushing]),
            "raises": lambda: dict(logits_processors=[Raising(rng.randrange(tokens))]),
        }.get(kind, dict)()  # fmt: skip
        return Asked(self.prompt(), SamplingParams(**fields), options, kind)

    def arrive(self) -> None:
        if self.random.random() < 0.06:
            self.refused(self.random.choice(([], [self.vocabulary + 5], [5] * LONGEST, [-1])), SamplingParams())
        asked, name = self.ask(), f"r{self.count}"
        self.count += 1
        try:
            self.engine.add(name, list(asked.prompt), asked.params, options=asked.options)
        except BusyError as error:
            self.seen[f"refused: {error.reason}"] += 1
            return
        self.asked[name] = asked
        self.seen[asked.kind] += 1
        if self.random.random() < 0.03:
            self.refused([5], SamplingParams(), name)

    def refused(self, prompt: list[int], params: SamplingParams, name: str = "bad") -> None:
        try:
            self.engine.add(name, prompt, params)
        except RequestError:
            self.seen["bad requests"] += 1
            return
        raise AssertionError(f"a bad request was taken: {prompt[:3]}")

    # ---- what comes ----

    def step(self) -> None:
        self.steps += 1
        for output in self.engine.step():
            asked = self.asked[output.request_id]
            asked.reasons |= {part.index: part.finish_reason for part in output.outputs}
            if isinstance(asked.params, SamplingParams) and asked.params.output_kind == "delta":
                for part in output.outputs:
                    asked.heard.setdefault(part.index, []).extend(part.token_ids)
            if output.finished:
                self.ended(output, self.asked.pop(output.request_id))

    def ended(self, output: RequestOutput, asked: Asked) -> None:
        reasons = list(asked.reasons.values())
        self.preemptions += output.metrics.preemptions
        self.cached += output.num_cached_tokens
        params = asked.params
        whole = isinstance(params, BeamSearchParams) or params.output_kind != "delta"
        for reason in reasons:
            self.seen[f"ended: {reason}"] += 1
        assert None not in reasons, f"{output.request_id}: {reasons}"
        if whole:
            width = (params.n or params.beam_width) if isinstance(params, BeamSearchParams) else params.n
            assert len(output.outputs) == width or asked.kind == "beams", f"{output.request_id}: {len(output.outputs)} of {width}"
        if asked.kind == "raises" and not asked.aborted:
            assert set(reasons) <= {"error", "deadline", "stop"}, reasons
        else:
            assert "error" not in reasons or asked.kind == "grammar", (asked, [part.error for part in output.outputs])
        if "abort" in reasons:
            assert asked.aborted
        if "deadline" in reasons:
            assert asked.options.deadline_ms is not None or asked.options.ttft_deadline_ms is not None
        cut = asked.aborted or bool({"abort", "deadline", "error"} & set(reasons)) or asked.options.deadline_ms is not None
        if asked.kind == "scored" and not cut:
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(asked.prompt)
        if self.random.randrange(self.check_every) == 0:
            self.compare(output, asked, cut)

    def compare(self, output: RequestOutput, asked: Asked, cut: bool) -> None:
        """With an engine that runs nothing else; a request that was cut short has a prefix of the tokens."""
        params = asked.params
        if isinstance(params, SamplingParams):
            params = replace(params, output_kind="cumulative")
        if asked.kind == "raises" or (cut and asked.kind in ("beams", "best")):
            return
        got = {part.index: part.token_ids for part in output.outputs} | asked.heard
        engine, last = self.calm.engine, []
        engine.add("calm", list(asked.prompt), params)
        while engine.has_work():
            last = engine.step() or last
        expected = {part.index: part.token_ids for part in last[0].outputs}
        same = all(expected[i][: len(tokens)] == tokens for i, tokens in got.items()) if cut else expected == got
        assert same, f"{output.request_id} ({asked.kind}, {asked.params}, {asked.options}): expected {expected}, got {got}"
        self.seen["compared"] += 1

    # ---- the run ----

    def turn(self) -> None:
        rng = self.random
        if len(self.asked) < 40 and rng.random() < 0.6:
            self.arrive()
        if self.asked and rng.random() < 0.02:
            name = rng.choice(list(self.asked))
            self.asked[name].aborted = True
            self.engine.abort(name)
        if rng.random() < 0.005:
            rounds, overlap, mode = (
                rng.choice((1, 4)),
                rng.random() < 0.5,
                rng.choice((None, "recompute" if self.recurrent else "swap", "recompute")),
            )
            self.engine.config = replace(self.engine.config, num_scheduler_steps=rounds, async_scheduling=overlap)
            self.engine.scheduler.limits = replace(self.engine.scheduler.limits, preemption=mode)
        if self.engine.has_work():
            self.step()

    def run_until(self, enough: Callable[[], bool], turns: int = 20_000) -> None:
        """Traffic until there was `enough` of it, however long the machine takes."""
        for _ in range(turns):
            if enough():
                break
            self.turn()
        self.drain()
        assert enough(), f"not after {turns} turns: {self.steps} steps, {dict(self.seen)}"

    def run(self, seconds: float, tell: Callable[[str], None] = lambda line: None) -> None:
        begun, told, memory, captures = time.monotonic(), 0, 0.0, 0
        while (passed := time.monotonic() - begun) < seconds:
            self.turn()
            if not memory and passed > WARM * seconds:
                memory, captures = resident(), self.captures()
            if int(passed) // 30 > told:
                told = int(passed) // 30
                tell(f"{passed:.0f} s: {self.steps} steps, {self.count} requests, {resident():.0f} MiB resident")
        self.drain()
        grown, captures = resident() - memory, self.captures() - captures
        tell(f"{self.steps} steps, {self.count} requests, {self.preemptions} preemptions, {self.engine.scheduler.num_swaps} swaps")
        tell(", ".join(f"{name} {count}" for name, count in sorted(self.seen.items())))
        tell(f"memory after warming up {memory:.0f} MiB, at the end {grown:+.1f} MiB, with {captures} captured steps more")
        assert grown < GROWTH + CAPTURE * captures or seconds < 300, f"{grown:.1f} MiB more than after warming up"

    def captures(self) -> int:
        engines = self.engine, self.calm.engine
        plans = [plan for engine in engines for plan in engine.runner._steps.values()]
        return sum(1 + len(plan.rounds) + len(plan.advances) for plan in plans) + sum(len(engine.sampler._steps) for engine in engines)

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.asked, f"never ended: {list(self.asked)}"
        check_empty(self.engine)

    def close(self) -> None:
        self.llm.close()
        self.calm.close()


def check_empty(engine: Engine) -> None:
    """Nothing is kept of requests that are over."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    scheduler.schedule()  # what held the sources of copies lets go of them
    assert pool.num_free == pool.num_blocks and [pool.reference_count(b) for b in range(pool.num_blocks)] == [0] * pool.num_blocks
    assert scheduler.host is None or scheduler.host.num_free == scheduler.host.num_blocks
    assert not (scheduler.running or scheduler.waiting or scheduler.waiting.num_tokens or scheduler._paused or scheduler._siblings)
    assert not (scheduler.deadlines or [*scheduler._copies] or scheduler.borrowed.num_held or scheduler.borrowed.num_wanted)
    assert not (scheduler.prefixes.inflight._computing or scheduler.prefixes.inflight._waiting)
    assert len(scheduler._free_rows) == scheduler.limits.max_num_seqs
    assert scheduler.states.snapshots is None or not scheduler.states.snapshots.num_held
    requests = engine.requests
    assert not (len(requests) or requests.owners or requests._rows or requests.have_output or engine.scoring or engine.loop.in_flight)
    assert not len(engine.constraints)


def resident() -> float:
    """MiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recurrent", metavar="FOLDER", type=Path, help="a model with recurrent states, as tests/tiny/golden/qwen3.5")
    parser.add_argument("--drafter", metavar="METHOD", help="speculate by a method without a model, such as suffix or eagle_lite")
    given = parser.parse_args()
    traffic = Traffic(given.seed, drafter=given.drafter, recurrent=given.recurrent)
    try:
        traffic.run(60 * given.minutes, lambda line: print(line, flush=True))
    finally:
        traffic.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
