"""Where a stuck process stands: the stacks of its threads and of its tasks, in `RUN/stacks/<stage>-<n>.txt`.

Each process of a run watches its own event loop. When the loop stands still, a thread writes the stacks; when even
threads cannot run, because native code holds Python's lock, a timer of C does (`faulthandler`). A process that can
do neither, stopped or stuck in the kernel, is described from outside by what the kernel tells of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import linecache
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pipelines.processes import below

log = logging.getLogger(__name__)

FOLDER = "stacks"
MAX_FILES = 20
"""Of one stage in one run: a run that is stuck again and again must not fill the disk."""
_SILENT_NAME = "stacks"
_SILENT_LINK = f"/memfd:{_SILENT_NAME} "
_REPEAT_S = 10.0
_MAX_DEPTH = 50
_MAX_WAITED_CHARS = 300
_MAX_COMMAND_CHARS = 200


class Watch:
    """Watches the running event loop of this process. Made in that loop; `close` ends it.

    A loop that does not turn for `stall_s` seconds is written down once each time that happens.
    """

    def __init__(self, stage: str, folder: Path, stall_s: float) -> None:
        self._stage, self._folder, self._stall_s = stage, folder, stall_s
        self._tick_s = min(1.0, stall_s / 4)
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._latest: tuple[float, Path] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._silent = _silent_file()
        self._turn()
        threading.Thread(target=self._look, name="watch of the event loop", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        self._claim()
        self._silent.close()

    def dump(self, reason: str, error: BaseException | None = None) -> Path | None:
        """Write where everything stands; `error` with the places that it came through. None if there are too many.

        A second one within some seconds is the first: what fails in one place is soon told by others too.
        """
        with self._lock:
            if self._latest is not None and time.monotonic() - self._latest[0] < _REPEAT_S:
                return self._latest[1]
            text = "\n".join(self._describe(reason, error))
            path = write(self._folder, self._stage, text)
            if path is not None:
                self._latest = (time.monotonic(), path)
            return path

    def _turn(self) -> None:
        """Called by the loop itself, as long as it turns."""
        self._turned = time.monotonic()
        self._claim()
        faulthandler.dump_traceback_later(self._stall_s + 2 * self._tick_s, file=self._silent)
        self._timer = self._loop.call_later(self._tick_s, self._turn)

    def _claim(self) -> None:
        """Give what the timer of C wrote, if it did, a file in the run's folder."""
        if size := os.fstat(self._silent.fileno()).st_size:
            text = os.pread(self._silent.fileno(), size, 0)
            os.ftruncate(self._silent.fileno(), 0)
            _write_silent(self._folder, self._stage, text)

    def _look(self) -> None:
        """The thread beside the loop. It writes before the timer of C does, unless it cannot run either."""
        told = 0.0
        while not self._closed.wait(self._tick_s):
            turned = self._turned
            still_s = time.monotonic() - turned
            if still_s < self._stall_s or turned == told:
                continue
            told = turned
            faulthandler.cancel_dump_traceback_later()
            path = self.dump(f"the event loop has not turned for {still_s:.1f} s")
            log.warning("the event loop has not turned for %.1f s; stacks in %s", still_s, path)

    def _describe(self, reason: str, error: BaseException | None) -> Iterator[str]:
        yield f"stage '{self._stage}', process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}"
        if error is not None:
            yield from _origins(error)
        yield from ("", "threads, the one of the event loop first; the place that runs is the last line")
        yield from _threads(self._loop_thread)
        yield from _tasks(self._loop)
        yield ""


def write(folder: Path, stage: str, text: str) -> Path | None:
    """A new file with `text`, under the next free number of `stage`. None if `MAX_FILES` are there, or no room is."""
    for number in range(1, MAX_FILES + 1):
        path = folder / f"{stage}-{number}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError as error:
            log.error("stacks cannot be written: %s", error)
            return None
        return path
    return None


def _write_silent(folder: Path, stage: str, text: bytes) -> Path | None:
    head = f"stage '{stage}': native code held Python's lock, and no thread could run\n\n"
    return write(folder, stage, head + text.decode(errors="replace"))


