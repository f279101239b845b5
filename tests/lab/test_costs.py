"""The cost curve, predicted speed-ups and break-even batch sizes, against figures worked out by hand."""

from __future__ import annotations

import pytest

from tinyvllm.lab.costs import Gain, StepCosts, break_even, measured_break_even
from tinyvllm.lab.statistics import summary

CURVE = StepCosts.of([(8, 12.0), (1, 10.0), (32, 36.0)])


@pytest.mark.parametrize(("rows", "expected"), [(0.5, 10), (1, 10), (4.5, 11), (8, 12), (20, 24), (32, 36), (64, 68)])
def test_a_curve_is_linear_between_its_points(rows: float, expected: float) -> None:
    assert CURVE(rows) == pytest.approx(expected)


def test_a_curve_of_noise_never_predicts_less_than_its_smallest_step() -> None:
    assert StepCosts.of([(1, 10.0), (2, 9.0), (3, 5.0)])(10) == 5.0


def test_predicted_speed_up() -> None:
    """Three drafts, 2.5 tokens: 2.5 * 10 / (cost(4) + 1) with cost(4) = 10 + 2 * 3/7."""
    assert Gain(3.0, 2.5, 1.0).speedup(CURVE, 1) == pytest.approx(25 / (10 + 6 / 7 + 1))
    constant, rate, drafts = StepCosts.of([(1, 7.0), (64, 7.0)]), 0.6, 4
    expected = (1 - rate ** (drafts + 1)) / (1 - rate)
    assert Gain(drafts, expected).speedup(constant, 2) == pytest.approx(expected)  # a step costs the same: all tokens are gain


def test_break_even_is_where_the_speed_up_is_one() -> None:
    line = StepCosts.of([(1, 10.0), (101, 110.0)])  # 9 + rows
    gain = Gain(1.0, 1.5)  # 1.5 (9 + B) = 9 + 2 B at B = 9
    assert break_even(gain, line).batch == pytest.approx(9) and str(break_even(gain, line)) == "9"
    assert str(break_even(Gain(1.0, 1.01), line)) == "never"
    assert str(break_even(Gain(1.0, 2.5), line)) == ">50"  # no more rows are in the curve
    assert str(measured_break_even([(8, 0.5), (1, 2.0), (4, 1.5)])) == "6"
    assert str(measured_break_even([(1, 2.0), (4, 1.5)])) == ">4"


def test_summary() -> None:
    assert summary([1, 2, 6]) == {"mean": 3.0, "median": 2.0, "sd": 2.64575, "min": 1.0, "max": 6.0, "n": 3}
    assert summary([4.0])["sd"] is None
