"""Sandboxes on this machine, without Docker, an account or root: namespaces, resource limits and a tmpfs per episode.

    provider (this process) -- bubblewrap -- outer sandbox -- launcher -- box, box, box, ...
                                             no network       forks       own namespaces, own limits, own tmpfs
                                             read-only /usr   boxes       no privilege, nobody else's processes

`local_outer` is what the host shows at all, `local_namespaces` is what a box is, `local_command` is how a command
runs and ends. A box starts in a few milliseconds because it is forked from a waiting process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os

from sandbox_env.dockerfile import Run
from sandbox_env.providers.local_cgroup import CgroupTree
from sandbox_env.providers.local_image import LOCAL_ENV, LocalImage, build_image
from sandbox_env.providers.local_launcher import Launcher, start_launcher
from sandbox_env.providers.local_outer import explain, require_linux
from sandbox_env.providers.local_sandbox import LocalSandbox
from sandbox_env.providers.local_wire import BoxLimits
from sandbox_env.sandbox import ExecResult, SandboxError
from sandbox_env.task import Task

logger = logging.getLogger(__name__)


class LocalProvider:
    """Makes boxes on this machine. Sizes in MiB, times in seconds.

    A task's own `memory_mb` and `storage_mb` count up to the caps here, for its files live in memory. `cpu_time_s` is
    per process. `output_limit_kb` is what a command's output keeps; past `max_output_mb` the command is ended.
    Memory of a whole box is bounded by a cgroup where one can be made, else by watching its processes.
    """

    def __init__(
        self,
        *,
        max_processes: int = 256,
        memory_mb: int = 512,
        storage_mb: int = 256,
        scoring_storage_mb: int = 64,
        cpu_time_s: int = 600,
        max_file_mb: int = 128,
        output_limit_kb: int = 256,
        max_output_mb: int = 64,
        create_timeout_s: float = 30.0,
        build_timeout_s: float = 120.0,
    ) -> None:
        self._limits = BoxLimits(
            max_processes=max_processes,
            memory_mb=memory_mb,
            storage_mb=storage_mb,
            scoring_storage_mb=scoring_storage_mb,
            cpu_time_s=cpu_time_s,
            max_file_mb=max_file_mb,
            output_bytes=output_limit_kb << 10,
            max_output_mb=max_output_mb,
            memory_by_cgroup=False,
        )
        _require_sane(self._limits)
        self._create_timeout_s = create_timeout_s
        self._build_timeout_s = build_timeout_s
        self._run_id = "unstarted"
        self._numbers = itertools.count()
        self._images: dict[str, LocalImage] = {}
        self._boxes: dict[str, LocalSandbox] = {}
        self._launcher: Launcher | None = None
        self._launch_lock = asyncio.Lock()
        # Boxes that are set up all at once only slow each other down.
        self._setup_slots = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._stopped = False
        self._cgroups: CgroupTree | None = None

    async def start(self, run_id: str) -> None:
        """Make one box and run a command in it. Raises `IsolationUnavailable` with the remedy if that fails."""
        require_linux()
        self._run_id = run_id
        self._cgroups = CgroupTree(self._limits.max_processes)
        await self._running_launcher()
        try:
            await self._try_out()
        except SandboxError as error:
            if not self._cgroups.usable:
                raise explain(str(error)) from None
            self._cgroups.disable()
            try:
                await self._try_out()
            except SandboxError as again:
                raise explain(str(again)) from None
            logger.warning("sandbox: local; cgroups cannot be used here (%s): limits are per process", error)

    def check(self, task: Task) -> None:
        """Raise `ValueError` with file, line and remedy if the task's environment cannot be built without Docker."""
        self._image(task)

    async def create(self, task: Task) -> LocalSandbox:
        """A box with the task's environment in it. Raises `SandboxError`; then, or if cancelled, nothing is left."""
        try:
            image = self._image(task)
        except ValueError as error:
            raise SandboxError(str(error)) from None
        box: LocalSandbox | None = None
        memory_mb = min(task.memory_mb, self._limits.memory_mb)
        # Files live in memory: were they allowed all of it, a full disk would leave none to run the tests with.
        storage_mb = min(task.storage_mb, self._limits.storage_mb, max(1, memory_mb // 2))
        try:
            async with self._setup_slots:  # bounded: create_timeout_s of who holds a place
                box = await self._open(image, workdir=task.workdir, memory_mb=memory_mb, storage_mb=storage_mb)
                await box.wait_ready(self._create_timeout_s)
            for part in image.parts:
                if isinstance(part, Run):
                    await self._run(box, part)
                else:
                    await box.upload(part, "/")
        except BaseException:
            if box is not None:
                await box.close()
            raise
        return box

    async def stop(self) -> None:
        """End every box and the launcher, and verify it. Raises `SandboxError` naming what is left."""
        self._stopped = True
        # bounded: END_TIMEOUT_S of each
        results = await asyncio.gather(*(box.close() for box in list(self._boxes.values())), return_exceptions=True)
        if self._launcher is not None:
            await self._launcher.stop()
            self._launcher = None
        if self._cgroups is not None:
            self._cgroups.close()
        failures = [str(result) for result in results if isinstance(result, BaseException)]
        if failures:
            raise SandboxError("; ".join(failures))

    def _image(self, task: Task) -> LocalImage:
        image = self._images.get(task.digest)
        if image is None:
            image = self._images[task.digest] = build_image(task)
        return image

    async def _running_launcher(self) -> Launcher:
        async with self._launch_lock:  # bounded: create_timeout_s of who holds it
            if self._launcher is None or not self._launcher.alive:
                self._launcher = await start_launcher(self._create_timeout_s)
            return self._launcher

    async def _open(self, image: LocalImage, *, workdir: str, memory_mb: int, storage_mb: int) -> LocalSandbox:
        if self._cgroups is None or self._stopped:
            raise SandboxError("the local provider is not running")
        launcher = await self._running_launcher()
        cgroups, cgroup = self._cgroups, self._cgroups.take(memory_mb)
        box_id = f"{self._run_id}-{next(self._numbers)}"

        def on_close() -> None:
            self._boxes.pop(box_id, None)
            cgroups.give(cgroup)

        limits = self._limits._replace(
            memory_mb=memory_mb, storage_mb=storage_mb, memory_by_cgroup=cgroup.bounds_memory
        )
        try:
            channel = launcher.create(box_id, limits, cgroup.join_fds)
        except SandboxError:
            cgroups.give(cgroup)
            raise
        box = LocalSandbox(
            box_id,
            launcher,
            channel,
            workdir=workdir,
            env=image.env,
            output_bytes=limits.output_bytes,
            on_close=on_close,
        )
        self._boxes[box_id] = box
        return box

    async def _run(self, box: LocalSandbox, step: Run) -> ExecResult:
        env = {**LOCAL_ENV, **step.env}
        result = await box.run(step.argv, timeout_s=self._build_timeout_s, cwd=step.workdir, env=env)
        if result.exit_code != 0:
            raise SandboxError(f"{step.where}: RUN ended with {result.exit_code}: {result.output[-300:].strip()}")
        return result

    async def _try_out(self) -> None:
        image = LocalImage((), LOCAL_ENV)
        box = await self._open(image, workdir="/", memory_mb=self._limits.memory_mb, storage_mb=self._limits.storage_mb)
        try:
            about = await box.wait_ready(self._create_timeout_s)
            result = await box.exec("echo ready", timeout_s=self._create_timeout_s)
            if result.output != "ready\n":
                raise SandboxError(f"the first command said {result.output[:200]!r}")
        finally:
            await box.close()
        if about.get("python3") is not True:
            logger.warning("sandbox: local; there is no /usr/bin/python3: commands that need Python will not find it")


def _require_sane(limits: BoxLimits) -> None:
    for name, value in limits._asdict().items():
        if name != "memory_by_cgroup" and value < 1:
            option = "output_limit_kb" if name == "output_bytes" else name
            raise ValueError(f"sandbox.provider.{option}: {value}; at least 1")
    files_mb = limits.storage_mb + limits.scoring_storage_mb
    if limits.memory_mb <= files_mb:
        wanted = f"files live in memory, so more than storage_mb + scoring_storage_mb = {files_mb}"
        raise ValueError(f"sandbox.provider.memory_mb: {limits.memory_mb}; {wanted}")
