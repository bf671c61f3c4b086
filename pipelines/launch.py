"""Puts a plan on Ray: one actor per stage. The only module that knows Ray.

A run is a Ray session of its own, on loopback, with its token and its files in a folder that is gone afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pipelines
from pipelines.observer import Observer
from pipelines.plan import Plan, PlannedStage
from pipelines.processes import Offspring
from pipelines.signature import targets
from pipelines.stage import StageError
from pipelines.supervise import Ending, Interrupts, Supervisor

# Ray reads these when it is imported: it phones nobody, listens on loopback, and talks only to who knows the token.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", RAY_AUTH_MODE="token")
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")  # Ray's name for: loopback only, on any system
os.environ.update(RAY_worker_niceness="0")  # stages are the work of the run, not something beside it

import ray as ray_untyped
from ray._private import worker as ray_worker
from ray.exceptions import RayActorError, RayError

log = logging.getLogger(__name__)
ray: Any = ray_untyped  # its annotations are incomplete

_TOKEN = secrets.token_hex(32)  # one for this process: Ray caches the first it reads
_MAX_CALLS = 10_000
_CANCEL_GRACE_S = 5.0
_EXIT_GRACE_S = 5.0
_GUARD_TIMEOUT_S = 15.0


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


class StageHandle:
    """A stage as other stages see it: the component's async methods, under a deadline.

    A call raises what the component raised, or `StageError` if the stage is dead or does not answer in time. Giving
    up a call cancels it in the stage.
    """

    def __init__(self, name: str, actor: Any, call_timeout_s: float) -> None:
        self._name, self._actor, self._call_timeout_s = name, actor, call_timeout_s

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._invoke, method)

    async def _invoke(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return await _answer(self._name, self._actor.call.remote(method, args, kwargs), self._call_timeout_s)
        except _NoAnswer:
            raise StageError(f"stage '{self._name}': no answer to '{method}' in {self._call_timeout_s:g} s") from None


class _NoAnswer(TimeoutError):
    """The deadline of a call passed; not the `TimeoutError` of a component."""


async def _answer(stage: str, reference: Any, timeout_s: float | None) -> Any:
    """What a call brought back, or its exception."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await reference
    except TimeoutError:
        ray.cancel(reference)
        raise _NoAnswer from None
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except RayActorError:
        cause = "its process was killed, ran out of memory, or crashed in native code; see log.txt"
        raise StageError(f"stage '{stage}' died: {cause}") from None
    except RayError as error:
        raise StageError(f"stage '{stage}': {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if isinstance(answer, Failure):
        raise answer.open(stage)
    return answer


class StageHost:
    """The actor: builds one component inside its own process and passes calls on to it."""

    def __init__(self, name: str, run: Mapping[str, Any], log_file: str, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._name, self._run = name, dict(run)
        self._component: Any = None
        self._long: dict[str, asyncio.Task[Any]] = {}
        self._last_status_error = ""
        self._write_to(log_file)

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

    async def preload(self) -> None:
        """Import what the component is made of while earlier stages start. If that fails, `build` tells."""
        for target in targets(self._run):
            with contextlib.suppress(Exception):
                await asyncio.to_thread(importlib.import_module, target.rpartition(".")[0])

    async def build(self, needs: Mapping[str, StageHandle]) -> Failure | None:
        """Construct the component."""
        # Ray starts its workers with SIGINT blocked, and every process that a component starts would inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            instantiate = importlib.import_module("hydra.utils").instantiate
            self._component = instantiate({**self._run, "_partial_": True}, _convert_="all")(**needs)
        except Exception as error:
            log.exception("cannot be built")
            return Failure.of(error.__cause__ or error)  # Hydra wraps what the constructor raised
        log.info("built in process %d", os.getpid())
        return None

    async def call(self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a method of the component; its exception comes back as a `Failure`."""
        if method == "facts" and not hasattr(self._component, "facts"):
            return {}
        if method == "stop":
            await self._cancel_long_calls()
        try:
            work = getattr(self._component, method)(*args, **(kwargs or {}))
            if method not in ("start", "run"):
                return await work
            self._long[method] = asyncio.ensure_future(work)
            return await self._long[method]
        except Exception as error:
            if method in ("start", "run", "stop") or (method == "status" and str(error) != self._last_status_error):
                log.exception("'%s' failed", method)
            if method == "status":
                self._last_status_error = str(error)  # a sick stage is asked again and again
            return Failure.of(error)

    async def _cancel_long_calls(self) -> None:
        """End `start` and `run` before `stop`, so that it finds the component at rest."""
        pending = [task for task in self._long.values() if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_CANCEL_GRACE_S)


class RayHost:
    """A stage as the supervisor sees it; pickled for other stages as its `StageHandle`."""

    def __init__(self, stage: PlannedStage, actor: Any) -> None:
        self._stage, self._actor = stage, actor
        self.handle = StageHandle(stage.name, actor, stage.call_timeout_s)
        actor.preload.remote()

    async def build(self, needs: Mapping[str, RayHost], timeout_s: float) -> None:
        """Construct the component in its process, given the hosts of its needs."""
        handles = {name: host.handle for name, host in needs.items()}
        await self._checked(self._actor.build.remote(handles), timeout_s)

    async def call(self, method: str, timeout_s: float | None) -> Any:
        """Call a method without arguments. Raises `StageError` with the stage's name first, or `TimeoutError`."""
        return await self._checked(self._actor.call.remote(method), timeout_s)

    async def _checked(self, reference: Any, timeout_s: float | None) -> Any:
        try:
            return await _answer(self._stage.name, reference, timeout_s)
        except (StageError, _NoAnswer):
            raise
        except Exception as error:
            text = " ".join(str(error).split()) or "no message"
            raise StageError(f"stage '{self._stage.name}': {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def session(cluster: Mapping[str, Any]) -> Generator[None]:
    """A private Ray for the time of a `with`. `cluster` is the config group of that name."""
    folder = Path(tempfile.mkdtemp(prefix=f"miles-ray-{os.getpid()}-", dir=cluster["temp_dir"]))
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(folder)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(_TOKEN)
    paths = dict.fromkeys([str(Path(pipelines.__file__).parent.parent), *os.environ.get("PYTHONPATH", "").split(":")])
    os.environ.update(cluster["env"], RAY_AUTH_TOKEN_PATH=str(token), PYTHONPATH=":".join(filter(None, paths)))
    # Ray would print what it hears of dead workers over the display; the run tells it in its own words.
    ray_worker.print_to_stdstream = _log_of_ray
    try:
        # In this thread, not in a helper: the kernel ends Ray's processes with the thread that started them.
        ray.init(
            num_cpus=cluster["num_cpus"],
            num_gpus=cluster["num_gpus"],
            object_store_memory=cluster["object_store_mb"] * 2**20,
            include_dashboard=cluster["include_dashboard"],
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        guard.communicate(timeout=_GUARD_TIMEOUT_S)


def _log_of_ray(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    log.info("Ray: %s", " ".join(data["lines"]))


def launch(plan: Plan, run_dir: Path, observer: Observer) -> Ending:
    """Run `plan` from start to stop. Call it from the main thread: it listens to SIGINT and SIGTERM.

    Afterwards no process that it started is left; one that had to be killed is told in the warnings.
    """
    offspring = Offspring()
    try:
        ending = asyncio.run(_launch(plan, run_dir, observer))
    finally:
        killed = offspring.end(_EXIT_GRACE_S)
    for command in killed:
        ending.warnings.append(f"a process was left over and was killed: {command}")
        observer.note(ending.warnings[-1])
    return ending


async def _launch(plan: Plan, run_dir: Path, observer: Observer) -> Ending:
    cluster = cast(Mapping[str, Any], plan.config["cluster"])
    log_file = str(run_dir / "log.txt")
    actor_class: Any = ray.remote(max_restarts=0, max_task_retries=0)(StageHost)

    def place(stage: PlannedStage) -> RayHost:
        options = actor_class.options(num_cpus=stage.cpus, num_gpus=stage.gpus_per_node, max_concurrency=_MAX_CALLS)
        return RayHost(stage, options.remote(stage.name, stage.run, log_file, cluster["env"]))

    interrupts = Interrupts()
    _listen(interrupts)
    observer.note("starting Ray")
    with session(cluster):
        _listen(interrupts)  # Ray put its own handlers in place
        supervisor = Supervisor(plan, place, observer, cluster["heartbeat_s"], cluster["heartbeat_timeout_s"])
        return await supervisor.supervise(interrupts)


def _listen(interrupts: Interrupts) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupts.deliver, number.name)
