"""The plan of a step on Metal: launches, weights that are read once, and bytes, as far as arithmetic is exact."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import plan
from benchmarks.shapes import DENSE, SHAPES, bytes_per_token, tensors


def launches(shape: str, weights: str = "Q4_0", T: int = 1, context: int = 500) -> list[plan.Launch]:
    return plan.step(plan.Model.named(shape), weights, T, context, "BF16")


@pytest.mark.parametrize("shape", DENSE)
@pytest.mark.parametrize("T", [1, 16])
def test_a_layer_is_five_launches_and_reads_its_weights_once(shape: str, T: int) -> None:
    found = launches(shape, "Q8_0", T)
    assert sum(launch.layer for launch in found) == 5
    assert all(launch.streams == 1 for launch in found if launch.weights)
    matrices = bytes_per_token(SHAPES[shape], "Q8_0") - sum(4 * s[0] for _, _, s in tensors(SHAPES[shape]) if len(s) == 1)
    assert sum(launch.weight_bytes * launch.times for launch in found) == matrices


@pytest.mark.parametrize("context", [2048, 131072])
def test_long_contexts_take_no_sixth(context: int) -> None:
    found = launches("llama-3.2-1b", context=context)
    assert sum(launch.layer for launch in found) == 5
    assert [launch.kernel.stem for launch in found if launch.trips] == ["attention_decode"]
    ends = next(launch.kernel for launch in found if launch.trips)
    H, K, D = 32, 8, 64
    partitions = min(32, context // 512)
    assert ends.bytes == 4 * context * K * D + 8 * H * D + 3 * 4 * H * partitions * (D + 2)


def test_what_comes_after_the_reading_is_counted() -> None:
    chip = plan.Chip("a chip", 10, 100, 1e6)
    short, long = (next(one for one in launches("llama-3.2-1b", context=c) if one.kernel.stem == "attention_decode") for c in (512, 1024))
    times = [plan.time_of(one, 0, chip, 0, 1).seconds - one.kernel.bytes / 1e11 for one in (short, long)]
    assert times[0] == pytest.approx(0, abs=1e-9) and times[1] == pytest.approx(4 * plan.LATENCY, abs=1e-9)


def test_by_matrices_a_layer_is_six_launches_and_reads_its_weights_once() -> None:
    model = plan.Model.named("llama-3.1-8b")
    lanes, matrices = (plan.step(model, "Q4_0", 16, 500, "BF16", row) for row in ("apple7", "apple7_matrix"))
    assert [launch.kernel.stem for launch in matrices if launch.layer][:2] == ["matmul16", "rope_store"]
    assert sum(launch.layer for launch in matrices) == 6 and all(launch.streams == 1 for launch in matrices if launch.weights)
    assert sum(one.weight_bytes * one.times for one in matrices) == sum(one.weight_bytes * one.times for one in lanes)
    assert plan.step(model, "Q4_0", 12, 500, "BF16", "apple7_matrix") == plan.step(model, "Q4_0", 12, 500, "BF16")


@pytest.mark.parametrize("weights", ["BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("row", ["apple7", "apple7_matrix"])
def test_no_product_in_float32_beats_its_own_multiply_adds(weights: str, row: str) -> None:
    found = plan.step(plan.Model.named("llama-3.1-8b"), weights, 16, 500, "BF16", row)
    step = plan.Step(found, [0] * len(found))
    for chip in plan.CHIPS:
        least = sum(one.weights * 16 * one.times for one in found) / (1e9 * chip.rate / 2 * chip.cores)
        assert least <= step.bare().time(chip, 0, 0.9).seconds <= step.time(chip, 0, 0.9).seconds
    products = [one for one in found if one.weights]
    reads = sum(one.near_bytes * one.times for one in products) / sum(one.weights * one.times for one in products)
    assert reads == pytest.approx(2 if row == "apple7_matrix" else 8), "bytes of x a weight"


def test_a_chip_that_reads_slowly_near_its_cores_is_bound_by_x(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches("llama-3.1-8b", "Q4_0", 16)
    monkeypatch.setattr(plan, "NEAR_BYTES", 16)
    assert plan.Step(found, [0] * len(found)).time(plan.Chip("a chip", 10, 100, 300), 0, 0.9).bound == "reads of x"


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
