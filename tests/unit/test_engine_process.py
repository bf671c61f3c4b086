"""Child processes: they die with their parent, and say how they ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_rl.engine.base import EngineError
from miles_rl.engine.process import ChildProcess, describe_exit, group_lives, is_frozen

SLEEPER = "import time, sys\nprint('ready', flush=True)\ntime.sleep(600)\n"


def module(folder: Path, source: str) -> dict[str, str]:
    (folder / "childmodule.py").write_text(source)
    return {"PYTHONPATH": f"{Path.cwd()}:{folder}"}


async def never() -> bool:
    return False


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still lives"
        time.sleep(0.02)


async def test_a_child_is_killed_when_its_parent_is(tmp_path: Path) -> None:
    env = module(tmp_path, SLEEPER)
    parent_source = (
        "import time\nfrom miles_rl.engine.process import ChildProcess\n"
        f"child = ChildProcess('childmodule', [], log_path={str(tmp_path / 'log')!r})\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_source], env={**os.environ, **env}, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    deadline = time.monotonic() + 20
    while "ready" not in (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert is_alive(child_pid)
    parent.kill()
    parent.wait()
    wait_until_dead(child_pid)


async def test_an_early_end_is_reported_with_the_log(tmp_path: Path) -> None:
    env = module(tmp_path, "import sys\nprint('the port is taken')\nsys.exit(3)\n")
    child = ChildProcess("childmodule", [], log_path=tmp_path / "child.log", env=env)
    with pytest.raises(EngineError) as caught:
        await child.wait_ready(never, 20.0, "replica 0")
    message = str(caught.value)
    assert f"replica 0 (pid {child.pid}) exited with code 3" in message
    assert f"log {tmp_path / 'child.log'}: the port is taken" in message


async def test_not_being_ready_in_time_is_reported(tmp_path: Path) -> None:
    child = ChildProcess("childmodule", [], log_path=tmp_path / "log", env=module(tmp_path, SLEEPER))
    with pytest.raises(
        EngineError, match=rf"router\.start_timeout_s: 0\.3; the router \(pid {child.pid}\) is not ready"
    ):
        await child.wait_ready(never, 0.3, "the router", "router.start_timeout_s")
    await child.stop()
    assert child.exit_code() == -signal.SIGTERM


GRANDCHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"


async def with_grandchild(folder: Path, on_sigterm: str = "signal.SIG_DFL") -> tuple[ChildProcess, int]:
    """A child that has started another process, which ignores SIGTERM."""
    source = (
        f"import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, {on_sigterm})\n"
        f"grandchild = subprocess.Popen([sys.executable, '-c', {GRANDCHILD!r}])\n"
        "print(f'grandchild {grandchild.pid} ', flush=True)\ntime.sleep(600)\n"
    )
    child = ChildProcess("childmodule", [], log_path=folder / "log", env=module(folder, source))
    deadline = time.monotonic() + 20
    while not {"grandchild", "1"} <= set((folder / "log").read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return child, int((folder / "log").read_text().split("grandchild ")[1].split()[0])


async def test_stopping_ends_a_child_that_ignores_the_request_and_what_it_started(tmp_path: Path) -> None:
    child, grandchild = await with_grandchild(tmp_path, "signal.SIG_IGN")
    await child.stop(grace_s=0.2)
    assert child.exit_code() == -signal.SIGKILL
    assert not is_alive(grandchild)
    await child.stop()


async def test_stopping_a_child_that_obeys_ends_what_it_started_too(tmp_path: Path) -> None:
    child, grandchild = await with_grandchild(tmp_path)
    await child.stop()
    assert child.exit_code() == -signal.SIGTERM
    assert not is_alive(grandchild)
    assert not group_lives(child.pid)


async def test_what_a_killed_child_has_started_is_killed_when_its_end_is_seen(tmp_path: Path) -> None:
    child, grandchild = await with_grandchild(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while child.exit_code() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    wait_until_dead(grandchild)


async def test_a_frozen_child_is_killed_without_a_wait(tmp_path: Path) -> None:
    child, grandchild = await with_grandchild(tmp_path, "lambda number, frame: None")
    assert not is_frozen(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while not is_frozen(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    await asyncio.wait_for(child.stop(grace_s=600), 20)
    assert child.exit_code() == -signal.SIGKILL
    assert not is_alive(grandchild)


async def test_a_stop_that_is_cancelled_kills_at_once(tmp_path: Path) -> None:
    child, grandchild = await with_grandchild(tmp_path, "signal.SIG_IGN")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.stop(grace_s=600), 0.1)
    wait_until_dead(child.pid)
    wait_until_dead(grandchild)
    assert child.exit_code() == -signal.SIGKILL


def test_exit_codes_read_as_a_person_would_say_them() -> None:
    assert describe_exit(-9) == "died with signal 9"
    assert describe_exit(1) == "exited with code 1"
