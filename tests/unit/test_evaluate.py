import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles_rl.evaluate import Evaluation, Evaluator, Progress, mean_ci95, paired_change
from miles_rl.types import Outcome


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


def ended(reward: float | None, outcome: Outcome = Outcome.SCORED) -> Any:
    return SimpleNamespace(result=SimpleNamespace(outcome=outcome, reward=reward))


def test_progress_tells_the_time_left_once_an_episode_has_ended() -> None:
    now_s = 100.0
    progress = Progress(3, 20, lambda: now_s)
    assert progress.figures(0)["left_s"] is None
    now_s = 108.0
    assert progress.figures(4) == {
        "version": 3, "done": 0, "total": 20, "solve_rate": None, "infra_failures": 0, "left_s": None
    }  # fmt: skip
    for reward in (1.0, 0.0, 0.5, 1.0, None):
        progress.ended(ended(reward, Outcome.SCORED if reward is not None else Outcome.SANDBOX_FAILED))
    progress.attempt_failed()
    now_s = 114.0
    figures = progress.figures(4)
    assert (figures["done"], figures["solve_rate"], figures["infra_failures"]) == (5, 0.5, 1)
    assert figures["left_s"] == pytest.approx(14.0 / 7 * 13), "four in flight count half"


class Plays:
    """Plays episodes one at a time, each when it is let; that of `broken` fails once."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.gate = broken, asyncio.Semaphore(0)

    async def run(self, task: Any, sample_id: str) -> Any:
        await self.gate.acquire()
        failed = sample_id == self.broken
        result = SimpleNamespace(
            outcome=Outcome.SANDBOX_FAILED if failed else Outcome.SCORED, reward=None if failed else 1.0, detail="gone"
        )
        policy = SimpleNamespace(arrays=lambda: (None, None, None, np.array([-1, 7])))
        return SimpleNamespace(task=task, result=result, policy=policy, record=lambda **of: None)


async def test_the_status_of_the_stage_tells_how_far_an_evaluation_is_and_then_what_it_found(tmp_path: Path) -> None:
    counts = {"num_samples": 2, "concurrency": 4, "max_attempts": 2, "max_retries": 5, "timeout_s": 20.0}
    agent: Any = None
    evaluator: Any = Evaluator(None, None, None, agent=agent, run_dir=str(tmp_path), **counts)
    evaluator._tasks = [SimpleNamespace(name=name) for name in "ab"]
    evaluator._runner = plays = Plays(broken="e7.a.0.0")
    evaluator._recorder = SimpleNamespace(record=lambda row: None, flush=lambda: None)
    assert await evaluator.status() == {"running": 0}
    work = asyncio.create_task(evaluator.evaluate(7))
    told: list[tuple[int, int]] = []
    for _ in range(5):
        await asyncio.sleep(0.01)
        now = (await evaluator.status())["now"]
        assert (now["version"], now["total"]) == (7, 4)
        told.append((now["done"], now["infra_failures"]))
        plays.gate.release()
    await work
    assert told == [(0, 0), (0, 1), (1, 1), (2, 1), (3, 1)]
    status = await evaluator.status()
    assert "now" not in status
    assert (status["solve_rate"], status["version"], status["episodes"], status["failed"]) == (1.0, 7, 4, 0)


async def test_an_evaluation_without_a_result_says_of_which_version_and_leaves_no_progress(tmp_path: Path) -> None:
    counts = {"num_samples": 1, "concurrency": 1, "max_attempts": 1, "max_retries": 0, "timeout_s": 20.0}
    agent: Any = None
    evaluator: Any = Evaluator(None, None, None, agent=agent, run_dir=str(tmp_path), **counts)
    evaluator._tasks = [SimpleNamespace(name=name) for name in "ab"]
    evaluator._runner = plays = Plays(broken="e2.a.0.0")
    evaluator._recorder = SimpleNamespace(record=lambda row: None, flush=lambda: None)
    plays.gate.release()
    plays.gate.release()
    told = (
        r"eval: version 2: no episode was scored of 1 of 2 tasks \(a\); 1 of 1 episodes ended with sandbox_failed: gone"
    )
    with pytest.raises(RuntimeError, match=told):
        await evaluator.evaluate(2)
    assert "now" not in await evaluator.status()
