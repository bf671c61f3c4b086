import json
import math

import numpy as np
import pytest

from miles_rl.evaluate import Evaluation, mean_ci95, paired_change


def evaluation(rates: dict[str, float]) -> Evaluation:
    mean, low, high = mean_ci95(list(rates.values()))
    return Evaluation(0, rates, mean, (low, high), 0, 0, 0, 0.0, 1.0)


def test_the_interval_is_students_over_tasks() -> None:
    mean, low, high = mean_ci95([0.0, 0.5, 1.0, 0.5])
    assert mean == 0.5
    half = 3.182446 * math.sqrt(1 / 6 / 4)  # t(0.975, 3 degrees of freedom), sample variance 1/6
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


def test_more_samples_of_the_same_tasks_do_not_narrow_the_interval_below_what_tasks_allow() -> None:
    """Tasks are clusters: 20 tasks that are each always or never solved say the same, however often they are played."""
    rates = [1.0] * 10 + [0.0] * 10
    _, low, high = mean_ci95(rates)
    naive_half = 1.96 * math.sqrt(0.25 / (20 * 64))
    assert (high - low) / 2 > 5 * naive_half


def test_the_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        solve = rng.beta(2.0, 2.0, size=20)
        rates = rng.binomial(4, solve) / 4
        _, low, high = mean_ci95(list(rates))
        hits += low <= 0.5 <= high
    assert 0.93 < hits / 2000 < 0.97


def test_a_change_is_paired_by_task() -> None:
    before = evaluation({f"t{i}": i / 10 for i in range(10)})
    after = evaluation({f"t{i}": i / 10 + 0.1 for i in range(10)})
    delta, low, high = paired_change(before, after)
    assert (delta, low, high) == pytest.approx((0.1, 0.1, 0.1))


def test_an_evaluation_comes_back_from_a_checkpoint_as_it_was() -> None:
    before = evaluation({f"t{i}": i / 7 for i in range(7)})
    assert Evaluation.from_dict(json.loads(json.dumps(before.as_dict()))) == before


def test_evaluations_without_a_shared_task_are_not_compared() -> None:
    with pytest.raises(ValueError, match="share no task"):
        paired_change(evaluation({"a": 1.0, "b": 1.0}), evaluation({"c": 1.0, "d": 0.0}))
