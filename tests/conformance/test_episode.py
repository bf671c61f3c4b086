"""The agent loop and the scoring in real sandboxes, with a policy that follows a script."""

import asyncio
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, cast

import pytest
import pytest_asyncio

from sandbox_env.episode import EpisodeLimits, EpisodeResult, PolicyError, Reply, run_episode
from sandbox_env.outcome import Outcome, StopReason
from sandbox_env.providers.local import LocalProvider
from sandbox_env.sandbox import Sandbox, SandboxError
from sandbox_env.task import Task, load_task
from sandbox_env.verifier import verify

PASS = "echo 1 > /logs/verifier/reward.txt"
PROOF = """echo '{"results": {"summary": {"tests": 1}}}' > /logs/verifier/ctrf.json"""
LIMITS = EpisodeLimits(max_turns=3, wall_clock_s=20.0, command_timeout_s=5.0, observation_chars=200)


Finish = Literal["stop", "length", "budget"]


class Script:
    """Replies line by line; what it observes is kept. A reply that is an exception is raised."""

    def __init__(self, *replies: str | Exception, finish: Finish = "stop") -> None:
        self.replies, self.observed = list(replies), list[str]()
        self.finish: Finish = finish

    async def reply(self, timeout_s: float) -> Reply:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        last = not self.replies
        return Reply(reply, self.finish if last else "stop")

    def observe(self, text: str) -> None:
        self.observed.append(text)


def run(command: str, mark: str = "") -> str:
    return f"```bash\n{command}\n```{mark}"


def make_task(folder: Path, test_sh: str, verifier_timeout_s: float = 10.0) -> Task:
    files = {
        "task.toml": f"[verifier]\ntimeout_sec = {verifier_timeout_s}\n",
        "instruction.md": "Write yes to answer.txt.",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "tests/test.sh": test_sh,
        "solution/solve.sh": "echo yes > answer.txt",
    }
    for name, text in files.items():
        path = folder / "answer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_task(folder / "answer")


