"""Scoring in Harbor's way: run the task's own tests in the agent's sandbox, and believe only what they prove.

Source: Harbor task format, verifier section (0.25). A missing, empty or non-finite reward is a failure of the
verifier, never a 0; and a 0 is believed only with proof that tests ran, since a `test.sh` that could not install its
dependencies writes 0 as well.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass
from typing import cast

from sandbox_env.archive import pack
from sandbox_env.outcome import Outcome
from sandbox_env.sandbox import Sandbox
from sandbox_env.task import Task

LOGS = "/logs/verifier"
MAX_REPORT_BYTES = 1 << 20
SUMMARY_BYTES = 1 << 16
CLEAR = f"mkdir -p /tests {LOGS}; find /tests {LOGS} -mindepth 1 -delete"
RUN = f"cd {{workdir}} 2>/dev/null || cd /; bash /tests/test.sh > {LOGS}/test-stdout.txt 2>&1"
TEST_SUMMARY = re.compile(r"\b\d+ (passed|failed|error|errors)\b|\bRan \d+ tests?\b|^(ok|not ok) \d+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier found. `reward` is finite when `outcome` is `SCORED`, else None; `detail` says why."""

    outcome: Outcome
    reward: float | None
    detail: str = ""


async def verify(sandbox: Sandbox, task: Task) -> Verdict:
    """Score the state the agent left behind. Raises `SandboxError` when the sandbox itself breaks.

    The tests are uploaded only here, after the agent is done. The exit code of `test.sh` is ignored.
    """
    await sandbox.exec(CLEAR, timeout_s=min(30.0, task.verifier_timeout_s), cwd="/")
    await sandbox.upload(pack(task.path / "tests"), "/tests")
    # An agent that locked itself out of its workdir has failed the task; it has not broken the verifier.
    command = RUN.format(workdir=shlex.quote(task.workdir))
    ran = await sandbox.exec(command, timeout_s=task.verifier_timeout_s, cwd="/")
    if ran.timed_out:
        return _failed(f"test.sh did not end within {task.verifier_timeout_s:g} s")
    try:
        reward = await _read_reward(sandbox)
    except ValueError as error:
        return _failed(str(error))
    if reward == 0 and not await _tests_ran(sandbox):
        return _failed("reward 0 without a ctrf.json or a test summary: no proof that tests ran")
    return Verdict(Outcome.SCORED, reward)


def _failed(detail: str) -> Verdict:
    return Verdict(Outcome.VERIFIER_FAILED, None, detail)


async def _read_reward(sandbox: Sandbox) -> float:
    """The reward that the tests wrote; `reward.json` wins over `reward.txt`. `ValueError` says what is wrong."""
    raw = await sandbox.download(f"{LOGS}/reward.json", max_bytes=MAX_REPORT_BYTES)
    if raw is not None:
        return _reward_of_json(raw)
    raw = await sandbox.download(f"{LOGS}/reward.txt", max_bytes=MAX_REPORT_BYTES)
    if raw is None:
        raise ValueError("test.sh wrote neither reward.json nor reward.txt")
    text = raw.decode(errors="replace").strip()
    if not text:
        raise ValueError("reward.txt is empty")
    try:
        return _finite(float(text), "reward.txt")
    except ValueError:
        raise ValueError(f"reward.txt holds {text[:40]!r}, not a finite number") from None


def _reward_of_json(raw: bytes) -> float:
    try:
        values: object = json.loads(raw)
    except ValueError:
        raise ValueError("reward.json is not JSON") from None
    if isinstance(values, dict):
        named = cast(dict[str, object], values)
        numbers = {k: v for k, v in named.items() if isinstance(v, int | float)}
        if "reward" in numbers:
            values = numbers["reward"]
        elif len(numbers) == 1:
            values = next(iter(numbers.values()))
        else:
            raise ValueError(f"reward.json has no 'reward' and {len(numbers)} numbers: {sorted(numbers)[:5]}")
    if isinstance(values, int | float) and not isinstance(values, bool):
        return _finite(float(values), "reward.json")
    raise ValueError("reward.json holds no number")


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} holds {value}, not a finite number")
    return value


async def _tests_ran(sandbox: Sandbox) -> bool:
    report = await sandbox.download(f"{LOGS}/ctrf.json", max_bytes=MAX_REPORT_BYTES)
    if report is not None:
        try:
            return int(json.loads(report)["results"]["summary"]["tests"]) > 0
        except (ValueError, KeyError, TypeError):
            return False
    tail = await sandbox.exec(f"tail -c {SUMMARY_BYTES} {LOGS}/test-stdout.txt", timeout_s=30.0, cwd="/")
    return TEST_SUMMARY.search(tail.output) is not None
