"""A fleet whose engines hang: every wait ends at its own limit, names who and what was late, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engines import Http
from fleets import Data, checksum_of, running_fleet

from miles_rl.engine.base import EngineError, Replica
from miles_rl.engine.client import EngineClient
from miles_rl.engine.embedded.engine import EmbeddedEngine
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.engine.fleet import Fleet
from miles_rl.router.sglang import SglangRouter

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_S = {"publish": 2.0, "resume": 1.0, "status": 1.0}
SLACK_S = 20.0
"""What a loaded machine may add to a limit."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_random_qwen3(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(model: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """All tests but the last two share it, and leave it serving sound weights; the last that uses it ends it."""
    limits: dict[str, Any] = {f"{name}_timeout_s": limit_s for name, limit_s in LIMIT_S.items()}
    async with running_fleet(model, tmp_path_factory.mktemp("logs"), **limits) as made:
        yield made


@contextmanager
def never_loaded(model: str, folder: Path) -> Iterator[str]:
    """Weights whose file is a pipe that nobody writes to: an engine that reads it waits."""
    shutil.copytree(model, folder)
    pipe = folder / "model.safetensors"
    pipe.unlink()
    os.mkfifo(pipe)
    try:
        yield str(folder)
    finally:
        for _ in range(2):  # each replica's thread wakes up to an empty file
            with contextlib.suppress(OSError):
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
                time.sleep(0.1)


async def generate(fleet: Fleet, name: str) -> list[int]:
    """Versions of a reply from each replica."""
    found: list[int] = []
    for url in (await fleet.endpoints())["replicas"]:
        async with EngineClient(url, timeout_s=SLACK_S) as client:
            found += (await client.generate([5, 6], {"max_new_tokens": 2, "ignore_eos": True}, rid=name)).versions
    return found


async def are_paused(fleet: Fleet) -> list[bool]:
    """Of each replica."""
    engines = [Http(url) for url in (await fleet.endpoints())["replicas"]]
    return [(await engine.get("/server_info"))[1]["internal_states"][0]["is_paused"] for engine in engines]


async def test_a_load_that_hangs_ends_at_its_limit_and_leaves_engines_paused_until_a_sound_publish(
    fleet: Fleet, model: str, tmp_path: Path
) -> None:
    """An engine that does not answer may yet load the weights, and nobody would have verified them."""
    started = time.monotonic()
    late = r"update failed: stages\.fleet\.run\.publish_timeout_s: 2; it did not end in time; .*; it stays paused, .*"
    with never_loaded(model, tmp_path / "weights") as folder:
        names = rf"version 4 to replica 0 \(pid \d+\): {late}to replica 1 \(pid \d+\): {late}"
        with pytest.raises(EngineError, match=names):
            await fleet.publish(folder, 4, "")
        assert time.monotonic() - started < LIMIT_S["publish"] + SLACK_S
        with pytest.raises(EngineError, match=r"update failed: .*/nowhere.*; it stays paused"):
            await fleet.publish("/nowhere", 4, "")  # refused, so they have what they had: nobody knows what
    assert (await fleet.status())["version"] == 3
    assert await are_paused(fleet) == [True, True]
    await fleet.publish(model, 4, checksum_of(model))
    assert await generate(fleet, "after") == [4, 4, 4, 4]


async def test_a_publish_that_is_cancelled_while_it_loads_leaves_no_engine_on_weights_that_nobody_verified(
    fleet: Fleet, model: str, tmp_path: Path
) -> None:
    version = (await fleet.endpoints())["version"] + 1
    with never_loaded(model, tmp_path / "weights") as folder:
        publishing = asyncio.create_task(fleet.publish(folder, version, ""))
        async with asyncio.timeout(SLACK_S):
            while not (all(await are_paused(fleet)) and all(p._step == "update" for p in fleet._publishers)):
                await asyncio.sleep(0.01)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert await are_paused(fleet) == [True, True]
        await fleet.publish(model, version, checksum_of(model))  # the load that hangs is in nobody's way
        assert await generate(fleet, "after") == 4 * [version]


async def test_a_publish_that_is_cancelled_before_it_loads_leaves_no_engine_paused(fleet: Fleet, model: str) -> None:
    version = (await fleet.endpoints())["version"]
    pid = fleet._replicas[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        publishing = asyncio.create_task(fleet.publish(model, version + 1, checksum_of(model)))
        await asyncio.sleep(0.1)
        assert fleet._publishers[1]._step == "pause"
        publishing.cancel()
        await asyncio.sleep(0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert (await are_paused(fleet))[1] is False


async def test_a_frozen_replica_is_named_in_time_and_is_killed_at_the_end(fleet: Fleet, model: str) -> None:
    version = (await fleet.endpoints())["version"] + 1
    pids = [replica.pid for replica in fleet._replicas]
    os.kill(pids[1], signal.SIGSTOP)
    frozen, started = rf"replica 1 \(pid {pids[1]}, stopped by a signal\)", time.monotonic()
    with pytest.raises(EngineError, match=rf"^{frozen} is not healthy: stages\.fleet\.run\.status_timeout_s: 1; "):
        await fleet.status()
    assert time.monotonic() - started < LIMIT_S["status"] + SLACK_S

    first = asyncio.create_task(fleet.publish(model, version, checksum_of(model)))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match=r"stages\.fleet\.run\.publish_timeout_s: 2; an earlier publish"):
        await fleet.publish(model, version + 1, "")
    paused = r"pause failed: stages\.fleet\.run\.publish_timeout_s: 2; .*"
    resumed = r"continue failed \(stages\.fleet\.run\.resume_timeout_s: 1\)"
    with pytest.raises(EngineError, match=rf"version {version} to {frozen}: {paused}; {resumed}"):
        await first
    started = time.monotonic()
    await fleet.stop()
    assert time.monotonic() - started < SLACK_S
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


class OneThatNeverStarts:
    """Launches real engines, but for replica 1."""

    def __init__(self) -> None:
        self.up: list[Replica] = []

    async def launch(self, index: int, model_dir: str, version: int, log_dir: str) -> Replica:
        """See `Engine`."""
        if index == 1:
            await asyncio.Event().wait()
        self.up.append(await EmbeddedEngine().launch(index, model_dir, version, log_dir))
        return self.up[-1]


async def test_a_start_that_is_cancelled_stops_the_replicas_that_are_up(model: str, tmp_path: Path) -> None:
    engine = OneThatNeverStarts()
    made = Fleet(Data(model), engine, SglangRouter(), num_replicas=2, log_dir=str(tmp_path))
    starting = asyncio.create_task(made.start())
    async with asyncio.timeout(60):
        while not engine.up:
            await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.up[0].exit_code() is not None


async def test_an_engine_that_starts_too_slowly_is_named_with_its_limit(model: str, tmp_path: Path) -> None:
    slow = EmbeddedEngine(start_timeout_s=0.05)
    made = Fleet(Data(model), slow, SglangRouter(), log_dir=str(tmp_path))
    with pytest.raises(
        EngineError, match=r"^engine\.start_timeout_s: 0\.05; replica 0 \(pid \d+\) is not ready in time"
    ):
        await made.start()


@pytest.mark.parametrize("name", ["publish_timeout_s", "resume_timeout_s", "status_timeout_s", "stop_timeout_s"])
async def test_no_limit_may_be_zero(name: str) -> None:
    limits: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=rf"stages\.fleet\.run\.{name}: 0; give more than 0"):
        Fleet(Data(""), EmbeddedEngine(), SglangRouter(), **limits)
