"""What the runner knows of a step: its inputs on the device, what belongs to its shape, and its results."""

from __future__ import annotations

from collections.abc import Hashable

from tinygrad import Tensor

from tinyvllm.bridge import Captured, Recorded
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops.advance import History
from tinyvllm.runner.prepare import StepInputs
from tinyvllm.scheduler import Scheduled


@dataclass(frozen=True)
class PreparedStep:
    """A step whose inputs are on the device. Row r of its logits belongs to the entry logit_rows[r]; the rest of `num_logits` is padding.

    An entry with drafts has several rows, one after another by position; others have one. `decodes`: the step consists of sequences with
    one token and one row each, so that the device can advance to the next step by itself. `entries` are all entries, each with its first
    row of the flat batch.
    """

    logit_rows: list[Scheduled]
    num_logits: int
    values: dict[str, int]
    plan: StepPlan
    decodes: bool
    entries: list[tuple[Scheduled, int]]


@dataclass(frozen=True)
class StepPlan:
    """What belongs to a padded shape: the inputs' buffers, the captured forward pass, and the history of tokens."""

    inputs: StepInputs
    function: Recorded  # the forward pass, for each capture that contains it
    forward: Captured
    history: History
    advances: dict[int, Captured]  # by the tensor of sampled tokens that it takes
    rounds: dict[Hashable, Captured]  # forward pass, draw and advance as one graph, by the kind of draw

    @property
    def captured(self) -> bool:
        """Whether a step of this shape has run."""
        return self.forward.captured or any(captured.captured for captured in self.rounds.values())


@dataclass(frozen=True)
class Logits:
    """Logits [N, V] float32 on the device, and the token of each row's maximum, int32 [N], if the step computed it on the way.

    `states` float32 [T, layers * E] are hidden states of every row of the flat batch, if `keep_states` wants some.
    """

    logits: Tensor
    best: Tensor | None
    states: Tensor | None = None
