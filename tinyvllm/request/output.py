"""Outputs: continuations, log-probabilities, times and what they cost."""

from __future__ import annotations

from dataclasses import field, replace

from tinyvllm.errors import TinyvllmError
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability under the unmodified logits, and its rank (1 is the most probable)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One continuation. `text` and `token_ids` grow until `finish_reason` is "stop", "length", "abort", "deadline" (its time was over), or
    "error" (broken logits, or what a grammar or a logits processor raised; `error` says it).

    `stop_reason` is the stop string or stop token id that ended it, None for the end-of-sequence token or a full length.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None  # of the tokens in `logprobs`; None without
    error: str | None = None  # why finish_reason is "error"

    def joined(self, later: CompletionOutput) -> CompletionOutput:
        """Two deltas of one continuation as one."""
        logprobs = None if later.logprobs is None else (self.logprobs or []) + later.logprobs
        return replace(later, text=self.text + later.text, token_ids=self.token_ids + later.token_ids, logprobs=logprobs)


@dataclass
class RequestMetrics:
    """Seconds on the engine's monotonic clock; None until it happened."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    scheduled: float | None = None  # first time in a step
    draft_tokens: int = 0  # tokens guessed ahead and checked, of all continuations
    accepted_tokens: int = 0  # those of them that became output

    def copy(self) -> RequestMetrics:
        """Dataclasses' own `replace` takes four times as long, and this is done for every output."""
        return RequestMetrics(
            self.arrival, self.first_token, self.finished, self.preemptions, self.scheduled, self.draft_tokens, self.accepted_tokens
        )


@dataclass(frozen=True)
class Energy:
    """What one request drew: in each of its steps, the share of its rows (docs/energy.md). None where nothing is measured.

    joules         above what the idle machine draws
    idle_joules    what the idle machine draws in the same time
    output_tokens  tokens generated
    joules_per_output_token  `joules` by these
    counters       what was measured, such as "cpu package-0" or "gpu 0"
    not_measured   why the rest was not, by part or counter
    """

    joules: float | None = None
    idle_joules: float | None = None
    output_tokens: int = 0
    joules_per_output_token: float | None = None
    counters: tuple[str, ...] = ()
    not_measured: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, joules: float, idle: float, tokens: int, counters: tuple[str, ...], not_measured: dict[str, str]) -> Energy:
        return cls(joules, idle, tokens, joules / tokens if tokens else None, counters, not_measured)

    def __add__(self, other: Energy) -> Energy:
        """Of two requests that one engine served."""
        if self.joules is None or self.idle_joules is None or other.joules is None or other.idle_joules is None:
            return self if self.joules is None else other
        tokens = self.output_tokens + other.output_tokens
        return Energy.of(self.joules + other.joules, self.idle_joules + other.idle_joules, tokens, other.counters, other.not_measured)


@dataclass
class Receipt:
    """What one request cost. A step's host and device seconds count whole for each request in it; its bytes are shared by rows.

    steps            steps that it took part in
    batch_sizes      how many of them had how many sequences, {sequences: steps}
    bytes_moved      its share of weights streamed and KV read and written
    architecture     what computed it, "sm_90" or "x86_64 avx512": the bits of sums, and so a token, may differ between two of them
    speculation      the method that guessed tokens ahead, "" for none; or why this request had none, such as "off: beam search"
    draft_tokens, accepted_tokens  tokens guessed ahead and checked, and those of them that became output
    roof             bytes_moved by device seconds, over the machine's measured bandwidth; None where that was not measured
    energy           what it drew
    """

    steps: int = 0
    batch_sizes: dict[int, int] = field(default_factory=dict)
    bytes_moved: float = 0.0
    roof: float | None = None
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    queue_seconds: float = 0.0
    preemptions: int = 0
    swaps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    architecture: str = ""
    speculation: str = ""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    energy: Energy = field(default_factory=Energy)


@dataclass
class RequestOutput:
    """All continuations of one prompt, so far (`finished` False) or for good."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # a dict a prompt token, None for the first
    receipt: Receipt | None = None  # on the last output, if RequestOptions.receipt is set
    explanation: str | None = None  # why the prefix cache hit or missed, if RequestOptions.explain is set
    energy: Energy | None = None  # on the last output, if RequestOptions.energy is set
    failure: TinyvllmError | None = None  # the exception that ended it, if its own work or a step raised; AsyncLLM raises it

    def joined(self, later: RequestOutput) -> RequestOutput:
        """Two deltas that follow each other as one, for a reader that was slower than the engine."""
        parts = {part.index: part for part in self.outputs}
        for part in later.outputs:
            parts[part.index] = parts[part.index].joined(part) if part.index in parts else part
        return replace(later, outputs=list(parts.values()))