def claim_silent(folder: Path, stage: str, pid: int) -> Path | None:
    """The same for another process, which cannot do it itself. None if its timer of C wrote nothing."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed in this moment
                if os.readlink(link).startswith(_SILENT_LINK) and (text := link.read_bytes()):
                    os.truncate(link, 0)
                    return _write_silent(folder, stage, text)
    return None


def of_mute(folder: Path, stage: str, pid: int, reason: str) -> list[Path]:
    """Files about a process that does not answer: the newest that it wrote itself, and what the kernel tells of it."""
    claimed = claim_silent(folder, stage, pid)
    known = [path for n in range(1, MAX_FILES + 1) if (path := folder / f"{stage}-{n}.txt").exists()]
    told = "\n".join([f"stage '{stage}', process {pid}, seen from outside: {reason}", "", *_seen_from_outside(pid)])
    return [path for path in (claimed or (known[-1] if known else None), write(folder, stage, told + "\n")) if path]


def _silent_file() -> IO[bytes]:
    """What the timer of C writes into. It is open all the time, for with Python's lock held nobody can open one; it has
    no name, so that nothing is left of it when the process is killed.
    """
    if not hasattr(os, "memfd_create"):
        return tempfile.TemporaryFile("a+b", buffering=0)
    descriptor = os.memfd_create(_SILENT_NAME)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)  # whoever read it may empty it
    return os.fdopen(descriptor, "wb", buffering=0)


def _origins(error: BaseException) -> Iterator[str]:
    """The error and those behind it, also where `from None` hides them: the innermost says what was awaited."""
    step: BaseException | None = error
    for _ in range(_MAX_DEPTH):
        if step is None:
            return
        yield from ("", *"".join(traceback.format_exception(step, chain=False)).rstrip().splitlines())
        step = step.__cause__ or step.__context__


def _threads(first: int) -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    for ident in sorted(frames, key=lambda ident: (ident != first, ident)):
        yield f"\nthread {names.get(ident, 'unnamed')}"
        yield from (line.rstrip() for line in traceback.format_stack(frames[ident]))


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """Every task with the chain of what it awaits; those that stand at the same place are told once."""
    alike: dict[tuple[str, ...], list[str]] = {}
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        alike.setdefault(tuple(_awaited(task)), []).append(task.get_name())
    yield f"\n{len(tasks)} tasks of the event loop, each with what it awaits; the last line is what it waits for"
    for chain, names in sorted(alike.items(), key=lambda item: (-len(item[1]), item[0])):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"\ntask {names[0]}{more}"
        yield from chain


def _awaited(task: asyncio.Task[Any]) -> Iterator[str]:
    step: Any = task.get_coro()
    if task is asyncio.current_task(task.get_loop()):
        yield "  runs; see the thread of the event loop"
        return
    for _ in range(_MAX_DEPTH):
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(step, name, None))), None)
        if frame is not None:
            code = frame.f_code
            yield f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}'
            if line := linecache.getline(code.co_filename, frame.f_lineno).strip():
                yield f"    {line}"
        elif hasattr(step, "cr_await"):
            yield f"  in {getattr(step, '__qualname__', step)}"  # compiled code has no frame
        awaits = (getattr(step, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        step = next((awaited for awaited in awaits if awaited is not None), None)
        if step is None:
            break
    if (waited := getattr(task, "_fut_waiter", None)) is not None:
        yield f"  waits for {repr(waited)[:_MAX_WAITED_CHARS]}"


def _seen_from_outside(pid: int) -> Iterator[str]:
    """State, kernel function and system call of each thread, and the processes below."""
    proc = Path(f"/proc/{pid}")
    if not proc.exists():
        yield "there is no such process any more"
        return
    yield f"state {_field(proc, 'State')}"
    yield "threads: name, state, the kernel function that it waits in, the number of its system call"
    with contextlib.suppress(OSError):
        for thread in sorted((proc / "task").iterdir(), key=lambda path: int(path.name)):
            name, state, place = _read(thread / "comm"), _field(thread, "State"), _read(thread / "wchan")
            yield f"  {thread.name} {name}, {state}, {place}, {_read(thread / 'syscall').split(' ')[0]}"
    yield "processes below it"
    for child, (parent, state) in sorted(below(pid).items()):
        command = _read(Path(f"/proc/{child}/cmdline")).replace("\0", " ")[:_MAX_COMMAND_CHARS]
        yield f"  {child} of {parent}, {state}: {command}"


def _field(folder: Path, name: str) -> str:
    lines = _read(folder / "status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "unknown")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return "unknown"
