"""A run that is interrupted, at whatever moment and however rudely, leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0


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


def wait_for(what: Callable[[], object], reason: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, f"{reason} did not happen in {DEADLINE_S} s"
        time.sleep(0.05)


def descendants(root: int) -> set[int]:
    """Processes below `root`, and `root`."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that still run; one that is dead and only not yet collected by its parent does not."""
    found: set[int] = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
        except OSError:
            continue
    return found


def sessions(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"miles-ray-{pid}-*"))


def is_up(tmp_path: Path) -> bool:
    return "worker start" in (tmp_path / "diary").read_text() if (tmp_path / "diary").exists() else False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_stages_in_order_and_leaves_nothing(tmp_path: Path, number: signal.Signals):
    with running(tmp_path, "waits") as program:
        wait_for(lambda: is_up(tmp_path), "start")
        processes = descendants(program.pid)
        assert len(processes) > 5
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
        program.kill()
        program.wait()
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
