"""The life of a graph: start its stages in order, watch them while the driver stage runs, stop them in reverse.

Knows no Ray: a stage is reached through a `Host`, which `pipelines.launch` makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from pipelines import stacks
from pipelines.errors import show
from pipelines.observer import Observer
from pipelines.plan import Plan, PlannedStage
from pipelines.processes import below
from pipelines.stage import StageError, StageTimeout

RunStatus = Literal["success", "failed", "interrupted"]

_CAUSE_TIMEOUT_S = 5.0
_DUMP_TIMEOUT_S = 2.0
_MUTE_STOP_TIMEOUT_S = 2.0
"""A stage that did not even say where it stands is not given more time than this to stop."""


class Host(Protocol):
    """One placed stage. Methods raise `StageError`, with the stage's name first, or `TimeoutError` when time is up."""

    @property
    def pid(self) -> int | None:
        """The process of the stage; None before it is known."""
        ...

    async def build(self, needs: Mapping[str, Any], timeout_s: float) -> None:
        """Construct the component in its own process, given the hosts of its needs."""
        ...

    async def call(self, method: str, timeout_s: float | None) -> Any:
        """Call an async method of the component that takes no arguments."""
        ...

    async def dump_stacks(self, reason: str, timeout_s: float) -> Path | None:
        """Have the stage write where its threads and tasks stand; the file, None if it wrote too many."""
        ...


Place = Callable[[PlannedStage], Any]
"""Makes the host of a stage, without waiting for it."""


@dataclass(slots=True)
class Ending:
    """How a run ended. `figures` is the last status of each stage; `warnings` tell what did not stop cleanly."""

    status: RunStatus = "failed"
    error: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    figures: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    warnings: list[str] = field(default_factory=list[str])


