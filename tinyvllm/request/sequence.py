"""A sequence of tokens in the engine. No text and no tensors."""

from __future__ import annotations

import enum
import math
from dataclasses import field

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request.options import RequestOptions
from tinyvllm.request.params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


SCORED_ROW, ONE_OFF_ROW = -1, -2  # of sequences outside the schedule: a prompt that is scored, and a pass of its own


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence of tokens being continued. The scheduler owns `status`, `block_table` and `num_computed`; the engine appends tokens.

    `num_computed` counts the tokens whose keys and values are in the cache. On preemption the scheduler resets it to 0, and prompt and
    output are computed again.
    """

    sequence_id: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    index: int = 0  # which of the request's n
    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: str | None = None
    block_table: list[int] = field(default_factory=list)  # row by row (windows.py)
    num_freed: int = 0  # leading rows of the table that have left the window: their windowed blocks are no longer held
    num_computed: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions that kept its blocks on the host
    row: int = SCORED_ROW  # of the sampling state, and of recurrent states, held while running
    state_source: int = -1  # the copy of recurrent states that its next step begins from, -1 for its own
    copy_slot: int = 0  # where a copy of its states is made, if copy_at is not 0
    copy_at: int = 0  # after how many tokens
    options: RequestOptions = field(default_factory=RequestOptions)
    arrival: float = 0.0  # seconds of time.monotonic
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks of known tokens, as far as they were needed
    num_published: int = 0  # leading rows of the table that are in the prefix cache's index
    num_cached: int = 0  # tokens found in the prefix cache at first admission
    host_table: list[int] = field(default_factory=list)  # host blocks that hold what was swapped out
    num_swapped: int = 0  # tokens in them
    logprobs: int | None = None  # of the drawn token and of that many most probable ones; None: of none
    due: float = math.inf  # seconds of time.monotonic: the earlier of its deadlines

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def adapter(self) -> int:
        """The number of its adapter in the runner, 0 for none."""
        return 0 if self.options.adapter is None else self.options.adapter.number

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop of prompt and output joined, without building the whole list."""
        prompt = len(self.prompt_token_ids)
        return self.prompt_token_ids[start:stop] + self.output_token_ids[max(0, start - prompt) : max(0, stop - prompt)]

    def token_at(self, position: int) -> int:
        """One token of prompt and output joined."""
        prompt = len(self.prompt_token_ids)
        return self.prompt_token_ids[position] if position < prompt else self.output_token_ids[position - prompt]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED
