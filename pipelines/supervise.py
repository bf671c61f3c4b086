"""The life of a graph: start its stages in order, watch them while the driver stage runs, stop them in reverse.

Knows no Ray: a stage is reached through a `Host`, which `pipelines.launch` makes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from pipelines.errors import show
from pipelines.observer import Observer
from pipelines.plan import Plan, PlannedStage
from pipelines.stage import StageError

RunStatus = Literal["success", "failed", "interrupted"]

_CAUSE_TIMEOUT_S = 5.0


class Host(Protocol):
    """One placed stage. Methods raise `StageError`, with the stage's name first, or `TimeoutError`."""

    async def build(self, needs: Mapping[str, Any], timeout_s: float) -> None:
        """Construct the component in its own process, given the hosts of its needs."""
        ...

    async def call(self, method: str, timeout_s: float | None) -> Any:
        """Call an async method of the component that takes no arguments."""
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
    """Runs one plan once. `heartbeat_s` is the pause between two looks at a stage; a look has `heartbeat_timeout_s`."""

    def __init__(
        self, plan: Plan, place: Place, observer: Observer, heartbeat_s: float, heartbeat_timeout_s: float
    ) -> None:
        self._plan, self._place, self._observer = plan, place, observer
        self._heartbeat_s, self._heartbeat_timeout_s = heartbeat_s, heartbeat_timeout_s
        self._hosts: dict[str, Host] = {}
        self._starting: set[str] = set()
        self._beats: dict[str, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ending = Ending()

    async def supervise(self, interrupts: Interrupts) -> Ending:
        """Start, run, stop. Never raises for what a stage did: that is in the `Ending`."""
        for stage in self._plan.stages:
            self._observer.stage(stage.name, "waiting")
        work = asyncio.create_task(self._work())
        signalled = asyncio.create_task(interrupts.first.wait())
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
        forced = asyncio.create_task(interrupts.second.wait())
        await asyncio.wait({stopping, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            self._ending.warnings.append("a second signal came: stages were not stopped in order")
        for task in (stopping, forced):
            task.cancel()
        await asyncio.gather(work, signalled, stopping, forced, *self._beats.values(), return_exceptions=True)
        if self._broken.done():
            self._broken.exception()  # seen
        return self._ending

    async def _work(self) -> None:
        hosts = {stage.name: self._place(stage) for stage in self._plan.stages}
        for stage in self._plan.stages:
            await self._start(stage, hosts[stage.name])
        for stage in self._plan.stages:
            facts = await self._hosts[stage.name].call("facts", self._heartbeat_timeout_s)
            self._ending.facts.update(facts or {})
        metrics = await self._hosts[self._plan.driver].call("run", None)  # watched by its heartbeat
        self._ending.metrics = dict(metrics or {})

    async def _start(self, stage: PlannedStage, host: Host) -> None:
        name = stage.name
        self._observer.stage(name, "starting")
        try:
            async with asyncio.timeout(stage.start_timeout_s):
                await host.build({need: self._hosts[need] for need in stage.needs}, stage.start_timeout_s)
                self._hosts[name] = host
                self._starting.add(name)
                self._beats[name] = asyncio.create_task(self._beat(name))
                await host.call("start", stage.start_timeout_s)
        except TimeoutError:
            remedy = f"raise stages.{name}.start_timeout_s, or see log.txt for what it waits for"
            raise StageError(f"stage '{name}' did not start within {stage.start_timeout_s:g} s; {remedy}") from None
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
        try:
            return await self._hosts[name].call("status", timeout_s)
        except TimeoutError:
            raise StageError(f"stage '{name}' did not answer for {timeout_s:g} s") from None

    def _show(self, name: str, figures: Mapping[str, Any] | None) -> None:
        if figures:
            self._ending.figures[name] = figures
            self._observer.status(name, figures)

    async def _root_cause(self, error: BaseException) -> str:
        """A failing stage makes others fail: of all that are broken now, the first in starting order is to blame."""
        names = [name for name in self._hosts if name not in self._starting]
        looks = [self._look(name, min(_CAUSE_TIMEOUT_S, self._heartbeat_timeout_s)) for name in names]
        found = await asyncio.gather(*looks, return_exceptions=True)
        broken = {name: answer for name, answer in zip(names, found, strict=True) if isinstance(answer, StageError)}
        name, cause = next(iter(broken.items()), (_blamed(error), error))
        message = str(cause) if isinstance(cause, StageError) else f"{type(cause).__name__}: {show(cause)}"
        if name in {stage.name for stage in self._plan.stages}:
            self._observer.stage(name, "failed", message)
        return message

    async def _stop_all(self) -> None:
        for stage in reversed(self._plan.stages):
            host = self._hosts.get(stage.name)
            if host is None:
                continue
            self._observer.stage(stage.name, "stopping")
            try:
                async with asyncio.timeout(stage.stop_timeout_s):
                    await host.call("stop", stage.stop_timeout_s)
            except TimeoutError:
                self._warn(f"stage '{stage.name}' did not stop within {stage.stop_timeout_s:g} s")
            except StageError as error:
                if str(error) != self._ending.error:
                    self._warn(f"while stopping: {error}")
            self._observer.stage(stage.name, "down")

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
