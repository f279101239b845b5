"""Acceptance policies: what each accepts, what follows, and that none but the lossy ones changes a token."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm.errors import ArgumentError
from tinyvllm.speculate.policies import POLICIES, Acceptance, Exact, parse_policy, policy_of

# Probabilities of five tokens at three positions. Drawn: 2, 0, 4.
ROWS = np.log(np.array([[0.05, 0.5, 0.3, 0.1, 0.05], [0.6, 0.2, 0.1, 0.06, 0.04], [0.2, 0.2, 0.2, 0.2, 0.2]], np.float32))
DRAWN = [2, 0, 4]


@pytest.mark.parametrize(
    ("text", "drafts", "expected"),
    [
        ("exact", [2, 0], Acceptance(2, 4)),
        ("exact", [1, 0], Acceptance(0, 2)),
        ("exact", [2, 1], Acceptance(1, 0)),
        ("longest_prefix", [1, 0], Acceptance(2, 4)),
        ("longest_prefix", [3, 0], Acceptance(0, 2)),
        ("longest_prefix", [2, 1], Acceptance(1, 0)),  # what was drawn counts as well
        ("confidence:tau=0.49", [1, 0], Acceptance(2, 4)),
        ("confidence:tau=0.51", [1, 0], Acceptance(0, 2)),
        ("confidence:tau=0.51", [2, 0], Acceptance(2, 4)),
        ("confidence:tau=0", [4, 4], Acceptance(2, 4)),
        ("confidence:tau=1", [1, 0], Acceptance(0, 2)),
        ("top_k:k=1", [1, 1], Acceptance(1, 0)),
        ("top_k:k=2", [1, 1], Acceptance(2, 4)),
        ("top_k:k=3", [3, 0], Acceptance(2, 4)),
        ("top_k:k=2", [3, 0], Acceptance(0, 2)),
        # the entropies are 1.25 and 1.17 nats: the bounds are min(.09, .3 * .287) = .086 and min(.09, .3 * .31) = .09
        ("typical", [3, 2], Acceptance(2, 4)),
        ("typical", [4, 2], Acceptance(0, 2)),
        ("typical", [3, 3], Acceptance(1, 0)),
        ("typical:epsilon=1,delta=1", [3, 2], Acceptance(0, 2)),  # .287 and .31
    ],
)
def test_what_a_policy_accepts(text: str, drafts: list[int], expected: Acceptance) -> None:
    assert parse_policy(text).accept(drafts, DRAWN, ROWS) == expected


@pytest.mark.parametrize("name", POLICIES)
def test_no_draft_at_all(name: str) -> None:
    assert policy_of(name).accept([], [7], np.zeros((1, 9), np.float32)) == Acceptance(0, 7)


def test_each_accepts_what_exact_accepts() -> None:
    """Random chains: every policy accepts at least the drafts that equal the drawn tokens, and the token after them is the drawn one."""
    chance = np.random.default_rng(5)
    for _ in range(200):
        logits = chance.standard_normal((4, 12)).astype(np.float32) * 3
        drawn = chance.integers(12, size=4).tolist()
        drafts = [t if chance.random() < 0.6 else int(chance.integers(12)) for t in drawn[:3]]
        exact = Exact().accept(drafts, drawn)
        for name in POLICIES:
            got = policy_of(name).accept(drafts, drawn, logits)
            assert got.accepted >= exact.accepted and got.token == drawn[got.accepted]


def test_longest_prefix_of_a_greedy_request_is_exact() -> None:
    chance = np.random.default_rng(6)
    for _ in range(100):
        logits = chance.standard_normal((5, 6)).astype(np.float32)
        drawn, drafts = logits.argmax(1).tolist(), chance.integers(6, size=4).tolist()
        assert policy_of("longest_prefix").accept(drafts, drawn, logits) == Exact().accept(drafts, drawn)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "exact"])
@pytest.mark.parametrize("draft", [1, -1, 5, 10**12])
def test_a_masked_or_impossible_token_is_never_accepted(name: str, draft: int) -> None:
    """A grammar's mask is -inf; a drafter may propose ids out of the vocabulary."""
    rows = np.array([[0.0, -np.inf, 1.0, -np.inf, -np.inf]] * 2, np.float32)
    options = {"tau": 0.0} if name == "confidence" else {"k": 5} if name == "top_k" else {"epsilon": 0.0} if name == "typical" else {}
    assert policy_of(name, options).accept([draft], [2, 2], rows) == Acceptance(0, 2)


def test_labels_say_what_is_lossy() -> None:
    assert {name: policy_of(name).label for name in POLICIES} == {
        "exact": "exact",
        "longest_prefix": "longest_prefix, lossy unless greedy",
        "confidence": "confidence(tau=0.5), lossy",
        "top_k": "top_k(k=3), lossy",
        "typical": "typical(epsilon=0.09, delta=0.3), lossy",
    }
    assert [name for name in POLICIES if not POLICIES[name].lossy] == ["exact"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exakt", "got 'exakt', did you mean 'exact'"),
        ("typical:epsilom=1", "unknown parameter 'epsilom', did you mean 'epsilon'"),
        ("exact:k=1", "policy exact: unknown parameter 'k'; it has none"),
        ("top_k:k=0", "top_k: k must be an integer from 1"),
        ("top_k:k=1.5", "top_k: k must be an integer from 1"),
        ("confidence:tau=2", "tau must be a number from 0 to 1, got 2"),
        ("confidence:tau=nan", "tau must be a number from 0 to 1, got nan"),
        ("confidence:tau", "expected NAME:PARAMETER=NUMBER"),
        ("confidence:tau=x", "expected NAME:PARAMETER=NUMBER"),
    ],
)
def test_policies_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
        parse_policy(text)


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="2 drafts have 3 drawn tokens, got 2"):
        Exact().accept([1, 2], [1, 2])
    with pytest.raises(ValueError, match=r"expected logits \[2, V\], got \(1, 5\)"):
        policy_of("typical").accept([1], [1, 2], ROWS[:1])
