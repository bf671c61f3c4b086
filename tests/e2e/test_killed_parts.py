"""The real graph, with parts of it killed while it works: it goes on, or ends with the part's name; nothing is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from program import DEADLINE_S, alive, descendants, sessions, wait_for

ROOT = Path(__file__).parents[2]


@contextmanager
def training(run_dir: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The smoke experiment, made long, once it has done its first step."""
    overrides = ["+experiment=smoke", "steps=100000", f"run_dir={run_dir}"]
    overrides += ["stages.trainer.run.eval_every=0", "stages.trainer.run.checkpoint_every=0", *more]
    command = [sys.executable, "-m", "pipelines.run", *overrides]
    run_dir.mkdir()
    with open(run_dir / "terminal", "wb") as terminal:
        program = subprocess.Popen(
            command,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
    try:
        wait_for(lambda: steps(run_dir) >= 1 or program.poll() is not None, "the first step")
        assert program.poll() is None, (run_dir / "terminal").read_text()
        yield program
    finally:
        if program.poll() is None:
            program.kill()
            program.wait()


def steps(run_dir: Path) -> int:
    """Steps done, by the metrics that the run wrote."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"train/loss"') if path.exists() else 0


def named(processes: set[int], mark: str) -> list[int]:
    """Those of `processes` whose command line has `mark` in it."""
    found: list[int] = []
    for pid in sorted(processes):
        try:
            if mark in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                found.append(pid)
        except OSError:
            continue
    return found


def result_of(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "result.json").read_text())


def test_killed_sandboxes_are_made_anew_and_ctrl_c_leaves_no_process_sandbox_or_session(tmp_path: Path):
    run_dir = tmp_path / "run"
    with training(run_dir) as program:
        os.kill(named(descendants(program.pid), "/zygote/")[0], signal.SIGKILL)
        before = steps(run_dir)
        wait_for(lambda: steps(run_dir) >= before + 3, "three more steps")
        processes = descendants(program.pid)
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(DEADLINE_S) == 130, (run_dir / "terminal").read_text()
    assert alive(processes) == set()
    assert sessions(program.pid) == []
    result = result_of(run_dir)
    assert (result["status"], result["warnings"]) == ("interrupted", [])


def test_a_killed_trainer_fails_the_run_by_its_name_and_leaves_nothing(tmp_path: Path):
    run_dir = tmp_path / "run"
    with training(run_dir) as program:
        processes = descendants(program.pid)
        victim = int(re.findall(r" trainer .*built in process (\d+)", (run_dir / "log.txt").read_text())[-1])
        os.kill(victim, signal.SIGKILL)
        assert program.wait(DEADLINE_S) == 1
    assert alive(processes) == set()
    assert sessions(program.pid) == []
    result = result_of(run_dir)
    assert result["status"] == "failed"
    assert str(result["error"]).startswith("stage 'trainer' died: ")


def test_a_stopped_stage_ends_the_run_without_others_waiting_for_it(tmp_path: Path):
    run_dir = tmp_path / "run"
    with training(run_dir, "cluster.heartbeat_timeout_s=5", "cluster.stall_s=2") as program:
        processes = descendants(program.pid)
        victim = int(re.findall(r" sandboxes .*built in process (\d+)", (run_dir / "log.txt").read_text())[-1])
        os.kill(victim, signal.SIGSTOP)
        begin = time.monotonic()
        assert program.wait(DEADLINE_S) == 1
        assert time.monotonic() - begin < 20, "what it is asked does not use up the deadline of those that ask"
    assert alive(processes) == set()
    result = result_of(run_dir)
    assert str(result["error"]).startswith("stage 'sandboxes' did not answer for 5 s; stacks in ")
    assert result["warnings"] == ["stage 'sandboxes' answered nothing and was killed"]
