"""Rules by which a step accepts drafts. `Exact` is the engine's: the others may change the output, and say so.

Each is a pure function of a chain of n drafts, the n + 1 tokens drawn at the positions of the chain, and the target's logits there. It
returns how many drafts are accepted, from the first, and the token that follows them. `drawn[i]` is right if the drafts before it are the
text: it is what the engine emits where draft i is rejected.

A draft that equals the drawn token is accepted by every policy: the token is the same either way, and the drafts after it still count. So a
lossy policy accepts at least what `Exact` does, and the two differ only by tokens that the model would not have drawn.

`logits` are float32 [n + 1, V] with penalties, bias and masks, before temperature: at temperature 0 a distribution would be one token, and
every policy would be `Exact`. A masked token (-inf) is never accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.sampling.divergence import log_softmax

MAX_TOP_K = 1 << 16


class Acceptance(NamedTuple):
    """The first `accepted` drafts, and then `token`."""

    accepted: int
    token: int


class Policy(Protocol):
    """`lossy`: the output may differ from the one without speculation. `reads_logits`: `accept` needs them, else they may be None."""

    name: ClassVar[str]
    lossy: ClassVar[bool]
    reads_logits: ClassVar[bool]

    @property
    def label(self) -> str:
        """Name and parameters, and whether it is lossy."""
        ...

    def accept(self, drafts: Sequence[int], drawn: Sequence[int], logits: np.ndarray | None = None) -> Acceptance:
        """Judge drafts [n] by drawn [n + 1] and logits [n + 1, V]. ValueError if the lengths do not fit."""
        ...


def _first_false(accepted: Sequence[bool]) -> int:
    return next((i for i, one in enumerate(accepted) if not one), len(accepted))


def _check(drafts: Sequence[int], drawn: Sequence[int], logits: np.ndarray | None, policy: str) -> np.ndarray:
    """The rows of the drafts, float32 [n, V]."""
    if len(drawn) != len(drafts) + 1:
        raise ValueError(f"{policy}: {len(drafts)} drafts have {len(drafts) + 1} drawn tokens, got {len(drawn)}")
    if logits is None or logits.ndim != 2 or len(logits) != len(drawn):
        shape = None if logits is None else logits.shape
        raise ValueError(f"{policy}: expected logits [{len(drawn)}, V], got {shape}")
    return logits[: len(drafts)]


class _Rule:
    """What the policies share: acceptance of the longest run of drafts that are equal to the drawn token or pass `_passes`."""

    name: ClassVar[str]
    lossy: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True
    _note: ClassVar[str] = "lossy"

    @property
    def label(self) -> str:
        values = ", ".join(f"{f.name}={getattr(self, f.name):g}" for f in fields(self))  # type: ignore[arg-type]  # all are dataclasses
        return f"{self.name}{f'({values})' if values else ''}, {self._note}"

    def accept(self, drafts: Sequence[int], drawn: Sequence[int], logits: np.ndarray | None = None) -> Acceptance:
        rows = _check(drafts, drawn, logits, self.name)
        if not drafts:
            return Acceptance(0, int(drawn[0]))
        ids = np.asarray(drafts, np.int64)
        inside = (ids >= 0) & (ids < rows.shape[1])  # a drafter may be wrong in any way
        chosen = np.where(inside, rows[np.arange(len(ids)), np.where(inside, ids, 0)], -np.inf)
        passes = self._passes(rows, chosen) & np.isfinite(chosen)
        accepted = _first_false((passes | (ids == np.asarray(drawn[:-1], np.int64))).tolist())
        return Acceptance(accepted, int(drawn[accepted]))

    def _passes(self, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """bool [n]: of each draft alone, whose logits are chosen [n] among rows [n, V]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Exact:
    """Accept a draft if and only if it equals the drawn token: the output is that without speculation."""

    name: ClassVar[str] = "exact"
    lossy: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return "exact"

    def accept(self, drafts: Sequence[int], drawn: Sequence[int], logits: np.ndarray | None = None) -> Acceptance:
        if len(drawn) != len(drafts) + 1:
            raise ValueError(f"exact: {len(drafts)} drafts have {len(drafts) + 1} drawn tokens, got {len(drawn)}")
        accepted = _first_false([draft == token for draft, token in zip(drafts, drawn)])
        return Acceptance(accepted, int(drawn[accepted]))


