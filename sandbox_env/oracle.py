"""Is the suite sound? Run every task's own solution, which must score 1, and no solution, which must score 0.

    python -m sandbox_env.oracle                            # minibench, all 89
    python -m sandbox_env.oracle --suite-dir DIR --jobs 4   # any folder of tasks in Harbor format
    python -m sandbox_env.oracle --task count-lines-kastel

Both run in the real local sandbox and through the real verifier, as in an episode.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_env.archive import pack
from sandbox_env.outcome import Outcome
from sandbox_env.providers.base import Provider
from sandbox_env.providers.local import LocalProvider
from sandbox_env.sandbox import Sandbox, SandboxError
from sandbox_env.suites.minibench.suite import Minibench
from sandbox_env.task import Task, load_tasks, require_supported, resolve_env
from sandbox_env.verifier import Verdict, verify

Agent = Callable[[Sandbox, Task], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one task scored with its own solution and with none. A sandbox that failed is a verdict without reward."""

    task: str
    oracle: Verdict
    no_op: Verdict

    @property
    def sound(self) -> bool:
        """True if the solution scores 1 and doing nothing scores 0."""
        return self.oracle.reward == 1.0 and self.no_op.reward == 0.0


async def solve(sandbox: Sandbox, task: Task) -> None:
    """The oracle: upload the task's solution and run it, with the time that an agent would have."""
    await sandbox.upload(pack(task.path / "solution"), "/solution")
    env = resolve_env(task, table="solution")
    await sandbox.exec("bash /solution/solve.sh", timeout_s=task.agent_timeout_s, cwd=task.workdir, env=env)


async def do_nothing(sandbox: Sandbox, task: Task) -> None:
    """The no-op: the task must not be solved already."""


async def score(provider: Provider, task: Task, agent: Agent) -> Verdict:
    """Let `agent` act in a fresh sandbox of the task and verify what it left behind."""
    try:
        sandbox = await provider.create(task)
        try:
            await agent(sandbox, task)
            return await verify(sandbox, task)
        finally:
            await sandbox.close()
    except SandboxError as error:
        return Verdict(Outcome.SANDBOX_FAILED, None, str(error))


async def sweep(provider: Provider, tasks: Sequence[Task], num_jobs: int) -> list[Finding]:
    """Oracle and no-op over all tasks, `num_jobs` sandboxes at a time, in the order of `tasks`."""
    free = asyncio.Semaphore(num_jobs)

    async def bounded(task: Task, agent: Agent) -> Verdict:
        async with free:  # bounded: the operations of who holds a place
            return await score(provider, task, agent)

    # bounded: each operation of a sandbox
    verdicts = await asyncio.gather(*(bounded(task, agent) for task in tasks for agent in (solve, do_nothing)))
    return [
        Finding(task.name, oracle, no_op)
        for task, oracle, no_op in zip(tasks, verdicts[::2], verdicts[1::2], strict=True)
    ]


def report(findings: Sequence[Finding]) -> str:
    """A line for every task that is not sound, and a summary."""
    width = max((len(finding.task) for finding in findings), default=0)
    lines = [
        f"{finding.task:<{width}}  oracle {_shown(finding.oracle)}  no-op {_shown(finding.no_op)}"
        for finding in findings
        if not finding.sound
    ]
    solved = sum(finding.oracle.reward == 1.0 for finding in findings)
    unsolved = sum(finding.no_op.reward == 0.0 for finding in findings)
    return "\n".join([*lines, f"{len(findings)} tasks: oracle 1.0 on {solved}, no-op 0.0 on {unsolved}"])


def _shown(verdict: Verdict) -> str:
    return str(verdict.reward) if verdict.reward is not None else f"{verdict.outcome}: {verdict.detail}"


def chosen_tasks(suite_dir: str | None, task: str | None) -> list[Task]:
    """The tasks that the command line asks for. Raises `ValueError` for an unknown one."""
    if suite_dir is None:
        cache = os.environ.get("MILES_CACHE", "~/.cache/miles_rl")
        tasks = Minibench(root=f"{cache}/minibench").tasks("all")
    else:
        tasks = load_tasks(Path(suite_dir))
    if task is not None:
        tasks = [known for known in tasks if known.name == task]
        if not tasks:
            raise ValueError(f"--task: {task}; no such task, leave it out to run them all")
    for known in tasks:
        require_supported(known)
    return tasks


async def run(tasks: Sequence[Task], num_jobs: int) -> list[Finding]:
    """The sweep in the local sandbox."""
    provider = LocalProvider()
    await provider.start(f"oracle-{uuid.uuid4().hex[:8]}")
    try:
        return await sweep(provider, tasks, num_jobs)
    finally:
        await provider.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0 if every task is sound, 1 if not, 2 if it could not run."""
    parser = argparse.ArgumentParser(prog="python -m sandbox_env.oracle", description="Score each task's solution.")
    parser.add_argument("--suite-dir", help="folder of task folders; default: minibench")
    parser.add_argument("--task", help="only this one")
    parser.add_argument("--jobs", type=int, default=8, help="sandboxes at a time")
    options = parser.parse_args(arguments)
    try:
        findings = asyncio.run(run(chosen_tasks(options.suite_dir, options.task), max(1, options.jobs)))
    except (ValueError, SandboxError) as error:
        print(error, file=sys.stderr)
        return 2
    print(report(findings))
    return 0 if all(finding.sound for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
