"""Virtual time, and what the simulator says of schedules whose outcome is known."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from composed import compose_config
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miles_rl.preflight import check
from miles_rl.rollout.groups import Sample
from miles_rl.simulator import clock
from miles_rl.simulator.distribution import Distribution
from miles_rl.simulator.episode import EpisodeModel, StubEpisodes
from miles_rl.simulator.fleet import SimulatedFleet
from miles_rl.simulator.replica import ReplicaModel
from miles_rl.simulator.simulation import Schedule, Simulation
from miles_rl.simulator.trainer import EvaluationPlan, TrainerModel
from pipelines.origin import resolve


def constant(value: float) -> Distribution:
    return Distribution(median=value)


EPISODE = EpisodeModel(
    turns=constant(3),
    prompt_tokens=constant(10),
    reply_tokens=constant(10),
    observation_tokens=constant(5),
    sandbox_s=constant(1.0),
    command_s=constant(2.0),
    verify_s=constant(1.0),
    task_factor=constant(1.0),
    max_turns=5,
    turn_tokens=100,
    session_tokens=1000,
    wall_clock_s=500.0,
)
REPLICA = ReplicaModel(
    token_s=0.1, token_s_per_request=0.0, prefill_tokens_per_s=1e9, max_running=1000, cache_tokens=10**6
)
"""An episode takes 1 + 3 x (10 x 0.1 + 2) + 1 = 11 s."""
EPISODE_S = 11.0
LONG_TAIL = Distribution(median=1.0, sigma=1.0, tail_share=0.1, tail_from=10.0, tail_alpha=1.5, most=200.0)
SCHEDULE = Schedule(num_groups=2, group_size=4, concurrency=8, max_staleness=2, num_tasks=10, steps=20)


def simulation(train_s: float = 0.0, **episode: Any) -> Simulation:
    return Simulation(
        episode=replace(EPISODE, **episode),
        replica=REPLICA,
        trainer=TrainerModel(train_s=constant(train_s), publish_s=constant(0.0)),
        bound_episodes=100,
        give_up_s=10_000.0,
    )


def test_waits_end_in_the_order_of_their_times_and_take_no_time() -> None:
    async def main() -> tuple[list[str], float]:
        ended: list[str] = []
        event = asyncio.Event()

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            ended.append(name)
            if name == "b":
                event.set()

        async def waiter() -> None:
            await event.wait()
            ended.append("event")

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("c", 3600.0), ("a", 1.0), ("b", 60.0)):
                group.create_task(sleeper(name, seconds))
            group.create_task(waiter())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(10)
        return ended, asyncio.get_running_loop().time()

    ended, now = clock.run(main(), "virtual")
    assert ended == ["a", "b", "event", "c"]
    assert now == pytest.approx(3605.0)


def test_a_wait_that_nothing_can_end_is_a_deadlock_and_no_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(clock.Deadlock, match="every task waits for another"):
        clock.run(main(), "virtual")


def test_constant_latencies_give_the_throughput_of_the_closed_form() -> None:
    result = simulation().run(SCHEDULE)
    assert result.error == ""
    assert result.samples_per_s == pytest.approx(8 / EPISODE_S, rel=0.02)
    assert result.step_s == pytest.approx(EPISODE_S, rel=0.02)
    assert result.episode_s_mean == pytest.approx(EPISODE_S)
    assert result.of_bound == pytest.approx(1.0, rel=0.03)


def test_training_that_takes_longer_than_rollouts_is_the_bound() -> None:
    result = simulation(train_s=30.0).run(SCHEDULE)
    assert result.step_s == pytest.approx(30.0, rel=0.02)
    assert result.trainer_idle_ratio < 0.02


def test_synchronous_steps_take_rollouts_and_training_one_after_the_other() -> None:
    result = simulation(train_s=30.0).run(replace(SCHEDULE, max_staleness=0, protect_after=None))
    assert result.step_s == pytest.approx(30.0 + EPISODE_S, rel=0.02)
    assert result.staleness_max == 0


def test_the_same_seed_gives_the_same_figures_and_another_seed_others() -> None:
    model = simulation(command_s=LONG_TAIL, sandbox_failure_rate=0.05)
    first, again = model.run(SCHEDULE), model.run(SCHEDULE)
    assert first == again
    assert model.run(replace(SCHEDULE, seed=1)) != first


def test_with_long_tails_admission_of_samples_beats_that_of_groups() -> None:
    model = simulation(command_s=LONG_TAIL)
    wide = replace(SCHEDULE, max_staleness=6)
    samples, groups = model.run(wide), model.run(replace(wide, admission="group"))
    assert samples.step_s < 0.8 * groups.step_s


def test_slow_tasks_starve_unless_they_are_protected() -> None:
    model = simulation(task_factor=Distribution(median=1.0, sigma=1.2), train_s=5.0)
    schedule = replace(SCHEDULE, concurrency=32, max_staleness=1, steps=60, num_groups=2, group_size=2)
    unprotected = model.run(replace(schedule, protect_after=None))
    protected = model.run(replace(schedule, protect_after=1))
    assert unprotected.error == protected.error == ""
    assert unprotected.starving_tasks
    assert not protected.starving_tasks
    assert protected.wasted_tokens_ratio < unprotected.wasted_tokens_ratio


def test_nothing_is_generated_after_a_truncated_turn() -> None:
    model = simulation(reply_tokens=Distribution(median=10, sigma=1.5), turn_tokens=30)
    result = model.run(SCHEDULE)
    assert result.error == ""
    assert result.tokens_after_truncation == 0


def test_tokens_carry_the_version_that_was_in_force_when_they_were_written() -> None:
    async def main() -> list[int]:
        fleet = SimulatedFleet(REPLICA, 1, "manual")
        episodes = StubEpisodes(replace(EPISODE, turns=constant(1)), fleet, 0, lambda ended: None)
        playing = asyncio.create_task(episodes.play(Sample(0, 0, 0, "task"), lambda sandbox_id: None))
        await asyncio.sleep(1.35)  # of the second in which the ten tokens are written, from 1.0 on
        await fleet.publish(1, 0.0)
        played = await playing
        assert played.trajectory is not None
        return [int(version) for version in played.trajectory.versions]

    assert clock.run(main(), "virtual") == [-1, 0, 1]


def test_a_schedule_that_can_never_make_a_batch_is_told_and_does_not_hang() -> None:
    result = simulation().run(replace(SCHEDULE, admission="group", concurrency=3))
    assert result.steps == 0
    assert result.error.startswith("deadlock: ")
    assert "no batch for version 0" in result.error


def test_the_longest_wait_stands_beside_the_deadline_that_a_real_run_would_have() -> None:
    result = simulation().run(replace(SCHEDULE, batch_timeout_s=EPISODE_S / 2))
    assert result.error == ""
    assert result.longest_wait_s == pytest.approx(EPISODE_S)
    assert result.batch_timeout_s == EPISODE_S / 2


class Faulty(Distribution):
    """Fails when it is asked for more numbers than there are tasks to train on."""

    def draw(self, rng: random.Random) -> float:
        seen.add(rng.random())
        if len(seen) > SCHEDULE.num_tasks:
            raise RuntimeError("a fault of the program")
        return 1.0


seen: set[float] = set()


def test_a_fault_in_the_evaluation_beside_the_training_is_raised() -> None:
    seen.clear()
    model = replace(simulation(task_factor=Faulty(median=1.0)), bound_episodes=0)
    assert model.run(SCHEDULE).error == ""
    with pytest.raises(ExceptionGroup) as raised:
        model.run(replace(SCHEDULE, evaluation=EvaluationPlan(every=5, num_tasks=1)))
    assert raised.group_contains(RuntimeError, match="a fault of the program")


def test_a_fault_while_the_bound_is_sought_is_raised() -> None:
    seen.clear()
    with pytest.raises(RuntimeError, match="a fault of the program"):
        simulation(task_factor=Faulty(median=1.0)).rollout_alone(replace(SCHEDULE, num_tasks=11))


@pytest.mark.timeout(20)
def test_waits_that_are_too_long_for_the_clock_end_the_simulation() -> None:
    with pytest.raises(clock.OutOfTime, match="1e\\+07 virtual seconds; give fewer steps, or a `most` to long tails"):
        simulation(sandbox_s=constant(1e9)).run(SCHEDULE)


@pytest.mark.timeout(20)
def test_late_in_virtual_time_short_replies_still_end() -> None:
    """After 90 days the clock cannot tell the last millionth of a token."""
    fast = replace(REPLICA, token_s=1e-5)

    async def main() -> float:
        await asyncio.sleep(8e6)
        fleet = SimulatedFleet(fast, 1, "manual")
        await asyncio.gather(*(fleet.generate(f"s{n}", 10, 1000 + n) for n in range(20)))
        return asyncio.get_running_loop().time() - 8e6

    assert clock.run(main(), "virtual") == pytest.approx(1019e-5, rel=1e-3)


def test_without_a_scored_sample_the_bound_is_beyond_every_step() -> None:
    model = simulation(sandbox_failure_rate=0.999999)
    result = model.run(replace(SCHEDULE, steps=1))
    assert (result.steps, result.error[:7]) == (0, "halted:")
    assert result.bound_s > 1e9


def test_a_policy_that_is_not_modelled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"router\.policy: cache_aware"):
        simulation().run(replace(SCHEDULE, router_policy="cache_aware"))


def test_long_tails_stay_below_their_most_and_draws_stay_paired() -> None:
    ours, other = random.Random(1), random.Random(1)
    for _ in range(200):
        assert 0 < LONG_TAIL.draw(ours) <= 200.0
        constant(3.0).draw(other)
    assert ours.random() == other.random()


CONFIG, _ = resolve(compose_config("sandbox.size=400"))


@settings(max_examples=100, deadline=None)
@given(
    mode=st.sampled_from(["async", "sync"]),
    num_groups=st.integers(1, 6),
    group_size=st.integers(1, 6),
    concurrency=st.integers(1, 48),
    max_staleness=st.integers(0, 4),
    admission=st.sampled_from(["sample", "group"]),
    protect_after=st.sampled_from([None, 0, 1, 2]),
    short_groups=st.sampled_from(["halt", "discard", "train"]),
    train_size=st.integers(1, 20),
    train_s=st.sampled_from([0.0, 3.0, 40.0]),
    seed=st.integers(0, 1000),
)
def test_a_config_that_the_plan_lets_through_never_starves(train_size: int, train_s: float, seed: int, **rollout: Any):
    config = {
        **CONFIG,
        "rollout": {**CONFIG["rollout"], **rollout, "max_failures_per_task": 50, "max_failures_in_a_row": 1000},
        "dataset": {**CONFIG["dataset"], "train_size": train_size},
        "seed": seed,
    }
    assume(not [finding for finding in check(config) if finding["level"] == "error"])
    model = simulation(
        train_s, command_s=LONG_TAIL, task_factor=Distribution(median=1.0, sigma=0.8), sandbox_failure_rate=0.05
    )
    result = replace(model, steps=8, bound_episodes=0).of(config)
    assert result.error == ""
    assert result.steps == 8
    assert result.staleness_max <= rollout["max_staleness"]
