"""The plan of a step on Metal: launches, weights that are read once, and bytes, as far as arithmetic is exact."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import plan
from benchmarks.shapes import SHAPES, bytes_per_token, tensors


def launches(shape: str, weights: str = "Q4_0", T: int = 1, context: int = 500) -> list[plan.Launch]:
    return plan.step(plan.Model.named(shape), weights, T, context, "BF16")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [1, 16])
def test_a_layer_is_five_launches_and_reads_its_weights_once(shape: str, T: int) -> None:
    found = launches(shape, "Q8_0", T)
    assert sum(launch.layer for launch in found) == 5
    assert all(launch.streams == 1 for launch in found if launch.weights)
    matrices = bytes_per_token(SHAPES[shape], "Q8_0") - sum(4 * s[0] for _, _, s in tensors(SHAPES[shape]) if len(s) == 1)
    assert sum(launch.weight_bytes * launch.times for launch in found) == matrices


def test_long_contexts_take_a_sixth() -> None:
    found = [launch.kernel.stem for launch in launches("llama-3.2-1b", context=4096) if launch.layer]
    assert len(found) == 6 and found[2] == "attention_merge"


def test_a_prefill_asks_for_its_weights_once_a_tile_of_tokens() -> None:
    found = [launch for launch in launches("llama-3.2-1b", T=200) if launch.kernel.stem == "matmul"]
    assert {launch.streams for launch in found} == {4} and sum(launch.layer for launch in launches("llama-3.2-1b", T=200)) == 6


def test_the_share_is_what_is_streamed_less_what_gaps_cost() -> None:
    chip = plan.Chip("a chip", 10, 100, 1e6)
    found = launches("llama-3.1-8b", "BF16")
    step = plan.Step(found, [0] * len(found))
    count = sum(launch.times for launch in found)
    assert step.share(chip, 0, 0.9) == pytest.approx(0.9, abs=0.001)
    assert step.bytes / 1e11 / step.share(chip, 1e-3, 0.9) == pytest.approx(step.bytes / 0.9e11 + 1e-3 * count, rel=0.001)
    assert step.needs(chip, 0, 0.88) == 0.89 and step.needs(chip, 1e-3, 0.88) is None


def test_operations_bound_a_chip_that_computes_slowly() -> None:
    found = launches("llama-3.1-8b", "Q4_0", 16)
    step = plan.Step(found, [0] * len(found))
    assert step.time(plan.Chip("a chip", 10, 100, 100), 0, 0.9).bound == "operations"
    assert step.time(plan.Chip("a chip", 10, 100, 1e6), 0, 0.9).bound == "memory"


@pytest.mark.parametrize(("T", "last"), [(1, "75% if it streams"), (16, "tokens of 16 to 1"), (40, "bound by")])
def test_shows(T: int, last: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "threadgroup_bytes", lambda kernel: 1000)
    plan.show(argparse.Namespace(shape="llama-3.2-1b", weights="Q4_0", T=T, context=4096, cache="BF16", gap=3.0, stream=0.9))
    said = capsys.readouterr().out
    assert "not measured" in said and "M5 Max" in said and f"{last} |" in said
