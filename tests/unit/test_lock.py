"""One run in a folder, and one that goes on from it, at a time."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from program import wait_for

from pipelines import run as front_door
from pipelines.errors import ConfigError
from pipelines.lock import Busy, Holder, hold, holder
from pipelines.resume import alone, refuse_running

ROOT = Path(__file__).parents[2]
HOLDS = """
import sys, time
from pathlib import Path
from pipelines.resume import alone
with alone(Path(sys.argv[1]), sys.argv[2] or None):
    Path(sys.argv[1], "held").touch()
    time.sleep(120)
"""


@contextmanager
def another(run_dir: Path, resume: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Another process that works in `run_dir`."""
    command = [sys.executable, "-c", HOLDS, str(run_dir), resume]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_for((run_dir / "held").exists, "its lock")
        yield process
    finally:
        process.kill()
        process.wait()


def refusal(resume: Path | str) -> str:
    with pytest.raises(ConfigError) as refused:
        refuse_running(str(resume))
    return str(refused.value)


def test_a_run_that_is_going_on_is_refused_by_its_process_until_the_kernel_ends_that(tmp_path: Path) -> None:
    going = tmp_path / "run"
    with another(going) as process:
        told = f"; this run is still going on (pid {process.pid}); wait for its end or stop it"
        assert refusal(going) == f"resume: {going}{told}"
        assert refusal(going / "checkpoints/step-000004").endswith(told)
        with pytest.raises(ConfigError, match="this run is still going on"), alone(tmp_path / "new", str(going)):
            pass
        assert not (tmp_path / "new").exists()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        refuse_running(str(going))
        with alone(tmp_path / "new", str(going)):
            assert holder(going) == Holder(os.getpid(), str(tmp_path / "new"))


def test_a_run_is_gone_on_from_by_one_at_a_time_and_by_any_number_from_a_copy(tmp_path: Path) -> None:
    with alone(tmp_path / "old", None):
        pass
    with another(tmp_path / "first", str(tmp_path / "old")) as process:
        first = f"this run is still going on (pid {process.pid}) in {tmp_path / 'first'}; wait for its end or stop it"
        assert refusal(tmp_path / "old") == f"resume: {tmp_path / 'old'}; {first}"
    refuse_running(str(tmp_path / "old"))
    (tmp_path / "copy").mkdir()
    with another(tmp_path / "second", str(tmp_path / "copy")):
        refuse_running(str(tmp_path / "copy"))
    assert list((tmp_path / "copy").iterdir()) == []


def test_two_runs_that_are_given_one_folder_do_not_share_it(tmp_path: Path) -> None:
    taken = "holds another run; give a new folder"
    with another(tmp_path / "run"), pytest.raises(ConfigError, match=taken), alone(tmp_path / "run", None):
        pass


def test_asking_takes_nothing_and_a_holder_is_known_while_it_holds(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    with hold(tmp_path):
        assert holder(tmp_path) == Holder(os.getpid())
        with pytest.raises(Busy), hold(tmp_path):
            pass
    assert holder(tmp_path) is None
    with hold(tmp_path, "there"):
        assert holder(tmp_path) == Holder(os.getpid(), "there")


def test_a_folder_that_cannot_be_written_to_is_held_all_the_same(tmp_path: Path) -> None:
    with hold(tmp_path):
        pass
    (tmp_path / "lock").chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        with hold(tmp_path, make=False), pytest.raises(Busy), hold(tmp_path, make=False):
            pass
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("plan_only", ["true", "false"])
def test_the_front_door_refuses_to_resume_what_goes_on(
    plan_only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with another(tmp_path / "run") as process:
        (tmp_path / "run/overrides.json").write_text('["+experiment=smoke"]')
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["miles-run", "resume=run", f"plan_only={plan_only}"])
        with pytest.raises(SystemExit) as ended:
            front_door.main()
        assert ended.value.code == 2
        going_on = f"this run is still going on (pid {process.pid}); wait for its end or stop it"
        assert capsys.readouterr().err == f"resume: run; {going_on}\n"
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
