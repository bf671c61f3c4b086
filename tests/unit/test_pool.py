"""The pool: leases, deadlines, and that nothing leaks whatever fails or is cancelled, and when."""

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
from local_boxes import write_task

from sandbox_env.pool import LeasedSandbox, SandboxPool
from sandbox_env.providers.local import LocalProvider
from sandbox_env.sandbox import ExecResult, SandboxError


class FaultyProvider:
    """A provider whose sandboxes do nothing, and that fails or hangs where a test says so."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.create_error: Exception | None = None
        self.close_error: Exception | None = None
        self.refuses: str = ""
        self.live: set[str] = set()
        self.most_live = 0
        self.stopped = False
        self.ignores_cancel = False
        self.hangs = ""
        self._numbers = itertools.count()

    async def start(self, run_id):
        self.run_id = run_id

    def check(self, task):
        if task.name == self.refuses:
            raise ValueError(f"{task.name}: cannot be built; use another one")

    async def create(self, task):
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                if not self.ignores_cancel:
                    raise
        if self.create_error:
            raise self.create_error
        sandbox = EmptySandbox(self, f"s{next(self._numbers)}")
        self.live.add(sandbox.id)
        self.most_live = max(self.most_live, len(self.live))
        return sandbox

    async def stop(self):
        await self.hang("stop")
        self.stopped = True

    async def hang(self, operation):
        """For ever, and deaf to cancellation, in the operation that the test names."""
        while self.hangs == operation:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


class EmptySandbox:
    def __init__(self, provider, name):
        self.id, self._provider = name, provider

    async def exec(self, command, *, timeout_s, cwd=None, env=None):
        if command == "hang":
            await asyncio.sleep(timeout_s)
        await self._provider.hang("exec")
        return ExecResult(0, "ready\n")

    async def upload(self, archive, target):
        await self._provider.hang("upload")

    async def download(self, path, *, max_bytes):
        await self._provider.hang("download")
        return b""

    async def close(self):
        await asyncio.sleep(0)
        await self._provider.hang("close")
        if self._provider.close_error:
            raise self._provider.close_error
        self._provider.live.discard(self.id)


class Tasks:
    def __init__(self, *tasks):
        self._tasks = list(tasks)

    async def all_tasks(self):
        return self._tasks


@pytest.fixture
def task(tmp_path):
    return write_task(tmp_path / "small")


@pytest.fixture
def provider():
    return FaultyProvider()


@pytest.fixture
async def pool(task, provider):
    times = {"op_grace_s": 0.1, "transfer_timeout_s": 0.1, "close_timeout_s": 0.4}
    pool = SandboxPool(Tasks(task), provider, 2, lease_timeout_s=5.0, run_id="test", **times)
    await pool.start()
    yield pool
    provider.gate.set()
    provider.hangs = ""
    provider.close_error = None
    await pool.stop()
    assert provider.live == set()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_lease_works_from_start_to_release_in_a_real_sandbox(task):
    pool = SandboxPool(Tasks(task), LocalProvider(), 2, run_id="test")
    await pool.start()
    try:
        lease_id = pickle.loads(pickle.dumps(await pool.lease(pickle.loads(pickle.dumps(task)), 30)))
        sandbox = LeasedSandbox(pool, lease_id)
        result = pickle.loads(pickle.dumps(await sandbox.exec("sort notes.txt; echo $A", timeout_s=10, env={"A": "1"})))
        assert (result.output, result.exit_code) == ("a\nb\n1\n", 0)
        assert await sandbox.download("/app/notes.txt", max_bytes=100) == b"b\na\n"
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(SandboxError, match="unknown, released or expired"):
            await sandbox.exec("true", timeout_s=1)
        status = await pool.status()
        assert (status["created"], status["closed"], status["in_use"], status["failed"]) == (2, 2, 0, 0)
        assert 0 < status["create_p50_ms"] <= status["create_p90_ms"]
    finally:
        await pool.stop()


async def test_start_names_the_first_task_that_cannot_be_built_and_counts_the_rest(tmp_path, provider):
    bad = write_task(tmp_path / "bad")
    provider.refuses = "bad"
    pool = SandboxPool(Tasks(write_task(tmp_path / "good"), bad, bad), provider, 1)
    with pytest.raises(ValueError, match=r"bad: cannot be built; use another one \(and 1 more tasks\)"):
        await pool.start()


async def test_start_fails_when_a_first_sandbox_cannot_be_made(task, provider):
    provider.create_error = SandboxError("small: out of disk")
    with pytest.raises(SandboxError, match="out of disk"):
        await SandboxPool(Tasks(task), provider, 1).start()


def test_a_pool_without_room_is_refused(provider):
    with pytest.raises(ValueError, match=r"size: 0; at least 1"):
        SandboxPool(Tasks(), provider, 0)


async def test_never_more_than_size_and_every_waiter_gets_a_turn(pool, provider, task):
    async def use():
        lease_id = await pool.lease(task, 5)
        await asyncio.sleep(0.005)
        await pool.release(lease_id)

    await asyncio.gather(*(use() for _ in range(20)))
    assert provider.most_live == 2
    assert (await pool.status())["created"] == 21  # with that of the preflight


async def test_a_full_pool_says_what_was_waited_for(pool, task):
    held = [await pool.lease(task, 1) for _ in range(2)]
    waiting = asyncio.create_task(pool.lease(task, 0.2))
    await asyncio.sleep(0.05)
    assert (await pool.status())["num_waiting"] == 1
    with pytest.raises(SandboxError, match=r"small: no sandbox became free within 0.2 s; all 2 are leased"):
        await waiting
    assert (await pool.status())["num_waiting"] == 0
    for lease_id in held:
        await pool.release(lease_id)


async def test_a_sandbox_that_cannot_be_made_costs_no_slot(pool, provider, task):
    provider.create_error = RuntimeError("odd")
    for _ in range(5):
        with pytest.raises(SandboxError, match="small: the sandbox could not be made: RuntimeError"):
            await pool.lease(task, 1)
    provider.create_error = None
    assert (await pool.status())["failed"] == 5
    for lease_id in [await pool.lease(task, 1) for _ in range(2)]:
        await pool.release(lease_id)


@pytest.mark.parametrize("ignores_cancel", [False, True])
async def test_a_sandbox_that_comes_too_late_is_closed_and_its_slot_given_back(pool, provider, task, ignores_cancel):
    provider.gate.clear()
    provider.ignores_cancel = ignores_cancel
    for _ in range(2):
        with pytest.raises(SandboxError, match=r"small: the sandbox was not ready within 0.05 s"):
            await pool.lease(task, 0.05)
    if ignores_cancel:
        with pytest.raises(SandboxError, match="no sandbox became free"):
            await pool.lease(task, 0.05)  # both slots still belong to what is being made
    provider.gate.set()
    held = [await pool.lease(task, 2) for _ in range(2)]
    assert len(provider.live) == 2
    for lease_id in held:
        await pool.release(lease_id)


@pytest.mark.parametrize("ignores_cancel", [False, True])
async def test_a_cancelled_caller_leaks_nothing_while_its_sandbox_is_made(pool, provider, task, ignores_cancel):
    provider.gate.clear()
    provider.ignores_cancel = ignores_cancel
    callers = [asyncio.create_task(pool.lease(task, 5)) for _ in range(6)]
    await asyncio.sleep(0.02)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    provider.gate.set()
    held = [await pool.lease(task, 2) for _ in range(2)]
    await until(lambda: len(provider.live) == 2)
    for lease_id in held:
        await pool.release(lease_id)


async def test_cancelling_at_any_moment_leaks_nothing(task):
    """The same against the real provider: cancel after 0, 1, 2 ... ms."""
    provider = LocalProvider()
    pool = SandboxPool(Tasks(task), provider, 2, run_id="cancel")
    await pool.start()
    try:
        for delay_ms in range(16):
            caller = asyncio.create_task(pool.lease(task, 10))
            await asyncio.sleep(delay_ms / 1000)
            caller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pool.release(await caller)
        held = [await pool.lease(task, 10) for _ in range(2)]
        assert len(provider._boxes) == 2
        for lease_id in held:
            await pool.release(lease_id)
        assert provider._boxes == {}
    finally:
        await pool.stop()


async def test_an_unused_lease_expires_but_a_long_command_does_not(task, provider):
    pool = SandboxPool(Tasks(task), provider, 2, lease_ttl_s=0.2)
    await pool.start()
    try:
        forgotten, busy = await pool.lease(task, 1), await pool.lease(task, 1)
        await pool.exec(busy, "hang", 0.7)
        await pool.exec(busy, "true", 1)
        with pytest.raises(SandboxError, match="unknown, released or expired"):
            await pool.exec(forgotten, "true", 1)
        assert (await pool.status())["expired"] == 1
    finally:
        await pool.stop()


async def test_a_close_that_fails_is_told_and_counted_and_the_slot_is_free(pool, provider, task):
    lease_id = await pool.lease(task, 1)
    provider.close_error = SandboxError("s1: still there")
    with pytest.raises(SandboxError, match="s1: still there"):
        await pool.release(lease_id)
    assert (await pool.status())["failed"] == 1
    assert (await pool.status())["in_use"] == 0
    provider.live.clear()


async def test_release_goes_on_when_its_caller_is_cancelled(pool, provider, task):
    lease_id = await pool.lease(task, 1)
    caller = asyncio.create_task(pool.release(lease_id))
    await asyncio.sleep(0)
    caller.cancel()
    await until(lambda: not provider.live)
    await pool.release(lease_id)


async def test_stop_closes_what_is_leased_and_turns_waiters_away(task, provider):
    pool = SandboxPool(Tasks(task), provider, 1)
    await pool.start()
    held = await pool.lease(task, 1)
    waiter = asyncio.create_task(pool.lease(task, 5))
    await asyncio.sleep(0.01)
    await pool.stop()
    with pytest.raises(SandboxError, match="the pool was stopped"):
        await waiter
    with pytest.raises(SandboxError, match="unknown, released or expired"):
        await pool.exec(held, "true", 1)
    assert provider.live == set()
    assert provider.stopped


async def test_stop_works_when_start_failed(task, provider):
    provider.create_error = SandboxError("no")
    pool = SandboxPool(Tasks(task), provider, 1)
    with pytest.raises(SandboxError):
        await pool.start()
    await pool.stop()
    assert provider.stopped


@pytest.mark.parametrize(
    ("operation", "arguments", "late"),
    [
        ("exec", ("true", 0.1), r"s1: the provider did not end a command within 0\.2 s"),
        ("upload", (b"abc", "/"), r"s1: the provider did not take 3 bytes within 0\.2 s"),
        ("download", ("/a", 10), r"s1: the provider did not give /a within 0\.2 s"),
    ],
)
async def test_a_provider_that_hangs_is_a_sandbox_error_in_time(pool, provider, task, operation, arguments, late):
    lease_id = await pool.lease(task, 1)
    provider.hangs = operation
    async with asyncio.timeout(5):
        with pytest.raises(SandboxError, match=late):
            await getattr(pool, operation)(lease_id, *arguments)
        await pool.release(lease_id)
    assert provider.live == set()


async def test_a_sandbox_that_does_not_close_in_time_is_told_until_it_does(pool, provider, task):
    lease_id = await pool.lease(task, 1)
    provider.hangs = "close"
    async with asyncio.timeout(5):
        with pytest.raises(SandboxError, match=r"s1: not closed within 0\.4 s"):
            await pool.release(lease_id)
    status = await pool.status()
    assert (status["unclosed"], status["in_use"]) == (1, 0)
    provider.hangs = ""
    await until(lambda: not pool._closer.unclosed)
    assert provider.live == set()


async def test_stop_names_what_did_not_close_and_a_provider_that_did_not_stop(task, provider):
    pool = SandboxPool(Tasks(task), provider, 2, close_timeout_s=0.1)
    await pool.start()
    await pool.lease(task, 1)
    provider.hangs = "close"
    async with asyncio.timeout(5):
        with pytest.raises(SandboxError, match=r"^s1: not closed within 0\.1 s$"):
            await pool.stop()
        provider.hangs = "stop"
        with pytest.raises(SandboxError, match=r"^the sandbox provider did not stop within 0\.1 s"):
            await pool.stop()
    provider.hangs = ""


async def test_a_sandbox_that_is_made_for_ever_gives_its_slot_back(pool, provider, task):
    provider.gate.clear()
    provider.ignores_cancel = True
    for _ in range(2):
        with pytest.raises(SandboxError, match="not ready within"):
            await pool.lease(task, 0.05)
    await until(lambda: len(pool._closer.unclosed) == 2)
    provider.ignores_cancel = False
    provider.gate.set()
    await until(lambda: not provider.live and not pool._closer.unclosed)
    for lease_id in [await pool.lease(task, 1) for _ in range(2)]:
        await pool.release(lease_id)


async def test_each_time_must_be_above_0(provider):
    for name in ("op_grace_s", "transfer_timeout_s", "close_timeout_s", "lease_ttl_s"):
        with pytest.raises(ValueError, match=rf"^sandbox\.{name}: 0; give more than 0"):
            SandboxPool(Tasks(), provider, 1, **cast(Any, {name: 0}))
