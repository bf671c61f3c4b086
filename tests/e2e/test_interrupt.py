"""A run that is interrupted, at whatever moment and however rudely, leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from program import DEADLINE_S, alive, descendants, sessions, wait_for

from pipelines.lock import Holder, holder

ROOT = Path(__file__).parents[2]


@contextmanager
def running(tmp_path: Path, mode: str) -> Iterator[subprocess.Popen[bytes]]:
    """The small run as a program of its own, in a session of its own like under a terminal."""
    command = [sys.executable, str(ROOT / "tests/small_run.py"), str(tmp_path), mode]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "terminal", "wb") as terminal:
        program = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=env, start_new_session=True)
    try:
        yield program
    finally:
        if program.poll() is None:
            program.kill()
            program.wait()


def is_up(tmp_path: Path) -> bool:
    return "worker start" in (tmp_path / "diary").read_text() if (tmp_path / "diary").exists() else False


def opens(pid: int, file: Path) -> bool:
    """Does process `pid` have `file` open?"""
    try:
        return any(link.resolve() == file for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_stages_in_order_and_leaves_nothing(tmp_path: Path, number: signal.Signals):
    with running(tmp_path, "waits") as program:
        wait_for(lambda: is_up(tmp_path), "start")
        processes = descendants(program.pid)
        assert len(processes) > 5
        shares = [pid for pid in processes - {program.pid} if os.getpgid(pid) == program.pid]
        assert shares == [], "what shares the group of the driver would end before its ordered stop"
        os.killpg(program.pid, number)  # as a terminal does: to the whole foreground group
        assert program.wait(DEADLINE_S) == 130
    assert alive(processes) == set()
    assert sessions(program.pid) == []
    assert (tmp_path / "diary").read_text().splitlines()[-2:] == ["worker stop", "source stop"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["error"]) == ("interrupted", f"interrupted by {number.name}")
    assert result["warnings"] == []


def test_a_signal_while_ray_starts_leaves_nothing(tmp_path: Path):
    with running(tmp_path, "waits") as program:
        wait_for(lambda: sessions(program.pid), "the start of Ray")
        wait_for(lambda: len(descendants(program.pid)) > 2, "the first process of Ray")
        processes = descendants(program.pid)
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(DEADLINE_S) == 130
    assert alive(processes | descendants(program.pid)) == set()
    assert sessions(program.pid) == []
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "interrupted"


def test_a_run_that_is_killed_outright_takes_everything_with_it(tmp_path: Path):
    with running(tmp_path, "waits") as program:
        wait_for(lambda: is_up(tmp_path), "start")
        processes = descendants(program.pid)
        assert holder(tmp_path) == Holder(program.pid)
        assert {pid for pid in processes if opens(pid, tmp_path / "lock")} == {program.pid}, "none of Ray holds it"
        program.kill()
        program.wait()
        assert holder(tmp_path) is None, "one can go on from it at once"
        assert not (tmp_path / "stacks").exists(), "what was ready to be written into leaves nothing"
        wait_for(lambda: not alive(processes), "the end of all its processes")
        wait_for(lambda: not sessions(program.pid), "the removal of its session folder")
    assert len(processes) > 5


def test_a_stage_that_is_killed_ends_the_run_with_its_name(tmp_path: Path):
    with running(tmp_path, "waits") as program:
        wait_for(lambda: is_up(tmp_path), "start")
        processes = descendants(program.pid)
        source = next(line for line in (tmp_path / "diary").read_text().splitlines() if "source start" in line)
        os.kill(int(source.split()[2]), signal.SIGKILL)
        assert program.wait(DEADLINE_S) == 1
    assert alive(processes) == set()
    assert json.loads((tmp_path / "result.json").read_text())["error"].startswith("stage 'source' died: ")
    assert "(raylet)" not in (tmp_path / "terminal").read_text()


def test_a_stage_that_is_stopped_in_its_tracks_ends_the_run_with_its_name_and_what_the_kernel_says(tmp_path: Path):
    with running(tmp_path, "waits") as program:
        wait_for(lambda: is_up(tmp_path), "start")
        processes = descendants(program.pid)
        started = next(line for line in (tmp_path / "diary").read_text().splitlines() if "source start" in line)
        pid, child = map(int, started.split()[2:])
        begin = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        assert program.wait(DEADLINE_S) == 1
    assert time.monotonic() - begin < 45
    assert alive(processes) == set(), "a stopped process is ended too, and its children"
    result = json.loads((tmp_path / "result.json").read_text())
    start = "stage 'source' did not answer for 6 s; stacks in "
    assert result["error"].startswith(start)
    text = Path(result["error"].removeprefix(start).split(" and ")[0]).read_text()
    assert f"stage 'source', process {pid}, seen from outside" in text
    assert "state T (stopped)" in text
    assert f"  {child} of {pid}, S: " in text
    assert "in Worker.run" in (tmp_path / "stacks/worker-1.txt").read_text()
