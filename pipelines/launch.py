"""Puts a plan on Ray: one actor per stage. The only module that knows Ray.

A run is a Ray session of its own, on loopback, with its token and its files in a folder that is gone afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Generator, Mapping
from pathlib import Path
from typing import Any, cast

import pipelines
from pipelines.host import Failure, HostSettings, StageHost
from pipelines.lock import LOCK_FILE, hold, holder
from pipelines.observer import Observer
from pipelines.plan import Plan, PlannedStage
from pipelines.processes import Offspring
from pipelines.stacks import FOLDER, Watch
from pipelines.stage import StageError, StageTimeout
from pipelines.supervise import Ending, Interrupts, Supervisor

# Ray reads these when it is imported: it phones nobody, listens on loopback, and talks only to who knows the token.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", RAY_AUTH_MODE="token")
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")  # Ray's name for: loopback only, on any system
os.environ.update(RAY_worker_niceness="0")  # stages are the work of the run, not something beside it

import ray as ray_untyped
from ray._private import services as ray_services
from ray._private import worker as ray_worker
from ray.exceptions import RayActorError, RayError

log = logging.getLogger(__name__)
ray: Any = ray_untyped  # its annotations are incomplete

_TOKEN = secrets.token_hex(32)  # one for this process: Ray caches the first it reads
_MAX_CALLS = 10_000
_DUMP_TIMEOUT_S = 2.0
_EXIT_GRACE_S = 10.0
_SHUTDOWN_TIMEOUT_S = 30.0
_SESSION_PREFIX = "miles-ray-"
_GUARD_TIMEOUT_S = 15.0


class _InItsOwnGroup(ray_services.ConsolePopen):
    """A process of Ray. A signal to the driver's group must not end it: the stages are to be stopped in order first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, process_group=0)


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
            return await _call(self._name, self._actor, self._call_timeout_s, method, args, kwargs)
        except _NoAnswer:
            late = f"stage '{self._name}': no answer to '{method}' in {self._call_timeout_s:g} s"
            raise StageTimeout(late) from None


class _NoAnswer(TimeoutError):
    """The deadline of a call passed; not the `TimeoutError` of a component."""


async def _call(stage: str, actor: Any, timeout_s: float | None, method: str, *rest: Any) -> Any:
    """Call a method of a component. A stage that is late is asked to write where it stands, then the call is ended."""
    reference = actor.call.remote(method, *rest)
    try:
        try:
            return await _answer(stage, reference, timeout_s)
        except _NoAnswer:
            with contextlib.suppress(Exception):
                reason = f"no answer to '{method}' in {timeout_s:g} s"
                await _answer(stage, actor.dump_stacks.remote(reason), _DUMP_TIMEOUT_S)
            raise
    except (_NoAnswer, asyncio.CancelledError):
        ray.cancel(reference)
        raise


