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
