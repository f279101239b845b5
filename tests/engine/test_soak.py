"""A hundred steps and more of the soak; `python -m tests.engine.soak_traffic` runs for minutes and watches memory too."""

from __future__ import annotations

import pytest

from tests.engine.soak_traffic import Traffic

STEPS, COMPARED = 150, 10


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
