"""What a scheduler is given and what it returns: its limits, and one step."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import field

from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import Sequence
from tinyvllm.windows import BlockGroups, Window

Tokens = Row[int]  # token ids


@dataclass(frozen=True)
class SchedulerLimits:
    """`max_num_seqs` running sequences, `max_batched_tokens` tokens a step, `max_model_len` tokens of prompt and output together.

    `max_queued_reqs` requests and `max_queued_tokens` prompt tokens may wait in addition to what can start at once; None sets no limit.
    `block_bytes` is the size of a block in all layers, for the cost of a swap. `preemption` "recompute" or "swap" forces the method.
    `max_step_seconds` is the target for a step with decodes and chunks; None sets none. `window` is how many tokens a query sees in any
    layer of a window: blocks before them are freed; with 0 none are. `full_groups` and `window_groups` are those of `BlockGroups`.
    `recurrent`: sequences have states that are not in blocks. `max_drafts` of a sequence in a step: as many as its states keep; None sets
    no limit.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    max_queued_reqs: int | None = None
    max_queued_tokens: int | None = None
    block_bytes: int = 0
    preemption: str | None = None
    max_step_seconds: float | None = None
    window: int = 0
    full_groups: int = 0
    window_groups: int = 1
    recurrent: bool = False
    max_drafts: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ArgumentError(f"SchedulerLimits: max_num_seqs must be 1 or more, got {self.max_num_seqs}")
        if self.max_model_len < 2:
            raise ArgumentError(f"SchedulerLimits: max_model_len must leave room for a prompt and a token, got {self.max_model_len}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ArgumentError(
                f"SchedulerLimits: max_batched_tokens={self.max_batched_tokens} must give each of max_num_seqs={self.max_num_seqs} "
                "sequences a token a step; raise the one or lower the other"
            )

    def groups(self, block_size: int) -> BlockGroups:
        """The groups of a table whose blocks have `block_size` tokens."""
        return BlockGroups(Window(self.window, block_size), self.full_groups, self.window_groups)


@dataclass(slots=True)
class Scheduled:
    """Tokens start..start+num_tokens of `sequence` are computed in this step; its block table covers them.

    The last `num_logits` of them want logits. 0: a chunk before the end of its prompt. 1: the last known token, whose logits give the next
    one. k + 1: the last known token and k `drafts` after it, which this step checks; num_tokens is k + 1, too. Whether a draft's key and
    value are the sequence's own is known after the step: see drafts.py.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int
    drafts: Tokens = ()

    @property
    def is_decode(self) -> bool:
        """Whether it computes the last known token alone, and wants its logits: the entry may get drafts."""
        return self.num_tokens == self.num_logits == 1


@dataclass
class Schedule:
    """One step. `entries` holds first the decodes (one token and its drafts), then the chunks of prompts, each in order of rank.

    Before the step runs, blocks move in this order: `swap_out` (block, host block), `swap_in` (host block, block), `copies` (from, to).

    `preempted` sequences lost their rows and wait again. `exhausted` are finished, with reason "length": they have outgrown the whole
    cache. `expired` are finished, with reason "deadline". The caller reports both to clients. Any of the three may come without entries:
    then there is nothing to run in this step.

    A step of the same decodes, each sequence a token or more further, is the last step's object again: `reused` is True then, and `changed`
    names the entries that have reached another block since, or whose tables have grown.

    `max_chunk_tokens` is what the rates allow the chunks of a step with decodes; None where they were not consulted.
    """

    entries: list[Scheduled] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    max_chunk_tokens: int | None = None
    reused: bool = False
    changed: list[Scheduled] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    def drop_finished(self) -> None:
        """Remove the entries of sequences that have ended since."""
        self.entries = [entry for entry in self.entries if not entry.sequence.finished]

    @property
    def empty(self) -> bool:
        return not self.entries

    @property
    def moves(self) -> bool:
        """Whether a sequence has lost its row, or blocks move before the step."""
        return bool(self.preempted or self.exhausted or self.expired or self.swap_out or self.swap_in or self.copies)
