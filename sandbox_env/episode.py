"""One episode: an agent in a sandbox, turn by turn, then the verifier.

The loop knows nothing of tokens or engines: a `Policy` is one conversation that replies and observes. A reply holds
one fenced command, a completion mark, or both:

    ```bash
    sort names.txt > sorted.txt
    ```
    TASK_COMPLETE
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sandbox_env.outcome import Outcome, StopReason
from sandbox_env.sandbox import ExecResult, Sandbox, SandboxError
from sandbox_env.task import Task
from sandbox_env.verifier import Verdict, verify

COMPLETION_MARK = "TASK_COMPLETE"
_LEAST_COMMAND_S = 0.01
FENCE = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)(?:\n[ \t]*)?```", re.DOTALL)


class PolicyError(Exception):
    """The policy could not reply because its engine failed: an infrastructure failure, never a reward."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply. `finish`: "stop" by the policy itself, "length" cut at the turn's limit, "budget" at the session's."""

    text: str
    finish: Literal["stop", "length", "budget"]


class Policy(Protocol):
    """One conversation of the policy."""

    async def reply(self, timeout_s: float) -> Reply:
        """The next reply. Raises `PolicyError`, or `TimeoutError` after `timeout_s`."""
        ...

    def observe(self, text: str) -> None:
        """Hand over what the last command printed."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Bounds of one episode. The wall clock runs from the moment the sandbox is ready, and ends a command that runs."""

    max_turns: int
    wall_clock_s: float
    command_timeout_s: float
    observation_chars: int


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What one turn did. `command` is None when the reply held none or it was not run."""

    text: str
    command: str | None
    observation: str
    generate_s: float
    exec_s: float


@dataclass(slots=True)
class EpisodeResult:
    """How an episode went. `reward` is set exactly when `outcome` is `SCORED`. Timings in seconds."""

    stop_reason: StopReason = StopReason.ABORTED
    outcome: Outcome = Outcome.CANCELLED
    reward: float | None = None
    detail: str = ""
    turns: list[TurnResult] = field(default_factory=list[TurnResult])
    timings: dict[str, float] = field(default_factory=dict[str, float])


def parse_reply(text: str) -> tuple[str | None, bool]:
    """The first fenced command of a reply, or None, and whether the reply says that the task is complete.

    A mark inside the fence belongs to the command and completes nothing. Further fences are not run.
    """
    match = FENCE.search(text)
    if match is None:
        return None, COMPLETION_MARK in text
    outside = text[: match.start()] + text[match.end() :]
    return match.group(1).strip() or None, COMPLETION_MARK in outside


def bound(text: str, limit: int) -> str:
    """`text` of at most `limit` characters, plus a mark in the middle that says how much was cut."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit - limit // 2], text[len(text) - limit // 2 :]
    return f"{head}\n[... {len(text) - limit} characters cut ...]\n{tail}"


def observation_of(result: ExecResult, limit: int, timeout_s: float) -> str:
    """What the agent is told of a command: its bounded output and, if not 0, its exit code."""
    lines = [bound(result.output.rstrip("\n"), limit)] if result.output.strip() else []
    if result.truncated:
        lines.append("[output cut]")
    if result.timed_out:
        lines.append(f"[timed out after {timeout_s:g} s]")
    elif result.exit_code != 0:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines) or "(no output)"


async def run_episode(task: Task, sandbox: Sandbox, policy: Policy, limits: EpisodeLimits) -> EpisodeResult:
    """Play one episode in a ready sandbox and score it. Never raises for what an episode can do to itself.

    The policy running out of wall clock scores 0. A failure of sandbox, engine or verifier is an `Outcome` with
    `detail`, not a reward. The caller closes the sandbox. Cancellation passes through.
    """
    result = EpisodeResult()
    ready = time.monotonic()
    try:
        result.stop_reason = await _agent_loop(sandbox, policy, limits, result)
        result.timings["agent_s"] = time.monotonic() - ready
        verdict = await _score(sandbox, task, result)
        result.outcome, result.reward, result.detail = verdict.outcome, verdict.reward, verdict.detail
    except PolicyError as error:
        result.stop_reason, result.outcome, result.detail = StopReason.ABORTED, Outcome.ENGINE_FAILED, str(error)
    except SandboxError as error:
        result.stop_reason, result.outcome, result.detail = StopReason.ABORTED, Outcome.SANDBOX_FAILED, str(error)
    return result


async def _score(sandbox: Sandbox, task: Task, result: EpisodeResult) -> Verdict:
    if result.stop_reason is StopReason.WALL_CLOCK:
        return Verdict(Outcome.SCORED, 0.0, "the agent's time was up")
    started = time.monotonic()
    verdict = await verify(sandbox, task)
    result.timings["verify_s"] = time.monotonic() - started
    return verdict


async def _agent_loop(sandbox: Sandbox, policy: Policy, limits: EpisodeLimits, result: EpisodeResult) -> StopReason:
    deadline = asyncio.get_running_loop().time() + limits.wall_clock_s
    for _ in range(limits.max_turns):
        started = time.monotonic()
        reply = await _reply(policy, limits)
        generate_s = time.monotonic() - started
        late = _left_s(deadline) <= 0
        if late or reply.finish != "stop":
            if reply.text:
                result.turns.append(TurnResult(reply.text, None, "", generate_s, 0.0))
            if late:
                return StopReason.WALL_CLOCK
            return StopReason.TURN_TRUNCATED if reply.finish == "length" else StopReason.SESSION_BUDGET
        command, complete = parse_reply(reply.text)
        observation, exec_s = "", 0.0
        if command is not None:
            started = time.monotonic()
            # The clock ends a command as its own time-out does, and never cancels one: a sandbox that does not end it
            # has failed, and that is no reward.
            timeout_s = max(_LEAST_COMMAND_S, min(limits.command_timeout_s, _left_s(deadline)))
            ran = await sandbox.exec(command, timeout_s=timeout_s)
            exec_s = time.monotonic() - started
            observation = observation_of(ran, limits.observation_chars, timeout_s)
        result.turns.append(TurnResult(reply.text, command, observation, generate_s, exec_s))
        if _left_s(deadline) <= 0:
            return StopReason.WALL_CLOCK
        if complete:
            return StopReason.COMPLETED
        if command is None:
            return StopReason.NO_COMMAND
        policy.observe(observation)
    return StopReason.MAX_TURNS


async def _reply(policy: Policy, limits: EpisodeLimits) -> Reply:
    """The next reply. The episode's clock does not cut it short: one that never comes is a failure of the engine, and
    only one that came too late is the policy's own.
    """
    try:
        return await policy.reply(limits.wall_clock_s)
    except TimeoutError as error:
        raise PolicyError(f"a wait inside the episode ran out: {error}") from error


def _left_s(deadline: float) -> float:
    return deadline - asyncio.get_running_loop().time()
