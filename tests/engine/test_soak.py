"""Some seconds of the soak; `python -m tests.engine.soak_traffic` runs for minutes and watches memory too."""

from __future__ import annotations

import pytest

from tests.engine.soak_traffic import Traffic


@pytest.mark.long
def test_random_traffic_for_some_seconds() -> None:
    traffic = Traffic(seed=2, check_every=3)
    told: list[str] = []
    try:
        traffic.run(20, told.append)
    finally:
        traffic.close()
    assert traffic.seen["compared"] > 5 and traffic.seen["bad requests"] and traffic.steps > 50, told


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["suffix", "medusa_lite"])
def test_random_traffic_with_drafts(drafter: str) -> None:
    traffic = Traffic(seed=5, check_every=3, drafter=drafter)
    try:
        traffic.run(20, lambda line: None)
        engine = traffic.engine
        assert engine.speculation is not None and engine.speculation.on and engine.metrics.draft_tokens > 0
    finally:
        traffic.close()
