"""What runs in the process of a stage: builds its component, passes calls on to it, and watches its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.signature import targets
from pipelines.stacks import FOLDER, Watch
from pipelines.stage import StageError

log = logging.getLogger(__name__)

_CANCEL_GRACE_S = 5.0
_OWN_CALLS = ("start", "run", "stop")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way from a stage to its caller. `pickled` is None if the exception cannot travel."""

    pickled: bytes | None
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The envelope of `error`."""
        text = f"{type(error).__name__}: {error}"
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = None
        return cls(pickled, text, traceback.format_exc())

    def open(self, stage: str) -> BaseException:
        """The exception as its own class, so that callers can tell one failure from another."""
        if self.pickled is None:
            return StageError(f"stage '{stage}': {self.text}")
        error: BaseException = pickle.loads(self.pickled)
        error.add_note(f"in stage '{stage}':\n{self.trace}")
        return error


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What all stages of a run share. `fault` is the config of the fault, empty for none."""

    run_dir: str
    stall_s: float
    env: Mapping[str, str]
    fault: Mapping[str, Any] = field(default_factory=dict[str, Any])


class StageHost:
    """Builds one component inside its own process and passes calls on to it. `pipelines.launch` makes it an actor."""

    def __init__(self, name: str, run: Mapping[str, Any], settings: HostSettings) -> None:
        os.environ.update(settings.env)
        self._name, self._run, self._settings = name, dict(run), settings
        self._component: Any = None
        self._watch: Watch | None = None
        self._long: dict[str, asyncio.Task[Any]] = {}
        self._last_status_error = ""
        self._write_to(str(Path(settings.run_dir) / "log.txt"))

    def _write_to(self, log_file: str) -> None:
        """Everything this process prints goes to the end of the run's log, also what native code prints."""
        descriptor = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        form = f"%(asctime)s %(levelname)s {self._name} %(name)s: %(message)s"
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=form, force=True)

    async def watch(self) -> int:
        """Watch the event loop from now on. Returns the process id."""
        self._watch = Watch(self._name, Path(self._settings.run_dir) / FOLDER, self._settings.stall_s)
        return os.getpid()

    async def preload(self) -> None:
        """Import what the component is made of while earlier stages start. If that fails, `build` tells."""
        for target in targets(self._run):
            with contextlib.suppress(Exception):
                # bounded: nobody waits for it, and what needs the import has its own deadline
                await asyncio.to_thread(importlib.import_module, target.rpartition(".")[0])

    async def build(self, needs: Mapping[str, Any]) -> Failure | None:
        """Construct the component, and install the fault if it acts in this stage."""
        # Ray starts its workers with SIGINT blocked, and every process that a component starts would inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            instantiate = importlib.import_module("hydra.utils").instantiate
            self._component = instantiate({**self._run, "_partial_": True}, _convert_="all")(**needs)
            fault = instantiate(dict(self._settings.fault), _convert_="all") if self._settings.fault else None
            if fault is not None and fault.stage == self._name:
                fault.install(self._component)
                log.warning("a fault acts here on purpose: %s", self._settings.fault)
        except Exception as error:
            log.exception("cannot be built")
            return Failure.of(error.__cause__ or error)  # Hydra wraps what the constructor raised
        log.info("built in process %d", os.getpid())
        return None

    async def call(self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a method of the component; its exception comes back as a `Failure`.

        One that ends by a deadline of the component leaves a file that says where everything stood.
        """
        if method == "facts" and not hasattr(self._component, "facts"):
            return {}
        if method == "stop":
            await self._cancel_long_calls()
        try:
            work = getattr(self._component, method)(*args, **(kwargs or {}))
            task = asyncio.create_task(work, name=method)  # a task of ours: through Ray's no stack can be seen
            if method in ("start", "run"):
                self._long[method] = task
            return await task  # bounded: by the caller, who cancels; a run by its heartbeat
        except Exception as error:
            news = method != "status" or str(error) != self._last_status_error
            if isinstance(error, TimeoutError) and self._watch is not None and news:
                log.error("'%s': %s; stacks in %s", method, error, self._watch.dump(f"'{method}': {error}", error))
            if method in _OWN_CALLS or (method == "status" and news):
                log.exception("'%s' failed", method)
            if method == "status":
                self._last_status_error = str(error)  # a sick stage is asked again and again
            return Failure.of(error)

    async def dump_stacks(self, reason: str) -> str | None:
        """Write where everything stands. Returns the file's path, None if there are too many."""
        path = self._watch.dump(reason) if self._watch is not None else None
        return None if path is None else str(path)

    async def _cancel_long_calls(self) -> None:
        """End `start` and `run` before `stop`, so that it finds the component at rest."""
        pending = [task for task in self._long.values() if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_CANCEL_GRACE_S)