@dataclass(frozen=True)
class LongestPrefix(_Rule):
    """Accept the longest run of drafts that are the target's most probable token (argmax): exact if the request is greedy, else lossy."""

    name: ClassVar[str] = "longest_prefix"
    _note: ClassVar[str] = "lossy unless greedy"

    def _passes(self, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return np.asarray(chosen >= rows.max(1))


@dataclass(frozen=True)
class ConfidenceThreshold(_Rule):
    """Accept a draft whose probability under the target is above `tau`."""

    tau: float = 0.5
    name: ClassVar[str] = "confidence"

    def __post_init__(self) -> None:
        _check_share("confidence: tau", self.tau)

    def _passes(self, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return np.asarray(chosen - _log_sums(rows) > math.log(self.tau) if self.tau else np.isfinite(chosen))


@dataclass(frozen=True)
class TopKAgreement(_Rule):
    """Accept a draft that is among the target's `k` most probable tokens; of equal logits all count."""

    k: int = 3
    name: ClassVar[str] = "top_k"

    def __post_init__(self) -> None:
        if type(self.k) is not int or not 1 <= self.k <= MAX_TOP_K:
            raise ArgumentError(f"top_k: k must be an integer from 1 to {MAX_TOP_K}, got {self.k!r}")

    def _passes(self, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return np.asarray((rows > chosen[:, None]).sum(1) < self.k)


@dataclass(frozen=True)
class Typical(_Rule):
    """Medusa's typical acceptance: p(draft) > min(epsilon, delta * exp(-H)), with H the entropy of the target's distribution in nats.

    arXiv:2401.10774, whose defaults these are.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name: ClassVar[str] = "typical"

    def __post_init__(self) -> None:
        _check_share("typical: epsilon", self.epsilon)
        _check_share("typical: delta", self.delta)

    def _passes(self, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        logs = log_softmax(rows)
        probabilities = np.exp(logs)
        entropy = -(probabilities * np.where(probabilities > 0, logs, 0.0)).sum(1)
        return np.asarray(np.exp(chosen - _log_sums(rows)) > np.minimum(self.epsilon, self.delta * np.exp(-entropy)))


def _log_sums(rows: np.ndarray) -> np.ndarray:
    """float64 [n]: log of the sum of exp of each row [n, V]."""
    wide = rows.astype(np.float64)
    top = wide.max(1)
    return np.asarray(top + np.log(np.exp(wide - top[:, None]).sum(1)))


def _check_share(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ArgumentError(f"{name} must be a number from 0 to 1, got {value!r}")


EXACT = Exact()
POLICIES: dict[str, type[Any]] = {one.name: one for one in (Exact, LongestPrefix, ConfidenceThreshold, TopKAgreement, Typical)}


def policy_of(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """The policy of this name, its parameters by name. ArgumentError for another name, an unknown parameter or an invalid value."""
    if name not in POLICIES:
        raise ArgumentError(f"policy: expected one of {', '.join(POLICIES)}, got {name!r}{nearest(name, POLICIES)}")
    kind, options = POLICIES[name], options or {}
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            expected = f"expected {', '.join(known)}" if known else "it has none"
            raise ArgumentError(f"policy {name}: unknown parameter {option!r}{nearest(option, known)}; {expected}")
    policy: Policy = kind(**options)
    return policy


def parse_policy(text: str) -> Policy:
    """A policy as the command line writes it: `exact`, `confidence:tau=0.3`, `typical:epsilon=0.2,delta=0.5`."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        try:
            options[key.strip()] = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ArgumentError(f"policy {text!r}: expected NAME:PARAMETER=NUMBER,..., got {part!r}")
    return policy_of(name.strip(), options)
