"""A hundred steps and more of the soak; `python -m tests.engine.soak_traffic` runs for minutes and watches memory too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.soak_traffic import Traffic
from tinyvllm.scheduler import recurrent

STEPS, COMPARED = 150, 10
RECURRENT = Path(__file__).parents[1] / "tiny" / "golden" / "qwen3.5"


@pytest.mark.long
def test_random_traffic() -> None:
    traffic = Traffic(seed=2, check_every=3)
    try:
        traffic.run_until(lambda: traffic.steps >= STEPS and traffic.seen["compared"] >= COMPARED and bool(traffic.seen["bad requests"]))
    finally:
        traffic.close()


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["suffix", "medusa_lite"])
def test_random_traffic_with_drafts(drafter: str) -> None:
    traffic = Traffic(seed=5, check_every=3, drafter=drafter)
    try:
        metrics = traffic.engine.metrics
        traffic.run_until(lambda: traffic.steps >= STEPS and traffic.seen["compared"] >= COMPARED and metrics.draft_tokens > 0)
        assert traffic.engine.speculation is not None and traffic.engine.speculation.on
    finally:
        traffic.close()


@pytest.mark.long
@pytest.mark.parametrize("drafter", [None, "suffix", "medusa_lite"])
def test_random_traffic_with_recurrent_states(drafter: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, preemption, hits of copies in prompts and in answers, aborts and drafts."""
    monkeypatch.setattr(recurrent, "EVERY_DECODED", 32)
    traffic = Traffic(seed=7, check_every=3, drafter=drafter, recurrent=RECURRENT)
    metrics = traffic.engine.metrics
    try:
        traffic.run_until(
            lambda: (
                traffic.steps >= STEPS
                and traffic.seen["compared"] >= COMPARED
                and traffic.preemptions > 0
                and traffic.seen["ended: abort"] > 0
                and traffic.cached > 0
                and (drafter is None or metrics.draft_tokens > 0)
            )
        )
        assert drafter is None or (traffic.engine.speculation is not None and traffic.engine.speculation.on)
    finally:
        traffic.close()
