"""The clock of compilers: overlapping compilations count once, and a long wait is named once."""

from __future__ import annotations

import logging

from tinyvllm.bridge import compiling
from tinyvllm.bridge.compiling import CompileClock


def test_overlapping_compilations_count_once_and_are_named_after_a_second(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: now[0])
    clock = CompileClock()
    with caplog.at_level(logging.WARNING, "tinyvllm"):
        with clock.compiling():
            now[0] += 0.4
            with clock.compiling():
                now[0] += 0.3
        assert round(clock.seconds, 6) == 0.7 and not caplog.records
        now[0] += 50.0
        for _ in range(3):
            with clock.compiling():
                now[0] += 0.5
                assert round(clock.seconds % 0.5, 6) == 0.2
    assert round(clock.seconds, 6) == 2.2
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "kernels are being compiled for their first use on this machine"
    ]