async def _answer(stage: str, reference: Any, timeout_s: float | None) -> Any:
    """What a call brought back, or its exception."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await reference
    except TimeoutError:
        raise _NoAnswer from None
    except RayActorError:
        cause = "its process was killed, ran out of memory, or crashed in native code; see log.txt"
        raise StageError(f"stage '{stage}' died: {cause}") from None
    except RayError as error:
        raise StageError(f"stage '{stage}': {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if isinstance(answer, Failure):
        raise answer.open(stage)
    return answer


class RayHost:
    """A stage as the supervisor sees it; other stages are given its `handle`."""

    def __init__(self, stage: PlannedStage, actor: Any) -> None:
        self._stage, self._actor = stage, actor
        self.handle = StageHandle(stage.name, actor, stage.call_timeout_s)
        self.pid: int | None = None
        self._watching = actor.watch.remote()
        actor.preload.remote()

    async def build(self, needs: Mapping[str, RayHost], timeout_s: float) -> None:
        """Construct the component in its process, given the hosts of its needs."""
        handles = {name: host.handle for name, host in needs.items()}
        async with asyncio.timeout(timeout_s):
            self.pid = await self._checked(_answer(self._stage.name, self._watching, None))
            await self._checked(_answer(self._stage.name, self._actor.build.remote(handles), None))

    async def call(self, method: str, timeout_s: float | None) -> Any:
        """Call a method without arguments. Raises `StageError` with the stage's name first, or `TimeoutError`."""
        return await self._checked(_call(self._stage.name, self._actor, timeout_s, method))

    async def dump_stacks(self, reason: str, timeout_s: float) -> Path | None:
        """See `pipelines.supervise.Host`."""
        path = await self._checked(_answer(self._stage.name, self._actor.dump_stacks.remote(reason), timeout_s))
        return None if path is None else Path(path)

    async def _checked(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer  # bounded: by its own deadline
        except (StageError, _NoAnswer):
            raise
        except Exception as error:
            text = f"stage '{self._stage.name}': {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
            raise (StageTimeout if isinstance(error, TimeoutError) else StageError)(text) from error


def remove_dead_sessions(temp_dir: Path) -> None:
    """Remove what runs left whose every process was killed, the guard too: session folders that nobody has locked.

    One without a lock is just being made, or was being removed; its name tells by which process.
    """
    for folder in temp_dir.glob(f"{_SESSION_PREFIX}*"):
        if (folder / LOCK_FILE).exists():
            used = holder(folder) is not None
        else:
            maker = folder.name.removeprefix(_SESSION_PREFIX).split("-")[0]
            used = not maker.isdigit() or Path(f"/proc/{maker}").exists()
        if not used:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def session(cluster: Mapping[str, Any]) -> Generator[None]:
    """A private Ray for the time of a `with`. `cluster` is the config group of that name."""
    remove_dead_sessions(Path(cluster["temp_dir"]))
    folder = Path(tempfile.mkdtemp(prefix=f"{_SESSION_PREFIX}{os.getpid()}-", dir=cluster["temp_dir"]))
    lock = contextlib.ExitStack()
    lock.enter_context(hold(folder))  # until this process ends, however it ends
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(folder)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(_TOKEN)
    paths = dict.fromkeys([str(Path(pipelines.__file__).parent.parent), *os.environ.get("PYTHONPATH", "").split(":")])
    os.environ.update(cluster["env"], RAY_AUTH_TOKEN_PATH=str(token), PYTHONPATH=":".join(filter(None, paths)))
    # Ray would print what it hears of dead workers over the display; the run tells it in its own words.
    ray_worker.print_to_stdstream = _log_of_ray
    ray_services.ConsolePopen = _InItsOwnGroup
    try:
        # In this thread, not in a helper: the kernel ends Ray's processes with the thread that started them.
        with _alarm(cluster["start_timeout_s"], "cluster.start_timeout_s: {:g}; Ray did not start in time; raise it"):
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
        _end_session(folder, guard)
        lock.close()


def _end_session(folder: Path, guard: subprocess.Popen[bytes]) -> None:
    """What does not end in time is killed by `Offspring`, like all that is left of a run."""
    try:
        with _alarm(_SHUTDOWN_TIMEOUT_S, "Ray did not end within {:g} s"):
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        guard.communicate(timeout=_GUARD_TIMEOUT_S)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        log.error("%s", error)


@contextlib.contextmanager
def _alarm(seconds: float, message: str) -> Generator[None]:
    """A deadline for what blocks this thread, the main one. Raises `TimeoutError` with `message`."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(message.format(seconds))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    fault = cast(Mapping[str, Any], plan.config["faults"])
    settings = HostSettings(str(run_dir), cluster["stall_s"], cluster["env"], fault)
    actor_class: Any = ray.remote(max_restarts=0, max_task_retries=0)(StageHost)

    def place(stage: PlannedStage) -> RayHost:
        options = actor_class.options(num_cpus=stage.cpus, num_gpus=stage.gpus_per_node, max_concurrency=_MAX_CALLS)
        return RayHost(stage, options.remote(stage.name, stage.run, settings))

    interrupts = Interrupts()
    _listen(interrupts)
    observer.note("starting Ray")
    with session(cluster):
        _listen(interrupts)  # Ray put its own handlers in place
        if plan.fault:
            observer.note(plan.fault)
        supervisor = Supervisor(
            plan,
            place,
            observer,
            run_dir,
            heartbeat_s=cluster["heartbeat_s"],
            heartbeat_timeout_s=cluster["heartbeat_timeout_s"],
        )
        with contextlib.closing(Watch("driver", run_dir / FOLDER, cluster["stall_s"])):
            return await supervisor.supervise(interrupts)


def _listen(interrupts: Interrupts) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupts.deliver, number.name)
