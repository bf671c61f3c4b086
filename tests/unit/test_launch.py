"""The launcher on a real Ray, with the small stages. Each run takes some seconds."""

import os
import time
from pathlib import Path

from notes import Notes
from small_run import small_plan

from pipelines.launch import Failure, launch
from pipelines.processes import Offspring
from pipelines.stage import StageError
from pipelines.supervise import Ending


def launched(tmp_path: Path, mode: str) -> tuple[Ending, Notes]:
    """Run the small plan, and check what holds after every run: no process and no session folder is left."""
    before, offspring, notes = sessions(), Offspring(), Notes()
    ending = launch(small_plan(tmp_path, mode), tmp_path, notes)
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


def test_a_stage_that_does_not_answer_fails_the_run_and_is_ended_by_force(tmp_path: Path):
    ending, _ = launched(tmp_path, "blocks")
    assert ending.error == "stage 'worker' did not answer for 3 s"
    assert "stage 'worker' did not stop within 5 s" in ending.warnings


def test_an_exception_that_cannot_be_pickled_arrives_as_a_stage_error():
    class Local(Exception):
        pass

    opened = Failure.of(Local("no way to name this class")).open("eval")
    assert isinstance(opened, StageError)
    assert str(opened) == "stage 'eval': Local: no way to name this class"