CHECK = f'{PROOF}\n[ "$(cat /app/answer.txt)" = yes ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n'


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider() -> AsyncIterator[LocalProvider]:
    provider = LocalProvider()
    await provider.start("episodes")
    yield provider
    await provider.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def world(provider: LocalProvider, tmp_path: Path) -> AsyncIterator[tuple[Task, Sandbox]]:
    task = make_task(tmp_path, CHECK)
    sandbox = await provider.create(task)
    yield task, sandbox
    await sandbox.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_an_agent_that_does_the_task_and_says_so_scores_1(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    policy = Script(run("pwd; ls"), run("echo yes > answer.txt", "\nTASK_COMPLETE"))
    result = await run_episode(task, sandbox, policy, LIMITS)
    assert (result.outcome, result.reward, result.stop_reason) == (Outcome.SCORED, 1.0, StopReason.COMPLETED)
    assert policy.observed == ["/app"]
    assert [t.command for t in result.turns] == ["pwd; ls", "echo yes > answer.txt"]


async def test_state_and_failures_are_observed_between_turns(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    policy = Script(run("echo a > f; exit 3"), run("cat f; seq 200"), "TASK_COMPLETE")
    result = await run_episode(task, sandbox, policy, LIMITS)
    assert policy.observed[0] == "[exit code 3]"
    assert policy.observed[1].startswith("a\n1\n2\n")
    assert "characters cut" in policy.observed[1]
    assert policy.observed[1].endswith("199\n200")
    assert (result.reward, result.stop_reason) == (0.0, StopReason.COMPLETED)


@pytest.mark.parametrize(
    ("policy", "stop_reason", "ran"),
    [
        (Script("I am not sure."), StopReason.NO_COMMAND, False),
        (Script(*[run("true")] * 3), StopReason.MAX_TURNS, False),
        (Script(run("echo yes > answer.txt"), finish="length"), StopReason.TURN_TRUNCATED, False),
        (Script(run("echo yes > answer.txt"), finish="budget"), StopReason.SESSION_BUDGET, False),
        (Script(run("echo yes > answer.txt"), run("echo no >> x"), finish="length"), StopReason.TURN_TRUNCATED, True),
    ],
)
async def test_every_way_to_stop_is_named_and_nothing_after_a_cut_earns_a_reward(
    world: tuple[Task, Sandbox], policy: Script, stop_reason: StopReason, ran: bool
) -> None:
    task, sandbox = world
    result = await run_episode(task, sandbox, policy, LIMITS)
    assert result.stop_reason is stop_reason
    assert (result.outcome, result.reward) == (Outcome.SCORED, float(ran))


async def test_a_command_that_runs_too_long_is_ended_and_said(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    policy = Script(run("sleep 30"), run("echo yes > answer.txt", " TASK_COMPLETE"))
    limits = EpisodeLimits(3, 20.0, 0.5, 200)
    result = await run_episode(task, sandbox, policy, limits)
    assert policy.observed == ["[timed out after 0.5 s]"]
    assert result.reward == 1.0


async def test_the_agents_own_wall_clock_scores_0(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    policy = Script(run("echo yes > answer.txt"), run("sleep 30"))
    result = await run_episode(task, sandbox, policy, EpisodeLimits(3, 1.0, 10.0, 200))
    assert (result.outcome, result.reward, result.stop_reason) == (Outcome.SCORED, 0.0, StopReason.WALL_CLOCK)


class Deaf:
    """A sandbox whose provider does not end commands."""

    id = "deaf"

    async def exec(self, command, *, timeout_s, cwd=None, env=None):
        await asyncio.sleep(timeout_s + 0.5)
        raise SandboxError("deaf: the provider did not end a command")


async def test_a_sandbox_that_hangs_over_the_end_of_the_wall_clock_is_no_reward(world: tuple[Task, Sandbox]) -> None:
    result = await run_episode(world[0], cast(Sandbox, Deaf()), Script(run("true")), EpisodeLimits(3, 0.2, 10.0, 200))
    assert (result.outcome, result.reward) == (Outcome.SANDBOX_FAILED, None)


async def test_a_reply_that_comes_after_the_wall_clock_scores_0_and_is_not_run(world: tuple[Task, Sandbox]) -> None:
    class Slow(Script):
        async def reply(self, timeout_s: float) -> Reply:
            await asyncio.sleep(0.5)
            return await super().reply(timeout_s)

    result = await run_episode(world[0], world[1], Slow(run("true")), EpisodeLimits(3, 0.2, 10.0, 200))
    assert (result.outcome, result.reward, result.stop_reason) == (Outcome.SCORED, 0.0, StopReason.WALL_CLOCK)
    assert [(turn.text, turn.command) for turn in result.turns] == [(run("true"), None)]


async def test_a_reply_that_never_comes_is_the_engine_s_failure_also_over_the_end_of_the_wall_clock(
    world: tuple[Task, Sandbox],
) -> None:
    class Hung(Script):
        async def reply(self, timeout_s: float) -> Reply:
            await asyncio.sleep(0.5)
            raise PolicyError("no answer within 0.5 s")

    result = await run_episode(world[0], world[1], Hung(), EpisodeLimits(3, 0.2, 10.0, 200))
    assert (result.outcome, result.reward) == (Outcome.ENGINE_FAILED, None)


async def test_an_engine_that_fails_is_no_reward(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    result = await run_episode(task, sandbox, Script(PolicyError("http 500")), LIMITS)
    assert (result.outcome, result.reward, result.detail) == (Outcome.ENGINE_FAILED, None, "http 500")
    late = await run_episode(task, sandbox, Script(TimeoutError("request")), LIMITS)
    assert late.outcome is Outcome.ENGINE_FAILED, "a time-out inside a reply is the engine's, not the agent's"


async def test_a_sandbox_that_goes_away_is_no_reward(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    await sandbox.close()
    result = await run_episode(task, sandbox, Script(run("true")), LIMITS)
    assert (result.outcome, result.reward) == (Outcome.SANDBOX_FAILED, None)


async def test_the_agent_never_sees_the_tests(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    policy = Script(run("ls -A /tests /solution /logs/verifier 2>/dev/null | grep -v :"), "TASK_COMPLETE")
    await run_episode(task, sandbox, policy, LIMITS)
    assert "test.sh" not in policy.observed[0]
    assert "solve.sh" not in policy.observed[0]


REWARDS = [
    ("echo 0.25 > /logs/verifier/reward.txt", 0.25, ""),
    (f"{PROOF}; echo 0 > /logs/verifier/reward.txt; exit 1", 0.0, ""),
    ("seq 300000; echo '3 failed in 0.1s'; echo 0 > /logs/verifier/reward.txt", 0.0, ""),
    (f"{PASS}; echo '{{\"reward\": 0.5}}' > /logs/verifier/reward.json", 0.5, ""),
    ("echo 0 > /logs/verifier/reward.txt", None, "no proof that tests ran"),
    ("uv run pytest; echo 0 > /logs/verifier/reward.txt", None, "no proof that tests ran"),
    ("true", None, "neither reward.json nor reward.txt"),
    (": > /logs/verifier/reward.txt", None, "empty"),
    ("echo nan > /logs/verifier/reward.txt", None, "not a finite number"),
    ("echo passed > /logs/verifier/reward.txt", None, "not a finite number"),
    ("echo '{\"reward\": NaN}' > /logs/verifier/reward.json", None, "not a finite number"),
    ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', None, "no 'reward' and 2 numbers"),
    ("sleep 60", None, "did not end within 1 s"),
]


@pytest.mark.parametrize(("test_sh", "reward", "detail"), REWARDS)
async def test_only_a_reward_that_tests_really_gave_is_believed(
    provider: LocalProvider, tmp_path: Path, test_sh: str, reward: float | None, detail: str
) -> None:
    task = make_task(tmp_path, textwrap.dedent(test_sh), verifier_timeout_s=1.0)
    sandbox = await provider.create(task)
    try:
        verdict = await verify(sandbox, task)
    finally:
        await sandbox.close()
    assert verdict.reward == reward
    assert verdict.outcome is (Outcome.VERIFIER_FAILED if reward is None else Outcome.SCORED)
    assert detail in verdict.detail


async def test_reward_files_that_the_agent_left_are_not_believed(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    forge = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' >"
    policy = Script(run(f"{forge} /logs/verifier/reward.json; echo exit 0 > /tests/test.sh"), "TASK_COMPLETE")
    result = await run_episode(task, sandbox, policy, LIMITS)
    assert (result.outcome, result.reward) == (Outcome.SCORED, 0.0)


async def test_an_agent_that_locks_itself_out_of_its_workdir_scores_0(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    policy = Script(run("echo yes > answer.txt; chmod 000 /app"), "TASK_COMPLETE")
    result = await run_episode(task, sandbox, policy, LIMITS)
    assert (result.outcome, result.reward) == (Outcome.SCORED, 0.0)


async def test_a_cancelled_episode_says_nothing_and_raises(world: tuple[Task, Sandbox]) -> None:
    task, sandbox = world
    play = asyncio.create_task(run_episode(task, sandbox, Script(run("sleep 30")), LIMITS))
    await asyncio.sleep(0.2)
    play.cancel()
    with pytest.raises(asyncio.CancelledError):
        await play
    assert EpisodeResult().outcome is Outcome.CANCELLED