class Interrupts:
    """Signals that a person or a scheduler sent: the first ends the run in order, the second at once."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.name = ""

    def deliver(self, name: str) -> None:
        """A signal called `name` came."""
        if self.first.is_set():
            self.second.set()
        self.name = self.name or name
        self.first.set()


class Supervisor:
    """Runs one plan once. `heartbeat_s` is the pause between two looks at a stage; a look has `heartbeat_timeout_s`.

    When a deadline ends the run, every stage writes where it stands into `run_dir`, and the message names the files.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        observer: Observer,
        run_dir: Path,
        *,
        heartbeat_s: float,
        heartbeat_timeout_s: float,
    ) -> None:
        self._plan, self._place, self._observer = plan, place, observer
        self._stacks_dir = run_dir / stacks.FOLDER
        self._heartbeat_s, self._heartbeat_timeout_s = heartbeat_s, heartbeat_timeout_s
        self._placed: dict[str, Host] = {}
        self._hosts: dict[str, Host] = {}
        self._starting: set[str] = set()
        self._mute: set[str] = set()
        self._beats: dict[str, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ending = Ending()

    async def supervise(self, interrupts: Interrupts) -> Ending:
        """Start, run, stop. Never raises for what a stage did: that is in the `Ending`."""
        for stage in self._plan.stages:
            self._observer.stage(stage.name, "waiting")
        work = asyncio.create_task(self._work())
        signalled = asyncio.create_task(interrupts.first.wait())  # bounded: cancelled when the run ends
        # bounded: a start by its own deadline, a run by the heartbeats
        await asyncio.wait({work, signalled, self._broken}, return_when=asyncio.FIRST_COMPLETED)
        if interrupts.first.is_set():
            self._ending.status, self._ending.error = "interrupted", f"interrupted by {interrupts.name}"
            self._observer.note(f"{interrupts.name}: stopping all stages; once more ends at once")
        elif work.done() and work.exception() is None:
            self._ending.status = "success"
        else:
            error = (work.exception() if work.done() else None) or self._broken.exception()
            self._ending.error = await self._root_cause(error or StageError("the run ended without a result"))
        for task in (work, signalled, *self._beats.values()):
            task.cancel()
        if self._plan.driver in self._hosts and self._ending.status != "failed":
            with contextlib.suppress(StageError):
                self._show(self._plan.driver, await self._look(self._plan.driver, _CAUSE_TIMEOUT_S))
        stopping = asyncio.create_task(self._stop_all())
        forced = asyncio.create_task(interrupts.second.wait())  # bounded: cancelled when the stop ends
        # bounded: each stage's stop
        await asyncio.wait({stopping, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            self._ending.warnings.append("a second signal came: stages were not stopped in order")
        for task in (stopping, forced):
            task.cancel()
        ended = (work, signalled, stopping, forced, *self._beats.values())
        await asyncio.gather(*ended, return_exceptions=True)  # bounded: all are cancelled
        if self._broken.done():
            self._broken.exception()  # seen
        return self._ending

    async def _work(self) -> None:
        self._placed = {stage.name: self._place(stage) for stage in self._plan.stages}
        for stage in self._plan.stages:
            await self._start(stage, self._placed[stage.name])
        for stage in self._plan.stages:
            self._ending.facts.update(await self._ask(stage.name, "facts", self._heartbeat_timeout_s) or {})
        metrics = await self._hosts[self._plan.driver].call("run", None)  # bounded: by its heartbeat
        self._ending.metrics = dict(metrics or {})

    async def _start(self, stage: PlannedStage, host: Host) -> None:
        name = stage.name
        self._observer.stage(name, "starting")
        clock = asyncio.get_running_loop().time
        deadline = clock() + stage.start_timeout_s
        try:
            await host.build({need: self._hosts[need] for need in stage.needs}, stage.start_timeout_s)
            self._hosts[name] = host
            self._starting.add(name)
            self._beats[name] = asyncio.create_task(self._beat(name))
            await host.call("start", deadline - clock())
        except TimeoutError:
            remedy = f"raise stages.{name}.start_timeout_s, or see log.txt for what it waits for"
            late = f"stage '{name}' did not start within {stage.start_timeout_s:g} s; {remedy}"
            raise StageTimeout(late) from None
        self._starting.discard(name)
        self._observer.stage(name, "up")

    async def _beat(self, name: str) -> None:
        """Look at one stage again and again; the first bad answer breaks the run."""
        while not self._broken.done():
            try:
                self._show(name, await self._look(name, self._heartbeat_timeout_s))
            except StageError as error:
                # A stage that still starts may not have figures yet; `start` itself tells if it failed.
                if name not in self._starting:
                    if not self._broken.done():
                        self._broken.set_exception(error)
                    return
            await asyncio.sleep(self._heartbeat_s)

    async def _look(self, name: str, timeout_s: float) -> Mapping[str, Any]:
        return await self._ask(name, "status", timeout_s)

    async def _ask(self, name: str, method: str, timeout_s: float) -> Any:
        try:
            return await self._hosts[name].call(method, timeout_s)
        except TimeoutError:
            raise StageTimeout(f"stage '{name}' did not answer for {timeout_s:g} s") from None

    def _show(self, name: str, figures: Mapping[str, Any] | None) -> None:
        if figures:
            self._ending.figures[name] = figures
            self._observer.status(name, figures)

    async def _root_cause(self, error: BaseException) -> str:
        """A failing stage makes others fail: of all that are broken now, the first in starting order is to blame."""
        stuck = _blamed(error) if isinstance(error, StageTimeout) else ""
        names = [name for name in self._hosts if name not in self._starting and name != stuck]
        looks = [self._look(name, min(_CAUSE_TIMEOUT_S, self._heartbeat_timeout_s)) for name in names]
        found = await asyncio.gather(*looks, return_exceptions=True)  # bounded: each look
        broken = {name: answer for name, answer in zip(names, found, strict=True) if isinstance(answer, StageError)}
        told = _blamed(error)
        if stuck or isinstance(broken.get(told), StageTimeout):
            broken[told] = cast(StageError, error)  # it knew more before it fell silent
        ordered = [(stage.name, broken[stage.name]) for stage in self._plan.stages if stage.name in broken]
        name, cause = next(iter(ordered), (_blamed(error), error))
        message = str(cause) if isinstance(cause, StageError) else f"{type(cause).__name__}: {show(cause)}"
        if isinstance(cause, StageTimeout):
            message += await self._write_stacks(name, message)
        if name in self._placed:
            self._observer.stage(name, "failed", message)
        return message

    async def _write_stacks(self, blamed: str, reason: str) -> str:
        """Have all stages say where they stand, for who waits and who is waited for belong together."""
        names = sorted(self._placed, key=lambda name: name != blamed)
        found = await asyncio.gather(*(self._stacks_of(name, reason) for name in names))  # bounded: each of them
        files = dict(zip(names, found, strict=True))
        first = files.pop(blamed, [])
        num_others = sum(map(len, files.values()))
        if not first:
            return f"; stacks in {self._stacks_dir}" if num_others else ""
        more = f" and {num_others} of other stages beside it" if num_others else ""
        return f"; stacks in {', '.join(str(path) for path in first)}{more}"

    async def _stacks_of(self, name: str, reason: str) -> list[Path]:
        """What a stage wrote; of one that does not even answer this, what can be seen from outside."""
        host = self._placed[name]
        if host.pid is None:
            return []
        try:
            path = await host.dump_stacks(reason, _DUMP_TIMEOUT_S)
        except TimeoutError:
            self._mute.add(name)
            return stacks.of_mute(self._stacks_dir, name, host.pid, reason)
        except StageError:
            return []  # it is dead
        return [] if path is None else [path]

    async def _stop_all(self) -> None:
        ended = {name for name in self._mute if self._end_by_force(name)}
        for stage in reversed(self._plan.stages):
            host = self._hosts.get(stage.name)
            if host is None or stage.name in ended:
                continue
            self._observer.stage(stage.name, "stopping")
            mute = stage.name in self._mute
            limit_s = min(stage.stop_timeout_s, _MUTE_STOP_TIMEOUT_S) if mute else stage.stop_timeout_s
            try:
                await host.call("stop", limit_s)
            except TimeoutError:
                late = f"stage '{stage.name}' did not stop within {limit_s:g} s"
                files = [] if mute else await self._stacks_of(stage.name, late)
                self._warn("; stacks in ".join([late, *(str(path) for path in files[:1])]))
            except StageError as error:
                if not (self._ending.error or "").startswith(str(error)):
                    self._warn(f"while stopping: {error}")
            self._observer.stage(stage.name, "down")

    def _end_by_force(self, name: str) -> bool:
        """End a process that answers nothing, stopped or stuck in native code. False if it is of another machine.

        Before the others are stopped: they would wait for what they asked of it, and so would Ray.
        """
        pid = self._placed[name].pid
        if pid is None or pid not in below(os.getpid()):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._warn(f"stage '{name}' answered nothing and was killed")
        self._observer.stage(name, "down")
        return True

    def _warn(self, line: str) -> None:
        self._ending.warnings.append(line)
        self._observer.note(line)


def _blamed(error: BaseException) -> str:
    """Name of the stage that an error message starts with."""
    with contextlib.suppress(IndexError):
        return str(error).split("'")[1]
    return ""


def last_step(ending: Ending, driver: str) -> int | None:
    """How many steps the driver stage has done, by its own `status`; None if it never said."""
    step = cast(Any, ending.figures.get(driver, {})).get("step")
    return int(step) if step is not None else None
