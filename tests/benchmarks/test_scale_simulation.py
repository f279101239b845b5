"""The simulation of many replicas: equal seeds give equal numbers, and what it shows follows from the costs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scale_simulation import Costs, Traffic, main, simulate


def test_it_is_deterministic_and_draws(tmp_path: Path) -> None:
    words = ["--replicas", "8,64", "--requests", "40", "--svg", str(tmp_path / "a.svg")]
    first = main(words)
    assert main([*words[:-1], str(tmp_path / "b.svg")]) == first and main([*words[:4], "--seed", "2"]) != first
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_lone_replica_without_load_costs_what_was_recorded() -> None:
    traffic, costs = Traffic(tenants_per_replica=1), Costs()
    for policy in ("prefix", "round robin"):
        one = simulate(1, policy, 0.001, 50, 1, costs, traffic)
        assert one.hits == 1 and abs(one.p99 - 64 / 440) < 1e-9 and one.moved == 0


def test_turns_lose_the_caches_first_and_prefixes_the_balance() -> None:
    turns, prefix = simulate(64, "round robin", 0.1, 100, 1), simulate(64, "prefix", 0.1, 100, 1)
    assert turns.hits < 0.3 and turns.busiest > 0.99 and prefix.hits > 0.95 and prefix.p50 < 0.2 < turns.p50 / 10
    heavy = simulate(64, "prefix", 0.7, 100, 1)
    assert heavy.busiest > 0.95 and heavy.moved > 0 and heavy.p99 > prefix.p99
