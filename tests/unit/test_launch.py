"""The launcher on a real Ray, with the small stages. Each run takes some seconds."""

import fcntl
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from notes import Notes
from small_run import ALLOWED, small_config

from pipelines.host import Failure
from pipelines.launch import launch, remove_dead_sessions
from pipelines.plan import make_plan
from pipelines.processes import Offspring
from pipelines.stage import StageError
from pipelines.supervise import Ending


def launched(tmp_path: Path, mode: str, **changes: Any) -> tuple[Ending, Notes]:
    """Run the small plan, and check what holds after every run: no process and no session folder is left."""
    before, offspring, notes = sessions(), Offspring(), Notes()
    plan = make_plan({**small_config(tmp_path, mode), **changes}, allowed=ALLOWED)
    ending = launch(plan, tmp_path, notes)
    assert offspring.alive() == {}
    assert sessions() == before
    return ending, notes


def sessions() -> set[Path]:
    """Session folders that this process made."""
    return set(Path("/tmp").glob(f"miles-ray-{os.getpid()}-*"))


def test_a_plan_runs_on_ray_and_leaves_nothing_behind(tmp_path: Path):
    ending, notes = launched(tmp_path, "work")
    assert (ending.status, ending.error, ending.warnings) == ("success", None, [])
    assert ending.metrics["total"] == 3.0
    assert ("source", "up") in notes.states
    pids = {line.split()[2] for line in (tmp_path / "diary").read_text().splitlines() if "start" in line}
    assert len(pids) == 2, "each stage has a process of its own"
    log = (tmp_path / "log.txt").read_text()
    assert "step 3" in log, "what a stage prints is in the run's log"


def test_an_exception_of_a_stage_reaches_the_caller_as_its_own_class_and_giving_up_cancels_the_call(tmp_path: Path):
    ending, _ = launched(tmp_path, "calls")
    assert ending.status == "success", ending.error
    assert ending.metrics == {"caught": "nothing here", "gave up": True}
    assert "source wait cancelled" in (tmp_path / "diary").read_text()


def test_a_stage_that_dies_fails_the_run_with_its_name_and_its_needs_are_stopped(tmp_path: Path):
    begin = time.monotonic()
    ending, notes = launched(tmp_path, "dies")
    assert ending.status == "failed"
    assert ending.error is not None
    assert ending.error.startswith("stage 'worker' died: ")
    assert time.monotonic() - begin < 60
    assert ("worker", "failed") in notes.states
    assert (tmp_path / "diary").read_text().splitlines()[-1] == "source stop"


def stacks_named(ending: Ending) -> str:
    """What is in the files that the ending's error names; it names some."""
    names = re.findall(r"(/\S+\.txt)", ending.error or "")
    assert names, ending.error
    return "\n".join(Path(name).read_text() for name in names)


def test_a_stage_that_blocks_its_loop_fails_the_run_by_name_with_the_place_and_is_ended_by_force(tmp_path: Path):
    ending, _ = launched(tmp_path, "blocks")
    assert (ending.error or "").startswith("stage 'worker' did not answer for 6 s; stacks in ")
    text = stacks_named(ending)
    assert "in sleeps_in_the_loop" in text
    assert "the event loop has not turned for" in text
    assert "seen from outside" in text
    assert (tmp_path / "stacks/source-1.txt").exists(), "who waited for whom: all stages say where they stand"
    assert ending.warnings == ["stage 'worker' answered nothing and was killed"]


def test_a_deadline_inside_a_stage_leaves_the_place_and_the_tasks(tmp_path: Path):
    ending, _ = launched(tmp_path, "late")
    start = "stage 'worker': TimeoutError: worker.patience_s: 1; the event did not come, "
    assert (ending.error or "").startswith(start)
    text = stacks_named(ending)
    assert "in ends_by_a_deadline" in text
    assert "await asyncio.Event().wait()" in text
    other = (tmp_path / "stacks/source-1.txt").read_text()
    assert "in Source.wait" in other, other
    assert ending.warnings == []


def test_a_start_that_never_ends_says_what_it_awaits(tmp_path: Path):
    config = small_config(tmp_path, "start hangs")
    config["stages"]["worker"]["start_timeout_s"] = 6.0
    ending, _ = launched(tmp_path, "start hangs", stages=config["stages"])
    assert (ending.error or "").startswith("stage 'worker' did not start within 6 s; raise stages.worker")
    assert "in Worker.start" in stacks_named(ending)


def test_a_fault_acts_in_the_stage_that_it_names_and_a_healthy_run_leaves_no_stacks(tmp_path: Path):
    fault = {"_target_": "tests.small_stages.Limp", "step": -2.0}
    ending, notes = launched(tmp_path, "work", faults=fault)
    assert (ending.status, ending.metrics["total"]) == ("success", -6.0)
    assert "a fault acts on purpose in stage 'source': Limp (step -2.0)" in notes.lines
    assert "source pipelines.host: a fault acts here on purpose" in (tmp_path / "log.txt").read_text()
    assert not (tmp_path / "stacks").exists()


def test_an_exception_that_cannot_be_pickled_arrives_as_a_stage_error():
    class Local(Exception):
        pass

    opened = Failure.of(Local("no way to name this class")).open("eval")
    assert isinstance(opened, StageError)
    assert str(opened) == "stage 'eval': Local: no way to name this class"


def test_folders_of_sessions_whose_processes_are_all_dead_are_removed_and_no_others(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {
        name: tmp_path / f"miles-ray-{pid}-{name}"
        for name, pid in (
            ("killed", dead.pid),
            ("half-removed", dead.pid),
            ("running", os.getpid()),
            ("starting", os.getpid()),
        )
    }
    for folder in (*names.values(), tmp_path / "miles-ray-of-nobody"):
        folder.mkdir()
        (folder / "session").mkdir()
    (names["killed"] / "lock").touch()
    with (names["running"] / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_dead_sessions(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([names["running"].name, names["starting"].name, "miles-ray-of-nobody"])
