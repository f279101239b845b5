"""How many drafts pay: controllers in simulated steps, against the best fixed number in hindsight. Scripted, seeded, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.speculate.simulated import RIGHT, WRONG, Simulation, best_fixed, constant
from tests.speculate.texts import sequence
from tinyvllm.errors import ArgumentError
from tinyvllm.speculate.controller import (
    MAX_PAUSE_BATCH,
    MAX_PAUSE_LOOKUP,
    MAX_PAUSE_MODEL,
    MEASURE,
    MEASURE_EVERY,
    PATIENCE,
    AdaptiveController,
    Calibration,
    FixedController,
    WindowController,
)
from tinyvllm.speculate.cost_curve import MAX_AGE, MIN_SAMPLES, CostCurve, StepCosts
from tinyvllm.speculate.protocol import Controller, Draft, DraftRequest
from tinyvllm.speculative import MAX_DRAFTS

FIXED = (1, 2, 3, 4, 6, 8)
COSTS = {
    "flat": lambda rows: 1 + 0.01 * (rows - 1),
    "linear": lambda rows: 1 + 0.08 * (rows - 1),
    "steep": lambda rows: 1 + 0.4 * (rows - 1),
    "offset": lambda rows: 1 if rows == 1 else 1.3 + 0.03 * (rows - 2),
    "knee": lambda rows: max(1.0, 0.6 + 0.05 * rows),
}


def mean_rate(controller: int | Callable[[], Controller], steps: int, seeds: int, settings: dict[str, Any]) -> float:
    """Of a fixed number, or of new controllers."""

    def new() -> Controller | None:
        return controller() if callable(controller) else FixedController(controller) if controller else None

    return sum(Simulation(new(), seed=seed, **settings).run(steps).rate for seed in range(1, seeds + 1)) / seeds


def adaptive(looks_up: bool = True, num_sequences: int = 0) -> AdaptiveController:
    """One that knows what a step of `num_sequences` takes, if that is not 0."""
    return AdaptiveController(8, StepCosts({(num_sequences, 0): 1.0} if num_sequences else {}), looks_up)


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("cost", COSTS)
def test_near_the_best_fixed_number_from_the_first_step_on(cost, acceptance):
    """Learning of costs and acceptance included, with noisy step times; means over seeds, whose rates differ by 5 %."""
    settings = {"script": constant(acceptance), "cost": COSTS[cost]}

    best = max(mean_rate(count, 300, 3, settings) for count in (0, *FIXED))
    assert mean_rate(adaptive, 600, 3, settings | {"noise": 0.1}) >= 0.965 * best


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.95])
def test_eight_sequences_of_which_each_row_costs(acceptance):
    settings = {"script": constant(acceptance), "cost": COSTS["linear"], "num_sequences": 8}
    assert Simulation(adaptive(), noise=0.1, **settings).run(400).rate >= 0.96 * best_fixed((1, 2, 4, 8), 100, **settings)


@pytest.mark.parametrize("acceptance", [0.3, 0.9])
def test_sixty_four_sequences_up_to_the_knee_of_the_curve(acceptance):
    """Flat to 72 rows, then linear: eight drafts a step are nearly free, which no fixed number for every sequence can use."""

    def cost(rows: int) -> float:
        return max(1.0, rows / 72)

    settings = {"script": constant(acceptance), "cost": cost, "num_sequences": 64}
    measured = AdaptiveController(8, StepCosts({(rows, 0): cost(rows) for rows in (64, 72, 80, 96, 128, 256, 512)}))
    simulation = Simulation(measured, noise=0.05, **settings).run(100)
    assert simulation.rate >= 0.98 * best_fixed((1, 2, 4), 30, **settings)
    assert simulation.rate >= 64 * (0.99 + acceptance**2 / 16)
    unmeasured = Simulation(adaptive(), noise=0.05, **settings).run(150)
    assert unmeasured.rate >= 64 * 0.97, "the first time it also learns the curve"


@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("confidence", [None, 0.9])
def test_guesses_that_are_never_right_cost_less_than_one_percent(confidence, cost, num_sequences):
    settings = {"script": constant(0.0, confidence), "cost": COSTS[cost], "num_sequences": num_sequences}
    simulation = Simulation(adaptive(), **settings).run(200)
    proposed = simulation.proposed
    simulation.run(200)
    assert simulation.rate >= 0.99 * Simulation(None, **settings).run(400).rate
    assert simulation.proposed - proposed <= 1.5 * 8 * num_sequences * 200 / MAX_PAUSE_LOOKUP, "the drafter is asked rarely"


@pytest.mark.parametrize("num_sequences", [1, 7])
@pytest.mark.parametrize("guesses", ["wrong", "none"])
def test_asking_in_vain_is_bounded_by_counts(guesses, num_sequences):
    """After PATIENCE calls the pauses double: a call for each MAX_PAUSE_LOOKUP tokens, and between two calls nothing is computed."""
    controller, texts = adaptive(True, num_sequences), [sequence([0] * (number + 1), sequence_id=number) for number in range(num_sequences)]
    asked, called, rest = [0] * num_sequences, 0, 0
    for _ in range(400):
        if rest <= 0:
            called += 1
            limits = controller.limits(texts, num_sequences)
            requests = [DraftRequest(text, limit) for text, limit in zip(texts, limits, strict=True) if limit]
            for request in requests:
                asked[request.sequence.sequence_id] += 1
            if requests and guesses == "wrong":
                assert not any(controller.choose(requests, [Draft([WRONG], [0.01])] * len(requests), num_sequences))
            rest = controller.rest(texts)
            assert rest >= 1
        for text in texts:
            text.output_token_ids.append(RIGHT)
        rest -= 1
    most = PATIENCE + MAX_PAUSE_LOOKUP.bit_length() + 400 / MAX_PAUSE_LOOKUP
    assert max(asked) <= most
    assert called <= 2 * most, "sequences wake together; a guess that waits is scored once"


def test_a_text_that_begins_to_repeat_gets_drafts_soon():
    def script(rng: random.Random, number: int, length: int, count: int) -> Draft:
        return constant(0.95 if length > 300 else 0.0)(rng, number, length, count)

    simulation = Simulation(adaptive(), script, COSTS["linear"]).run(360)
    assert not any(simulation.counts[100:300])
    assert all(simulation.counts[300 + 2 * MAX_PAUSE_LOOKUP : 360])
    assert max(simulation.counts[300:340]) == 8


def test_each_sequence_by_its_own_acceptance():
    def script(rng: random.Random, number: int, length: int, count: int) -> Draft:
        return constant(0.95 if number % 2 else 0.0)(rng, number, length, count)

    settings = {"script": script, "cost": COSTS["linear"], "num_sequences": 8}
    assert Simulation(adaptive(), **settings).run(400).rate >= 1.3 * best_fixed((1, 2, 4, 8), 100, **settings)


def test_confidences_that_tell_are_used():
    def script(rng: random.Random, number: int, length: int, count: int) -> Draft:
        chances = [rng.choice((0.1, 0.95)) for _ in range(count)]
        return Draft([RIGHT if rng.random() < chance else WRONG for chance in chances], chances)

    settings = {"script": script, "cost": COSTS["linear"], "num_sequences": 4}
    assert Simulation(adaptive(), **settings).run(400).rate >= 1.15 * best_fixed((1, 2, 4, 8), 200, **settings)


@pytest.mark.parametrize("pass_cost", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
def test_a_drafter_that_runs_a_model_is_asked_for_what_pays(acceptance, pass_cost):
    settings = {"script": constant(acceptance), "cost": COSTS["linear"], "pass_cost": pass_cost}
    best = max(mean_rate(count, 800, 4, settings) for count in (0, *FIXED))
    assert mean_rate(lambda: adaptive(looks_up=False), 800, 4, settings | {"noise": 0.1}) >= 0.94 * best
    if acceptance == 0:
        simulation = Simulation(adaptive(looks_up=False), noise=0.1, **settings).run(800)
        assert simulation.proposed < 0.05 * 800, "probes become rare"


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_what_a_call_takes_by_itself_does_not_count_for_each_draft(acceptance):
    """As with the bundled heads: most of a call is the host's, whatever the number of guesses, so that one guess never pays and six do."""
    settings = {"script": constant(acceptance), "cost": COSTS["linear"], "pass_cost": 0.05, "call_cost": 0.6}
    best = max(mean_rate(count, 800, 4, settings) for count in (0, *FIXED))
    wanted = 0.87 if acceptance == 0.7 else 0.95  # 0.7: six drafts gain 1.3 only where all costs are known; a probe of one finds none
    assert mean_rate(lambda: adaptive(looks_up=False), 800, 4, settings | {"noise": 0.1}) >= wanted * best


