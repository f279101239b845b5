"""The cost model of large products, held against what each cut took on a GPU."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

from tinyvllm.backends.cuda import hopper_plan, plan

RECORDS = Path(__file__).parents[3] / "benchmarks/results/gpu_cuts.jsonl"
H100 = plan.GPU(132, 232448, 233472)


def test_chosen_cuts_are_near_the_fastest_that_were_measured() -> None:
    """Of each product the time of the model's choice over the best: the mean of a format and a number of rows."""
    measured: dict[tuple[str, int, int, int], dict[tuple[plan.Cut, int], float]] = defaultdict(dict)
    for line in map(json.loads, RECORDS.read_text().splitlines()):
        if "variant" in line:
            continue
        product = line["format"], line["rows"], line["O"], line["I"]
        measured[product][plan.Cut(*line["cut"]), line["split"]] = line["us"]
    slower = defaultdict(list)
    for (format, T, O, I), times in measured.items():
        chosen = min(times, key=lambda cut: plan.cycles_of(*cut, O, T, I, format, H100))
        slower[format, T].append(times[chosen] / min(times.values()))
    assert {rows for _, rows in slower} == {16, 32, 64, 128, 256, 512}
    assert all(mean(slower["BF16", T]) < 1.12 for T in (16, 32, 64, 512)), slower
    assert all(mean(each) < 1.25 for each in slower.values()), slower


def test_hoppers_chosen_cuts_are_near_the_fastest_that_were_measured() -> None:
    measured: dict[tuple[int, int, int], dict[tuple[hopper_plan.Cut, int], float]] = defaultdict(dict)
    for line in map(json.loads, RECORDS.read_text().splitlines()):
        if "variant" in line and line["rows"] >= hopper_plan.LEAST_ROWS and (cut := hopper_plan.Cut(*line["cut"])) in hopper_plan.CUTS:
            measured[line["rows"], line["O"], line["I"]][cut, line["split"]] = line["us"]
    slower = []
    for (T, O, I), times in measured.items():
        chosen = min(times, key=lambda known: hopper_plan.cycles_of(*known, O, T, I, H100))
        slower.append(times[chosen] / min(times.values()))
    assert len(slower) > 20 and mean(slower) < 1.02 and max(slower) < 1.1, slower
