"""The life of a graph, with the real small stages hosted in this process."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from notes import Notes
from small_run import small_plan

from pipelines.plan import Plan, PlannedStage
from pipelines.stage import StageError
from pipelines.supervise import Ending, Interrupts, Supervisor, last_step

DEADLINE_S = 30


class InProcess:
    """Hosts a component in this event loop."""

    def __init__(self, stage: PlannedStage) -> None:
        self._stage = stage

    async def build(self, needs: Mapping[str, Any], timeout_s: float) -> None:
        components = {name: host.component for name, host in needs.items()}
        self.component = instantiate({**self._stage.run, "_partial_": True}, _convert_="all")(**components)

    pid = os.getpid()

    async def dump_stacks(self, reason: str, timeout_s: float) -> Path | None:
        return None

    async def call(self, method: str, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(self.component, method, _nothing)()
        except (OSError, LookupError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise StageError(f"stage '{self._stage.name}': {type(error).__name__}: {error}") from error


async def _nothing() -> dict[str, Any]:
    return {}


async def supervised(tmp_path: Path, mode: str, **times: float) -> tuple[Ending, Notes, list[str]]:
    """Ending, what the observer saw, and the diary of the stages without process ids."""
    plan, notes, interrupts = small_plan(tmp_path, mode), Notes(), Interrupts()
    plan = _with_times(plan, times)

    running = asyncio.create_task(supervisor(plan, notes, tmp_path).supervise(interrupts))
    if mode == "waits":
        while ("worker", "up") not in notes.states:
            await asyncio.sleep(0.01)
        interrupts.deliver("SIGINT")
    ending = await asyncio.wait_for(running, DEADLINE_S)
    return ending, notes, [" ".join(line.split()[:2]) for line in (tmp_path / "diary").read_text().splitlines()]


def supervisor(plan: Plan, notes: Notes, run_dir: Path) -> Supervisor:
    return Supervisor(plan, InProcess, notes, run_dir, heartbeat_s=0.05, heartbeat_timeout_s=1.0)


def _with_times(plan: Plan, times: Mapping[str, Any]) -> Plan:
    return replace(plan, stages=tuple(replace(stage, **times) for stage in plan.stages))


async def test_stages_start_in_order_and_stop_in_reverse(tmp_path: Path):
    ending, notes, diary = await supervised(tmp_path, "work")
    assert (ending.status, ending.error, ending.warnings) == ("success", None, [])
    assert diary == ["source start", "worker start", "worker stop", "source stop"]
    assert [row for row in notes.states if row[1] in ("up", "down")] == [
        ("source", "up"),
        ("worker", "up"),
        ("worker", "down"),
        ("source", "down"),
    ]


async def test_the_ending_holds_metrics_facts_and_the_last_step(tmp_path: Path):
    ending, _, _ = await supervised(tmp_path, "work")
    assert ending.metrics["total"] == 3.0
    assert ending.facts["task_set_hash"] == {"train": "abc", "eval": "def"}
    assert last_step(ending, "worker") == 3


async def test_an_error_of_the_driver_fails_the_run_and_all_is_stopped(tmp_path: Path):
    ending, notes, diary = await supervised(tmp_path, "raises")
    assert (ending.status, ending.error) == ("failed", "stage 'worker': LookupError: nothing here")
    assert diary[-2:] == ["worker stop", "source stop"]
    assert ("worker", "failed") in notes.states


async def test_a_status_that_raises_fails_the_run_while_the_driver_waits(tmp_path: Path):
    ending, _, diary = await supervised(tmp_path, "sick")
    assert (ending.status, ending.error) == ("failed", "stage 'worker': OSError: lost a limb")
    assert diary[-2:] == ["worker stop", "source stop"]


async def test_a_start_that_fails_stops_what_was_started(tmp_path: Path):
    ending, _, diary = await supervised(tmp_path, "start fails")
    assert (ending.status, ending.error) == ("failed", "stage 'worker': OSError: no room")
    assert diary[-2:] == ["worker stop", "source stop"]


async def test_a_start_that_hangs_ends_at_its_deadline_with_the_key_to_change(tmp_path: Path):
    ending, _, diary = await supervised(tmp_path, "start hangs", start_timeout_s=2.0)
    assert ending.error is not None
    assert ending.error.startswith("stage 'worker' did not start within 2 s; raise stages.worker.start_timeout_s")
    assert diary[-2:] == ["worker stop", "source stop"]


async def test_a_signal_stops_in_order_and_is_no_failure(tmp_path: Path):
    ending, _, diary = await supervised(tmp_path, "waits")
    assert (ending.status, ending.error) == ("interrupted", "interrupted by SIGINT")
    assert diary[-2:] == ["worker stop", "source stop"]


async def test_a_stop_that_hangs_is_told_and_the_others_are_stopped(tmp_path: Path):
    ending, notes, diary = await supervised(tmp_path, "stop hangs", stop_timeout_s=0.3)
    assert ending.status == "success"
    assert ending.warnings == ["stage 'worker' did not stop within 0.3 s"]
    assert ending.warnings[0] in notes.lines
    assert diary[-1] == "source stop"


class StoppedInItsTracks(InProcess):
    """Its process answers nothing once it runs, and whoever asked it anything waits until that is gone."""

    def __init__(self, stage: PlannedStage, process: "subprocess.Popen[bytes]") -> None:
        super().__init__(stage)
        self._process, self.pid = process, process.pid

    async def build(self, needs: Mapping[str, Any], timeout_s: float) -> None:
        await super().build(needs, timeout_s)
        self.component.next = self._until_gone

    async def dump_stacks(self, reason: str, timeout_s: float) -> Path | None:
        raise TimeoutError

    async def call(self, method: str, timeout_s: float | None) -> Any:
        if method in ("start", "facts"):
            return await super().call(method, timeout_s)
        async with asyncio.timeout(timeout_s):
            await self._until_gone()

    async def _until_gone(self) -> None:
        while self._process.poll() is None:
            await asyncio.sleep(0.01)
        raise StageError("stage 'source' died: its process was killed")


async def test_a_stage_that_answers_nothing_is_ended_before_those_that_wait_for_it_are_stopped(tmp_path: Path):
    process = subprocess.Popen(["sleep", "600"])

    def place(stage: PlannedStage) -> InProcess:
        return StoppedInItsTracks(stage, process) if stage.name == "source" else InProcess(stage)

    plan, notes = _with_times(small_plan(tmp_path, "asks at the end"), {"stop_timeout_s": 20.0}), Notes()
    supervisor = Supervisor(plan, place, notes, tmp_path, heartbeat_s=0.05, heartbeat_timeout_s=0.5)
    begin = time.monotonic()
    try:
        ending = await asyncio.wait_for(supervisor.supervise(Interrupts()), DEADLINE_S)
        assert process.poll() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        child = int((tmp_path / "diary").read_text().split()[3])
        os.kill(child, signal.SIGKILL)  # in this test it is not below the process of its stage
    assert (ending.error or "").startswith("stage 'source' did not answer for 0.5 s")
    assert "stage 'source' answered nothing and was killed" in notes.lines
    assert notes.states.index(("source", "down")) < notes.states.index(("worker", "stopping"))
    assert time.monotonic() - begin < 15, "the worker did not wait in vain for all of its time to stop"


async def test_a_second_signal_ends_at_once(tmp_path: Path):
    plan, notes, interrupts = small_plan(tmp_path, "stop hangs"), Notes(), Interrupts()
    plan = _with_times(plan, {"stop_timeout_s": 600.0})

    running = asyncio.create_task(supervisor(plan, notes, tmp_path).supervise(interrupts))
    async with asyncio.timeout(DEADLINE_S):
        while ("worker", "stopping") not in notes.states:
            await asyncio.sleep(0.01)
        interrupts.deliver("SIGINT")
        await asyncio.sleep(0.1)
        assert not running.done()
        interrupts.deliver("SIGINT")
        ending = await running
    assert any("second signal" in line for line in ending.warnings)
    child = int((tmp_path / "diary").read_text().splitlines()[0].split()[-1])
    os.kill(child, signal.SIGKILL)  # the stage that owns it was not stopped