def test_probes_of_a_model_become_rarer_and_find_that_it_pays_again():
    def script(rng: random.Random, number: int, length: int, count: int) -> Draft:
        return constant(0.95 if length > 1000 else 0.0)(rng, number, length, count)

    simulation = Simulation(adaptive(looks_up=False), script, COSTS["linear"], pass_cost=0.1).run(1000 + 4 * MAX_PAUSE_MODEL)
    assert sum(map(bool, simulation.counts[600:1000])) <= 3
    assert all(simulation.counts[-20:])


def test_the_same_steps_give_the_same_choices():
    runs = [Simulation(adaptive(), constant(0.6), COSTS["knee"], num_sequences=3, noise=0.1).run(100).counts for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_call_while_a_step_is_in_flight_changes_nothing():
    """The engine asks twice for the same tokens: once for a look, once for the step."""
    once, twice = adaptive(True, 1), adaptive(True, 1)
    rng, text = random.Random(3), {once: sequence([0]), twice: sequence([0])}
    for _ in range(200):
        guess = [RIGHT if rng.random() < 0.4 else WRONG for _ in range(8)]
        choices = []
        for controller, calls in ((once, 1), (twice, 3)):
            for _ in range(calls):
                (limit,) = controller.limits([text[controller]], 1)
                chosen = controller.choose([DraftRequest(text[controller], limit)], [Draft(guess[:limit])], 1) if limit else None
            choices.append((limit, chosen))
            text[controller].output_token_ids.append(RIGHT)
        assert choices[0] == choices[1]


def chosen(costs: dict[tuple[int, int], float], num_sequences: int, confidence: float = 0.9) -> int:
    """How many of three drafts of one of the sequences are verified."""
    controller, text = AdaptiveController(8, StepCosts(costs)), sequence([0])
    (limit,) = controller.limits([text], num_sequences)
    draft = Draft([RIGHT] * 3, [confidence] * 3)
    return controller.choose([DraftRequest(text, limit)], [draft], num_sequences)[0] if limit else 0


def test_a_draft_must_pay_for_all_that_it_adds():
    """One more row is cheap, but one draft among 64 sequences also has the host lay out and judge the step again."""
    rows = {(64, 0): 64.0, (72, 0): 65.0, (128, 0): 72.0}
    assert chosen(rows, 64) == 3, "not measured: as cheap as more sequences"
    assert chosen(rows | {(64, 1): 12.0, (64, 3): 14.0, (64, 8): 20.0}, 64) == 0
    assert chosen(rows | {(64, 1): 0.1, (64, 3): 0.2, (64, 8): 0.3}, 64) == 3
    assert chosen(rows | {(32, 1): 12.0, (32, 3): 14.0}, 64) == 3, "of other numbers of sequences"


def test_without_a_chance_to_pay_no_guess_is_wanted():
    """Rows that cost nearly their full price: the drafter is not called, however good it may be, and long pauses begin."""
    costs = StepCosts({(64, 0): 65.0} | {(64, 1 << k): float(1 << k) for k in range(6)})
    controller, texts = AdaptiveController(8, costs), [sequence([0] * 9, sequence_id=i) for i in range(4)]
    assert controller.limits(texts, 64) == [0] * 4 and controller.rest(texts) == MAX_PAUSE_LOOKUP


@pytest.mark.parametrize(("half", "pause"), [(40.0, MAX_PAUSE_BATCH), (60.0, 0)])
def test_a_large_batch_whose_rows_cost_nearly_what_tokens_do_is_left_alone(half, pause):
    controller = AdaptiveController(8, StepCosts({(4, 0): 2.0, (8, 0): 4.0, (32, 0): half, (64, 0): 64.0}))
    assert controller.batch_pause(64) == pause and controller.batch_pause(8) == 0
    assert AdaptiveController(8, controller.costs, looks_up=False).batch_pause(64) == 0
    assert adaptive().batch_pause(64) == MEASURE_EVERY, "not known: timed first"


@pytest.mark.parametrize(("call_seconds", "often"), [(0.001, True), (4.0, False)])
def test_guesses_in_a_large_batch_must_save_more_than_they_take(call_seconds, often):
    """Otherwise they become rare, by pauses that double. They are all right here, and save 3 s."""
    controller, texts = (
        AdaptiveController(8, StepCosts({(64, 0): 64.0, (64, 1): 0.1, (64, 8): 0.1})),
        [sequence([0], sequence_id=i) for i in range(64)],
    )
    calls = pause = 0
    for _ in range(200):
        pause = pause or controller.batch_pause(64)
        if not pause:
            (limit,) = controller.limits(texts[:1], 64)
            calls += 1
            controller.observe_proposal(limit, call_seconds)
            assert controller.choose([DraftRequest(texts[0], limit)], [Draft([RIGHT] * 4, [0.99] * 4)], 64)[0]
        pause = max(0, pause - 1)
        for text in texts:
            text.output_token_ids.append(RIGHT)
    assert calls == 200 if often else PATIENCE < calls <= 12


def test_what_steps_take_without_drafts_is_measured_first():
    """Only that tells what drafts add. Where it is never timed, as next to prompts, drafts come for most steps."""
    controller, text = adaptive(), sequence([0])
    limits = []
    for _ in range(2 * MEASURE_EVERY):
        limits += controller.limits([text], 1)
        text.output_token_ids.append(RIGHT)
    assert limits.count(0) >= 2 * MEASURE and not any(limits[:MEASURE]) and limits[MEASURE]
    controller, text = adaptive(), sequence([0])
    for _ in range(MIN_SAMPLES):
        assert controller.limits([text], 1) == [0]
        controller.observe_step(1, 0, 1.0)
        text.output_token_ids.append(RIGHT)
    assert controller.limits([text], 1) == [8]


def test_forgotten_sequences_leave_nothing():
    for controller in (adaptive(), WindowController(4)):
        texts = [sequence([0], sequence_id=i) for i in range(4)]
        controller.observe_step(4, 0, 1.0)
        controller.limits(texts, 4)
        controller.choose([DraftRequest(text, 2) for text in texts], [Draft([1, 2])] * 4, 4)
        for text in texts:
            controller.observe(text, 2, 0)
            controller.forget(text)
        assert not vars(controller).get("_histories") and not vars(controller).get("_counts")


# ---- the simple ones ----


def test_fixed_is_fixed():
    text = sequence([0])
    controller = FixedController(3)
    assert controller.limits([text, text], 2) == [3, 3]
    assert controller.choose([DraftRequest(text, 3)] * 2, [Draft([1, 2]), Draft()], 2) == [2, 0]


@pytest.mark.parametrize("count", [0, -1, MAX_DRAFTS + 1])
@pytest.mark.parametrize("kind", [FixedController, WindowController, AdaptiveController])
def test_numbers_beyond_the_limits_are_refused(kind, count):
    with pytest.raises(ArgumentError, match=f"1 to {MAX_DRAFTS}, got {count}"):
        kind(count)


def test_the_window_raises_and_lowers_the_number():
    controller, text, other = WindowController(8, window=10), sequence([0]), sequence([0], sequence_id=1)
    assert controller.limits([text, other], 2) == [4, 4]
    for _ in range(3):
        controller.observe(text, 4, 4)
    assert controller.limits([text, other], 2) == [5, 4], "12 of 12 accepted"
    controller.observe(text, 10, 6)
    assert controller.limits([text], 1) == [5], "between the bounds"
    for _ in range(20):
        controller.observe(text, 10, 1)
    assert controller.limits([text], 1) == [1]
    for _ in range(20):
        controller.observe(text, 10, 9)
    assert controller.limits([text], 1) == [8]


@pytest.mark.parametrize("settings", [{"window": 0}, {"raise_at": 1.1}, {"raise_at": 0.3, "lower_at": 0.4}, {"lower_at": -0.1}])
def test_windows_without_sense_are_refused(settings):
    with pytest.raises(ArgumentError, match="lower_at <= raise_at"):
        WindowController(4, **settings)


# ---- the cost curve ----


def test_a_slow_step_does_not_close_a_bucket():
    curve = CostCurve()
    for seconds in (50.0, 1.0, 40.0):
        curve.observe(4, seconds)
    assert curve.seconds(4) == 1.0, "also if most of the first ones are slow"
    for seconds in (50.0, 1.1, 0.9, 1.0):
        curve.observe(4, seconds)
    assert curve.seconds(4) == pytest.approx(1.0, rel=0.3)


def test_fewer_samples_do_not_count():
    curve = CostCurve()
    for _ in range(MIN_SAMPLES - 1):
        curve.observe(2, 80.0)
    assert curve.points() == {}


def test_a_cost_that_changes_is_followed_and_noise_does_not_move_the_others():
    """Noise only adds time. A factor that all numbers of rows shared and that followed each step drifted with it, by powers of ten."""
    rng, curve = random.Random(1), CostCurve({1: 1.0, 4: 1.3, 8: 2.0})
    for _ in range(MAX_AGE - 10):
        curve.observe(4, 2.6 * (1 + 0.3 * rng.random() ** 4))
    assert curve.seconds(4) == pytest.approx(2.6, rel=0.05)
    assert curve.seconds(8) == 2.0 and curve.seconds(1) == 1.0


def test_between_known_points_the_estimate_is_optimistic_and_passes_through_them():
    curve = CostCurve({2: 1.0, 10: 3.0})
    values = [curve.seconds(rows) for rows in range(2, 11)]
    assert values[0] == 1.0 and values[-1] == 3.0 and values == sorted(values)
    assert curve.seconds(6) < 2.0
    assert curve.seconds(20) < 3.5, "twice the rows are worth a try"
    assert curve.seconds(80) > 3.0 * 80 / 20, "more are not"
    assert curve.seconds(1) == 0.5, "and fewer are"


def test_what_was_not_visited_for_long_is_tried_again():
    curve = CostCurve({1: 1.0, 4: 9.0})
    for _ in range(MAX_AGE + 8):
        curve.observe(1, 1.0)
    assert 4 not in curve.points()


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_impossible_steps_are_errors(rows, seconds):
    with pytest.raises(ValueError, match="cost curve"):
        CostCurve().observe(rows, seconds)


def test_large_numbers_of_rows_share_buckets():
    curve = CostCurve()
    for rows in range(64, 72):
        curve.observe(rows, 2.0)
    assert list(curve.points()) == [64]
    assert curve.seconds(70) < 2.1


def test_what_drafts_add_is_apart_from_more_sequences():
    costs = StepCosts()
    for _ in range(MIN_SAMPLES):
        costs.observe(64, 1, 9.0)
    assert costs.points() == {}, "not known what they are added to"
    for _ in range(MIN_SAMPLES):
        costs.observe(64, 0, 6.0)
        costs.observe(66, 0, 6.0)
    for _ in range(MIN_SAMPLES):
        costs.observe(64, 1, 9.0)
        costs.observe(64, 8, 10.0)
    assert costs.seconds(64, 0) == 6.0 and costs.seconds(64, 1) == 9.0 and costs.seconds(64, 8) == 10.0
    assert StepCosts(costs.points()).seconds(64, 8) == 10.0
    assert costs.seconds(2, 62) < 6.5, "another class"
    for _ in range(MAX_AGE + 8):
        costs.observe(64, 0, 6.0)
    assert costs.points() == {(64, 0): 6.0}, "tried again after long"


def test_fewer_drafts_never_add_more():
    costs = StepCosts({(1, 0): 1.0, (1, 1): 0.3, (1, 2): 0.2, (1, 4): 0.5})
    assert [costs.seconds(1, k) for k in (1, 2, 4)] == [1.2, 1.2, 1.5]


def test_calibration_follows_what_is_observed_and_differs_by_bin():
    calibration = Calibration()
    high, low = calibration.keys(Draft([1, 2], [0.95, 0.2]))
    for i in range(400):
        calibration.observe(high, i % 10 != 0)
        calibration.observe(low, i % 10 == 0)
    assert calibration.chance(high) == pytest.approx(0.9, abs=0.05)
    assert calibration.chance(low) == pytest.approx(0.1, abs=0.05)
    assert calibration.keys(Draft([1, 2, 3], [7.0, -1.0, 1.0])) == calibration.keys(Draft([1, 2, 3], [1.0, 0.0, 1.0])), "bounded"
    assert len(set(calibration.keys(Draft([1, 2, 3])))) == 3, "without confidences by position"
