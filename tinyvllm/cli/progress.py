"""The progress of loading and of many requests, and the closing line with tokens and speed. All go to stderr."""

from __future__ import annotations

import math
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tinyvllm.placement import Placement
from tinyvllm.request import RequestOutput

if TYPE_CHECKING:
    from tqdm import tqdm

    from tinyvllm.engine.llm import LLM

PATIENCE = 0.5  # seconds of loading before a bar appears
PERIOD = 5.0  # seconds between two lines of progress where stderr is not a terminal


class LoadBar:
    """The `progress` argument of LLM: a tqdm bar over the bytes of the weights, once loading takes longer than PATIENCE."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._bar: tqdm | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._bar is None and done < total and time.monotonic() - self._started > PATIENCE:
            from tqdm import tqdm

            size = {"total": total, "unit": "B", "unit_scale": True, "unit_divisor": 1024}
            self._bar = tqdm(desc=what, leave=False, dynamic_ncols=True, file=sys.stderr, **size)
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Progress:
    """`done` of `total` units: a tqdm bar on a terminal, else a line every PERIOD seconds. Nothing with `quiet`."""

    def __init__(self, total: int, done: int, unit: str, quiet: bool, clock: Callable[[], float] = time.monotonic, *, failed: int = 0):
        self.total, self.done, self.failed = total, done, failed
        self._unit, self._clock, self._lines = unit, clock, not quiet and not sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._first, self._began, self._next = done, clock(), clock() + PERIOD
        if not quiet and not self._lines:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit=f" {unit}", dynamic_ncols=True, file=sys.stderr)

    def add(self, failed: bool = False) -> None:
        """One more is done."""
        self.done += 1
        self.failed += failed
        if self._bar is not None:
            self._bar.update()
        self.tick()

    def tick(self) -> None:
        """Print the line that is due; called often, also while nothing becomes done."""
        now = self._clock()
        if self._lines and now >= self._next:
            self._next = now + PERIOD
            failed = f", {self.failed} failed" if self.failed else ""
            rate = (self.done - self._first) / (now - self._began)
            say(f"{self.done} of {self.total} {self._unit}{failed}, {rate:.1f} a second")

    def close(self) -> None:
        """No more lines; may be called twice."""
        self._lines = False
        if self._bar is not None:
            self._bar.close()


class Tally:
    """The counts of finished outputs, without their texts."""

    def __init__(self) -> None:
        self.prompts = self.prompt_tokens = self.generated = 0
        self.drafts = self.accepted = 0  # tokens
        self.arrival, self.finished = math.inf, 0.0  # seconds: the first arrival, the last end
        self.waits = array("d")  # seconds to the first token
        self.last: RequestOutput | None = None

    @staticmethod
    def of(outputs: Iterable[RequestOutput]) -> Tally:
        tally = Tally()
        for output in outputs:
            tally.add(output)
        return tally

    def add(self, output: RequestOutput) -> None:
        metrics = output.metrics
        self.prompts += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.generated += sum(len(part.token_ids) for part in output.outputs)
        self.drafts += metrics.draft_tokens
        self.accepted += metrics.accepted_tokens
        self.arrival = min(self.arrival, metrics.arrival)
        self.finished = max(self.finished, metrics.finished or 0.0)
        if metrics.first_token is not None:
            self.waits.append(metrics.first_token - metrics.arrival)
        self.last = output


def closing_line(llm: LLM, tally: Tally, num_steps: int = 0) -> str:
    """Tokens, time to first token, tokens per second, accepted drafts, the share of the memory bandwidth, joules, and seconds of compiling.

    A step reads all weights once, so steps per second times the bytes of the weights is the bandwidth used. The speed of a single prompt is
    measured from its first token on. That of several is measured from their arrival to the end of the last, over the `num_steps` that the
    engine ran for them, and their time to first token is the median.
    """
    energy = "" if llm.engine.energy is None else f"; {llm.engine.energy.read().sentence(llm.engine.stats.num_tokens)}"
    return _figures(llm, tally, num_steps) + energy + _compiling(llm)


def _figures(llm: LLM, tally: Tally, num_steps: int) -> str:
    counts = f"{tally.prompt_tokens} prompt + {tally.generated} generated tokens"
    if tally.prompts != 1 or tally.last is None:
        return _of_several(llm, tally, f"{tally.prompts} prompts, {counts}", num_steps)
    metrics, parts = tally.last.metrics, tally.last.outputs
    if metrics.first_token is None or metrics.finished is None:
        return counts
    line = f"{counts}, first token after {metrics.first_token - metrics.arrival:.2f} s"
    seconds, steps = metrics.finished - metrics.first_token, max(len(part.token_ids) for part in parts) - 1
    if steps < 1 or seconds <= 0:
        return line
    steps -= tally.accepted // len(parts)  # each accepted draft is a step less
    return f"{line}, {(tally.generated - len(parts)) / seconds:.1f} tok/s{_drafts(tally)}{_share(llm, steps, seconds)}"


def _of_several(llm: LLM, tally: Tally, counts: str, num_steps: int) -> str:
    seconds = tally.finished - tally.arrival
    if not tally.waits or seconds <= 0:
        return counts
    from statistics import median  # which imports decimal numbers and fractions

    line = f"{counts} in {seconds:.2f} s, first token after {median(tally.waits):.2f} s (median)"
    return f"{line}, {tally.generated / seconds:.1f} tok/s{_drafts(tally)}{_share(llm, num_steps, seconds)}"


def _drafts(tally: Tally) -> str:
    """What became of the tokens that were guessed ahead; empty if there were none."""
    return f", {tally.accepted} of {tally.drafts} drafts accepted" if tally.drafts else ""


def _compiling(llm: LLM) -> str:
    """What a first use on this machine has cost; a second one finds the kernels in the cache folder."""
    seconds = llm.engine.runner.compile_seconds()
    return f"; {seconds:.1f} s since the start were spent compiling" if seconds >= 0.1 else ""


def _share(llm: LLM, num_steps: int, seconds: float) -> str:
    """The share of the host's memory bandwidth; empty if the weights are in the memory of another device."""
    if not Placement(llm.config.device).is_cpu:
        return ""
    from tinyvllm.engine.stats import memory_bandwidth

    bandwidth = memory_bandwidth(llm.config.device)
    share = num_steps * llm.engine.model_bytes_per_token / seconds / bandwidth
    return f", {share:.0%} of {bandwidth / 1e9:.0f} GB/s"


def say(text: str) -> None:
    """Print a line for the user to stderr, apart from the answer."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
