"""What a process that is stuck says of itself, and what can be seen of one that says nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipelines.stacks import MAX_FILES, Watch, claim_silent, of_mute, write

STUCK_IN_NATIVE_CODE = """
import asyncio, ctypes, sys
from pathlib import Path
from pipelines.stacks import Watch

def holds_the_lock():
    ctypes.PyDLL(None).sleep(int(sys.argv[2]))

async def main():
    Watch("engine", Path(sys.argv[1]), 0.4)
    holds_the_lock()
    await asyncio.sleep(0.5)

asyncio.run(main())
"""


async def test_a_loop_that_stands_still_is_written_down_once_with_threads_and_tasks(tmp_path: Path):
    async def waits_for_news() -> None:
        await asyncio.Event().wait()

    def sleeps_in_the_loop() -> None:
        time.sleep(1.2)

    waiting = [asyncio.create_task(waits_for_news()) for _ in range(3)]
    await asyncio.sleep(0)
    watch = Watch("rollout", tmp_path / "stacks", 0.4)
    sleeps_in_the_loop()
    await asyncio.sleep(0.2)
    watch.close()
    for task in waiting:
        task.cancel()
    (file,) = (tmp_path / "stacks").iterdir()
    assert file.name == "rollout-1.txt"
    text = file.read_text()
    assert text.startswith(f"stage 'rollout', process {os.getpid()}, ")
    assert "in sleeps_in_the_loop" in text
    assert "and 2 more" in text, "tasks that stand at the same place are told once"
    assert text.count("waits_for_news") == 1
    assert "waits for <Future pending" in text


def started_stuck(folder: Path, seconds: float) -> "subprocess.Popen[bytes]":
    """A process whose native code keeps Python's lock for a while."""
    command = [sys.executable, "-c", STUCK_IN_NATIVE_CODE, str(folder), str(seconds)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})


def test_native_code_that_keeps_the_lock_of_python_does_not_hide_where_it_is(tmp_path: Path):
    process = started_stuck(tmp_path, 2)
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert "engine-1.txt" in found
    assert any("in holds_the_lock" in text for text in found.values()), "written once the loop turns again"


def test_where_native_code_keeps_the_lock_is_read_from_outside_and_a_kill_leaves_no_file(tmp_path: Path):
    process = started_stuck(tmp_path, 60)
    try:
        deadline = time.monotonic() + 30
        while (file := claim_silent(tmp_path, "engine", process.pid)) is None:
            assert list(tmp_path.iterdir()) == []
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert claim_silent(tmp_path, "engine", process.pid) is None, "told once"
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == [file]
    assert "in holds_the_lock" in file.read_text()
    assert claim_silent(tmp_path, "engine", process.pid) is None


async def test_a_deadline_is_told_with_what_was_awaited_even_if_the_error_hides_it(tmp_path: Path):
    async def waits_for_news() -> None:
        await asyncio.Event().wait()

    watch = Watch("trainer", tmp_path, 5.0)
    try:
        try:
            async with asyncio.timeout(0.01):
                await waits_for_news()
        except TimeoutError:
            raise TimeoutError("no news") from None
    except TimeoutError as error:
        path = watch.dump("'run': no news", error)
    assert path is not None
    assert "in waits_for_news" in path.read_text()
    assert watch.dump("told again by another") == path, "one stop of the world is one file"
    watch.close()


def test_a_stopped_process_is_described_with_its_threads_and_children(tmp_path: Path):
    script = "import subprocess, sys; subprocess.run(['sleep', '300'])"
    process = subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            time.sleep(0.01)
        child = int(children.read_text())
        os.kill(process.pid, signal.SIGSTOP)
        while "T" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0.01)
        (file,) = of_mute(tmp_path, "fleet", process.pid, "did not answer")
        text = file.read_text()
        assert file.name == "fleet-1.txt"
        assert "state T (stopped)" in text
        while f"  {child} of {process.pid}, S: sleep 300" not in text:  # it may still be on its way to sleep
            text = of_mute(tmp_path, "fleet", process.pid, "did not answer")[-1].read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert "no such process" in of_mute(tmp_path, "fleet", process.pid, "did not answer")[-1].read_text()


def test_a_stage_writes_a_bounded_number_of_files(tmp_path: Path):
    written = [write(tmp_path, "rollout", "text") for _ in range(MAX_FILES + 1)]
    assert written[-1] is None
    assert len(list(tmp_path.iterdir())) == MAX_FILES
