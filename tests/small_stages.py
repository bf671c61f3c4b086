"""Small real components, to try plans and the launcher without the learner."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol


def die_with_parent() -> None:
    """What every process of a component does: it ends when its parent does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class Shape(Protocol):
    """Something with an area."""

    def area(self) -> float: ...


class Square:
    """A shape."""

    def __init__(self, side: float) -> None:
        self.side = side

    def area(self) -> float:
        return self.side**2


class NoShape:
    """Not a shape."""


class Source:
    """Counts, and writes what happens to it into `diary`."""

    def __init__(
        self,
        *,
        diary: str,
        first: int = 0,
        step: float = 1.0,
        label: str | None = None,
        order: Literal["up", "down"] = "up",
        sizes: list[int] | None = None,
        shape: Shape | None = None,
        options: Mapping[str, int] | None = None,
    ) -> None:
        self._diary, self._next, self.step = Path(diary), first, step
        self._child: subprocess.Popen[bytes] | None = None

    @staticmethod
    def describe(options: Mapping[str, Any]) -> dict[str, Any]:
        return {"first": options.get("first", 0), "starts": "1 child process"}

    def _write(self, line: str) -> None:
        with open(self._diary, "a") as file:
            file.write(f"{line}\n")

    async def start(self) -> None:
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        self._child = subprocess.Popen(sleep, preexec_fn=die_with_parent)
        self._write(f"source start {os.getpid()} {self._child.pid}")

    async def next(self) -> float:
        self._next += self.step
        return self._next

    async def fail(self) -> None:
        raise LookupError("nothing here")

    async def wait(self) -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self._write("source wait cancelled")
            raise

    async def facts(self) -> Mapping[str, Any]:
        return {"task_set_hash": {"train": "abc", "eval": "def"}, "colour": "red"}

    async def status(self) -> Mapping[str, Any]:
        return {"next": self._next}

    async def stop(self) -> None:
        self._write("source stop")
        if self._child is not None:
            self._child.kill()
            self._child.wait()


def sleeps_in_the_loop() -> None:
    """What a component must not do."""
    time.sleep(600)


async def ends_by_a_deadline(source: Any) -> None:
    """Waits for what does not come, as long as its own deadline allows."""
    beside = asyncio.create_task(source.wait())
    try:
        async with asyncio.timeout(1.0):
            await asyncio.Event().wait()
    except TimeoutError:
        raise TimeoutError(f"worker.patience_s: 1; the event did not come, {beside.get_name()} goes on") from None


class Worker:
    """Drives: asks `source` for `steps` numbers, or misbehaves in the way that `mode` says."""

    def __init__(self, source: Any, *, steps: int, diary: str, mode: str = "work") -> None:
        self._source, self._steps, self._diary, self._mode = source, steps, Path(diary), mode
        self._done = 0

    async def start(self) -> None:
        with open(self._diary, "a") as file:
            file.write(f"worker start {os.getpid()}\n")
        if self._mode == "start fails":
            raise OSError("no room")
        if self._mode == "start hangs":
            await asyncio.sleep(600)

    async def run(self) -> Mapping[str, Any]:
        if self._mode == "calls":
            return await self._calls()
        if self._mode == "raises":
            await self._source.fail()
        if self._mode == "dies":
            os._exit(7)
        if self._mode == "blocks":
            sleeps_in_the_loop()
        if self._mode == "late":
            await ends_by_a_deadline(self._source)
        if self._mode in ("waits", "sick", "asks at the end"):
            await asyncio.sleep(600)
        total = 0.0
        for step in range(1, self._steps + 1):
            total = await self._source.next()
            self._done = step
            print(f"step {step}")
        return {"total": total, "never": float("nan")}

    async def _calls(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        try:
            await self._source.fail()
        except LookupError as error:
            found["caught"] = str(error)
        try:
            async with asyncio.timeout(0.5):
                await self._source.wait()
        except TimeoutError:
            found["gave up"] = True
        return found

    async def status(self) -> Mapping[str, Any]:
        if self._mode == "sick":
            raise OSError("lost a limb")
        return {"step": self._done}

    async def stop(self) -> None:
        with open(self._diary, "a") as file:
            file.write("worker stop\n")
        if self._mode == "stop hangs":
            await asyncio.sleep(600)
        if self._mode == "asks at the end":
            await self._source.next()
        if self._mode == "leaves a child":
            subprocess.Popen(["sleep", "600"], start_new_session=True)


class Limp:
    """A fault: the source counts backwards."""

    def __init__(self, *, stage: str = "source", step: float = -1.0) -> None:
        self.stage, self._step = stage, step

    def install(self, component: Source) -> None:
        component.step = self._step


def find_colour(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A check: refuses red, and knows that other colours do nothing."""
    colour = config["model"].get("colour")
    found = {"path": "model.colour", "value": colour}
    if colour == "red":
        return [{**found, "level": "error", "message": "too bright", "remedy": "give blue"}]
    return [{**found, "level": "inert", "message": "colours do nothing", "remedy": "leave it out"}]
