"""minibench in the real local sandbox, scored by the real verifier."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox_env.archive import pack
from sandbox_env.oracle import do_nothing, main, report, score, sweep
from sandbox_env.outcome import Outcome
from sandbox_env.providers.base import Provider
from sandbox_env.providers.local import LocalProvider
from sandbox_env.sandbox import Sandbox
from sandbox_env.suites.base import DemoTurn
from sandbox_env.suites.minibench.demonstrations import draw_demonstrations
from sandbox_env.suites.minibench.exercise import Exercise
from sandbox_env.suites.minibench.plan import Plan, make_plan
from sandbox_env.suites.minibench.suite import Minibench
from sandbox_env.suites.minibench.writer import write_task
from sandbox_env.task import Task, load_task
from sandbox_env.verifier import Verdict

NUM_JOBS = 6


@asynccontextmanager
async def local_provider() -> AsyncIterator[Provider]:
    provider = LocalProvider()
    await provider.start("minibench-conformance")
    try:
        yield provider
    finally:
        await provider.stop()


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Minibench:
    return Minibench(str(tmp_path_factory.mktemp("minibench")))


def written(exercise: Exercise, folder: Path) -> Task:
    write_task(exercise, folder)
    return load_task(folder)


def varied(plan: Plan) -> list[Exercise]:
    """One exercise of every kind of check, of every number of turns, and then some."""
    return [*plan.evaluation, *plan.train[30:60]]


async def verdicts_of(provider: Provider, tasks: Sequence[Task], commands: Sequence[str]) -> list[Verdict]:
    free = asyncio.Semaphore(NUM_JOBS)

    async def one(task: Task, command: str) -> Verdict:
        async def agent(sandbox: Sandbox, task: Task) -> None:
            await sandbox.exec(command, timeout_s=20)

        async with free:
            return await score(provider, task, agent)

    return await asyncio.gather(*map(one, tasks, commands))


async def test_the_oracle_scores_1_and_doing_nothing_0_on_all_89_tasks(suite: Minibench):
    async with local_provider() as provider:
        findings = await sweep(provider, suite.tasks("all"), NUM_JOBS)
    assert report(findings) == "89 tasks: oracle 1.0 on 89, no-op 0.0 on 89"
    assert all(finding.no_op.outcome is Outcome.SCORED for finding in findings)


def checked_paths(exercise: Exercise) -> list[str]:
    return list(dict.fromkeys(check.arguments[0] for check in exercise.checks))


def for_each_path(exercise: Exercise, command: str) -> str:
    paths = " ".join(shlex.quote(path) for path in checked_paths(exercise) if not path.startswith("refs/"))
    return f"for path in {paths}; do {command}; done"


CHEATS = {
    "touched results": "touch $path",
    "emptied files": "echo -n > $path",
    "a reward of one's own": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > $path",
    "a reward that is a folder": "mkdir -p /logs/verifier/reward.txt/x /logs/verifier/ctrf.json",
    "folders": "rm -rf $path; mkdir -p $path",
    "links to nothing": "rm -rf $path; ln -s nowhere $path",
    "links to each other": "rm -rf $path; ln -s /app/$path $path",
    "links to the tests": "rm -rf $path; ln -s /tests/test.sh $path",
    "pipes": "rm -rf $path; mkfifo $path",
    "nothing readable": "chmod -R 000 $path",
    "large files": "head -c 3000000 /dev/zero > $path",
    "broken git": "[ -d .git ] && { rm -f .git/HEAD; mkfifo .git/HEAD; }",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_broken_or_cheated_world_scores_0_with_proof(tmp_path: Path, cheat: str):
    exercises = varied(make_plan(0))
    if cheat == "broken git":
        exercises = [exercise for exercise in make_plan(0).train if exercise.family in ("git-branch", "git-switch")]
    else:
        exercises = exercises[:: 4 if cheat != "touched results" else 1]
    tasks = [written(exercise, tmp_path / exercise.name) for exercise in exercises]
    async with local_provider() as provider:
        verdicts = await verdicts_of(
            provider, tasks, [for_each_path(exercise, CHEATS[cheat]) for exercise in exercises]
        )
    wrong = {task.name: v for task, v in zip(tasks, verdicts, strict=True) if (v.outcome, v.reward) != ("scored", 0.0)}
    assert not wrong


async def replay(provider: Provider, task: Task, turns: Sequence[DemoTurn]) -> tuple[list[DemoTurn], Verdict]:
    seen: list[DemoTurn] = []

    async def agent(sandbox: Sandbox, task: Task) -> None:
        for turn in turns:
            result = await sandbox.exec(turn.command, timeout_s=20)
            seen.append(DemoTurn(turn.command, result.output, result.exit_code))

    return seen, await score(provider, task, agent)


@pytest.mark.parametrize("mistake_rate", [0.0, 1.0])
async def test_demonstrations_print_what_they_say_and_score_as_they_should(tmp_path: Path, mistake_rate: float):
    drawn = list(draw_demonstrations(60, seed=11, mistake_rate=mistake_rate, exclude=set()))
    tasks = [written(exercise, tmp_path / f"{n}-{exercise.name}") for n, (exercise, _) in enumerate(drawn)]
    free = asyncio.Semaphore(NUM_JOBS)
    async with local_provider() as provider:

        async def bounded(task: Task, turns: Sequence[DemoTurn]) -> tuple[list[DemoTurn], Verdict]:
            async with free:
                return await replay(provider, task, turns)

        results = await asyncio.gather(
            *(bounded(task, demo.turns) for task, (_, demo) in zip(tasks, drawn, strict=True))
        )
    for (_, demo), (seen, verdict) in zip(drawn, results, strict=True):
        assert tuple(seen) == demo.turns
        assert verdict.reward == (0.0 if demo.mistaken else 1.0), (demo, verdict)


async def test_every_mistake_of_every_action_scores_0(tmp_path: Path):
    exercises = make_plan(5).train[:40]
    attempts = [(exercise, mistake) for exercise in exercises for mistake in exercise.mistakes]
    tasks = [written(exercise, tmp_path / f"{n}") for n, (exercise, _) in enumerate(attempts)]
    async with local_provider() as provider:
        verdicts = await verdicts_of(
            provider, tasks, ["\n".join(t.command for t in mistake) for _, mistake in attempts]
        )
    solved = [attempt for attempt, verdict in zip(attempts, verdicts, strict=True) if verdict.reward != 0.0]
    assert not solved


async def test_the_report_of_the_tests_is_ctrf_with_every_check(suite: Minibench):
    exercise = next(exercise for exercise in make_plan(0).train if exercise.family == "delete-file")
    found: list[bytes | None] = []

    async with local_provider() as provider:
        task = load_task(suite.folder / exercise.name)
        sandbox = await provider.create(task)
        try:
            await sandbox.upload(pack(task.path / "tests"), "/tests")
            await sandbox.exec("bash /tests/test.sh", timeout_s=20)
            found.append(await sandbox.download("/logs/verifier/ctrf.json", max_bytes=1 << 16))
        finally:
            await sandbox.close()
    ctrf = json.loads(found[0] or b"")
    assert ctrf["reportFormat"] == "CTRF"
    assert [test["status"] for test in ctrf["results"]["tests"]] == ["failed", "passed"]
    summary = ctrf["results"]["summary"]
    assert (summary["tests"], summary["passed"], summary["failed"]) == (2, 1, 1)
    assert 0 < summary["start"] <= summary["stop"]


def test_the_command_names_what_is_not_sound_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    plan = make_plan(0)
    for exercise in plan.train[:2]:
        write_task(exercise, tmp_path / "suite" / exercise.name)
    assert main(["--suite-dir", str(tmp_path / "suite"), "--jobs", "2"]) == 0
    assert capsys.readouterr().out == "2 tasks: oracle 1.0 on 2, no-op 0.0 on 2\n"

    broken = plan.train[0].name
    (tmp_path / "suite" / broken / "solution" / "solve.sh").write_text("true\n")
    assert main(["--suite-dir", str(tmp_path / "suite")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [broken, "oracle", "0.0", "no-op", "0.0"]
    assert lines[1] == "2 tasks: oracle 1.0 on 1, no-op 0.0 on 2"

    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "cache"))
    assert main(["--task", broken]) == 0
    assert main(["--task", "no-such-task"]) == 2
    assert "--task: no-such-task; no such task" in capsys.readouterr().err


async def test_a_task_whose_tests_do_not_run_is_not_scored_0(tmp_path: Path):
    task = written(make_plan(0).train[0], tmp_path / "task")
    (task.path / "tests" / "test.sh").write_text("exit 1\n")
    async with local_provider() as provider:
        verdict = await score(provider, task, do_nothing)
    assert (verdict.outcome, verdict.reward) == (Outcome.VERIFIER_FAILED, None)
