"""What a way of guessing drafts implements. A draft can only cost speed: the engine keeps it only if it is the token that comes anyway.

The engine draws the token of every position from the model's own logits, by (seed, position). A draft is accepted exactly if it equals that
token, so the output is the same with any drafter, with any number of drafts, and with none (drafter invariance; Daliri et al. 2024,
arXiv:2408.07978, have the general theory).

One step of the engine, as a drafter sees it, always in the engine's thread:

1. `observe`, for every sequence with tokens that are new since the last call for it, whichever loop has computed them. The first call for
   a sequence counts from the end of its prompt.
2. `recurs` of a `LookupDrafter`, if the controller `pauses`; where it is False for all sequences, the rest of 2 is left out. Then
   `Controller.limits`, `propose` for the sequences with a limit of 1 or more for which it is True, and `Controller.choose`.
3. The target's forward pass over the last known token of each sequence and its drafts, the draws, the acceptance.
4. `observe_states` of a `StateDrafter`, then `Controller.observe` and `observe_step`.

`forget` comes once, after a sequence has ended and after a last `observe`. A sequence that is preempted is not forgotten: it comes back
later, with the same `sequence_id` and tokens, usually with other blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import Sequence

if TYPE_CHECKING:
    from tinygrad import Tensor

    from tinyvllm.runner.prepare import Shape

FINAL = -1  # in `StateDrafter.state_layers`: the last layer's output after the final norm, what the head multiplies


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that may get drafts in the next step: at most `max_drafts` of them, 1 or more.

    The drafter reads the sequence's tokens (`token_ids`, `token_at`, `len`) and changes nothing. Sequences of different `tenant` must not
    learn of each other's tokens, also not by speed.
    """

    sequence: Sequence
    max_drafts: int
    tenant: str = ""


@dataclass(slots=True)
class Draft:
    """Tokens that may follow the sequence's last one.

    `confidences` holds for each the drafter's estimate, 0 to 1, that it is right if those before it are; empty: it has none.
    """

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)


class Drafter(Protocol):
    """One way of guessing. A method that raises ends speculation by this drafter, never a request.

    `looks_up`: `propose` runs no model and takes microseconds. Then the engine also calls it while a step is in flight, to see whether it
    would guess, and drops the drafts; where it would not, the next step is launched without a wait for the last one's tokens.
    """

    method: str
    looks_up: bool

    def propose(self, requests: Row[DraftRequest]) -> list[Draft]:
        """One draft for each request, in their order; an empty one where there is no guess. May be called twice for the same tokens."""
        ...

    def observe(self, sequence: Sequence, num_new: int) -> None:
        """The last `num_new` tokens of the sequence are final: drawn by the model or forced by a grammar, and appended."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended; nothing is kept for it. What its text has taught may stay, for its own tenant and within bounds."""
        ...


@runtime_checkable
class LookupDrafter(Drafter, Protocol):
    """A drafter that looks tokens up, and tells without a search that it has nothing to look up. `looks_up` is True."""

    def recurs(self, sequence: Sequence, tenant: str, times: int = 1) -> bool:
        """Whether `propose` may have a draft after the sequence's last token. Where it is False, neither controller nor drafter is called.

        `times` as many tokens must recur as for a sequence alone: in large batches few drafts pay, and only likely ones.

        It takes microseconds, since it is called every few tokens of each sequence. False is also right where a draft would rarely pay.
        """
        ...

    def learn_past(self, max_tokens: int) -> bool:
        """Learn at most that many tokens of outputs that have ended; False if none wait.

        Called while the engine is idle, and if it never is, next to prompts. Until then `forget` is delayed, too.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows first_row .. first_row + count of a step's states: those of the sequence's tokens at positions start .. start + count.

    Only tokens that the sequence has: rows of rejected drafts are left out.
    """

    sequence: Sequence
    start: int
    first_row: int
    count: int


@runtime_checkable
class StateDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states: Medusa and EAGLE heads.

    `state_layers` says which: i >= 0 is the residual stream after i layers (0: the embedding), FINAL the states after the final norm. It is
    constant. While such a drafter is on, every token of every running sequence is computed in a step whose states it gets, prompts
    included, in order of position and once; after a preemption again from wherever the sequence restarts. Positions that came from
    the prefix cache, from a swap or from a fork are not computed and have no states: `start` then is beyond the last position delivered.
    """

    state_layers: tuple[int, ...]

    def observe_states(self, states: Tensor, rows: Row[StateRows]) -> None:
        """States float32 [T, len(state_layers) * E] of a step's flat batch, the layers of a token one after another, on the device.

        Called after each step, its drawn tokens appended. The tensor is a realized buffer that the next step may overwrite: read or copy
        what is needed before returning. The order of the rows in it is unspecified except as `rows` says.
        """
        ...


@runtime_checkable
class CapturesAhead(Protocol):
    """A drafter that runs captured functions on the device, and can capture them before a request waits for them."""

    def capture(self, shape: Shape, states: Tensor | None) -> None:
        """Run once, on padding, what comes before and after steps of this shape. No sequence exists.

        `states` are the hidden states of such a step, for a `StateDrafter`.
        """
        ...

    def drop_captures(self) -> None:
        """Forget all captures; each is made again where it is next used: other kernels are faster."""
        ...


class Controller(Protocol):
    """Decides how many drafts are asked for and verified. `num_sequences` counts those that get a token in the step; parts of prompts
    next to them are left out: a draft is weighed by what it costs in a step of decodes alone.

    A method that raises ends speculation. `limits` and `choose` may also be called for a step that then runs without drafts, and
    twice for the same tokens: while a step is in flight, to see whether drafts would follow (`Drafter.looks_up`).

    `pauses`: it leaves out tokens, so a `LookupDrafter` is asked every few tokens only whether anything recurs. A controller with a fixed
    number of drafts wants each draft that there is.
    """

    @property
    def pauses(self) -> bool: ...

    def limits(self, sequences: Row[Sequence], num_sequences: int) -> list[int]:
        """At most how many drafts each of these sequences may get in the next step; 0 leaves it out, and its drafter is not asked.

        With `pauses`, only sequences that recur are among them.
        """
        ...

    def rest(self, sequences: Row[Sequence]) -> int:
        """After `limits` and `choose` that gave these sequences no drafts: how many tokens each gets before they are called again.

        Steps of the same sequences that come earlier run as without speculation, and are not observed.
        """
        ...

    def batch_pause(self, num_sequences: int) -> int:
        """With `pauses`: for how many steps a batch of that size wants no drafts, whatever its sequences are. 0: it is worth a look."""
        ...

    def choose(self, requests: Row[DraftRequest], drafts: Row[Draft], num_sequences: int) -> list[int]:
        """How many tokens of each draft, from its first, are verified. Larger numbers than a draft has are cut."""
        ...

    def observe_proposal(self, num_drafts: int, seconds: float) -> None:
        """`propose` took so long for at most `num_drafts` drafts of each sequence."""
        ...

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Of `num_drafts` verified drafts of the sequence the first `num_accepted` were accepted."""
        ...

    def observe_step(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """A step of decodes and `num_drafts` drafts took so long; without drafts what it takes in a row of such steps, where several run
        at once or the next one is launched ahead.

        Steps that capture or compile are left out, and all but some of those without drafts.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...
