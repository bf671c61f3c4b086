"""The real router before real engines: sticky, balanced, and not wedged by callers that leave. And the fleet."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from engines import FOREVER, Http, random_ids
from fleets import Data, checksum_of, running_fleet

import miles_rl.router.sglang as sglang_module
from miles_rl.engine.base import EngineError
from miles_rl.engine.client import EngineClient
from miles_rl.engine.embedded.engine import EmbeddedEngine
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.engine.fleet import Fleet
from miles_rl.router.sglang import SglangRouter

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_random_qwen3(folder / name, seed) for seed, name in enumerate(("old", "new"))}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with running_fleet(models["old"], tmp_path_factory.mktemp("logs")) as made:
        yield made


async def num_finished(urls: list[str]) -> list[int]:
    answers = [await Http(url).get("/server_info") for url in urls]
    return [answer["internal_states"][0]["num_finished_requests"] for _, answer in answers]


async def test_a_session_stays_on_one_replica_and_sessions_spread_over_both(fleet: Fleet) -> None:
    endpoints = await fleet.endpoints()
    version, before = endpoints["version"], await num_finished(endpoints["replicas"])
    async with EngineClient(endpoints["router"]) as client:

        async def session(name: int) -> int:
            ids, cached = random_ids(60, name), 0
            for turn in range(4):
                reply = await client.generate(ids, {"max_new_tokens": 10}, rid=f"{name}/{turn}", routing_key=str(name))
                assert set(reply.versions) == {version}
                cached += reply.cached_tokens
                ids = ids + reply.output_ids + random_ids(6, turn)
            return cached

        # Every turn but the first finds its prefix only where the turn before ran.
        assert min(await asyncio.gather(*(session(name) for name in range(24)))) >= 48 + 64 + 80
    after = await num_finished(endpoints["replicas"])
    finished = [count - earlier for count, earlier in zip(after, before, strict=True)]
    assert sum(finished) == 24 * 4, "a generation was run twice or lost"
    assert min(finished) >= 24 * 4 * 0.3
    status = await fleet.status()
    assert (status["version"], status["num_replicas"], status["running"], status["waiting"]) == (version, 2, 0, 0)
    assert status["tokens_generated"] > 0
    assert 0.3 < status["cache_hit_rate"] < 1


async def test_new_sessions_go_to_the_replica_with_the_least_to_do(fleet: Fleet) -> None:
    endpoints = await fleet.endpoints()
    engines = [Http(url) for url in endpoints["replicas"]]
    async with EngineClient(endpoints["router"]) as client:
        for number in range(6):
            task = asyncio.create_task(client.generate([5, 6], FOREVER, rid=f"f{number}", routing_key=f"f{number}"))
            async with asyncio.timeout(20):
                while sum([await engine.num_running() for engine in engines]) != number + 1:
                    await asyncio.sleep(0.01)
            assert not task.done()
        assert [await engine.num_running() for engine in engines] == [3, 3]
        await asyncio.gather(*(engine.post("/abort_request", {"abort_all": True}) for engine in engines))


async def test_streams_and_callers_that_leave_do_not_wedge_the_router(fleet: Fleet) -> None:
    endpoints = await fleet.endpoints()
    engines, router = [Http(url) for url in endpoints["replicas"]], Http(endpoints["router"])
    body = {"input_ids": [5, 6], "sampling_params": FOREVER, "return_logprob": True}

    async def leave(stream: bool) -> None:
        async with aiohttp.ClientSession() as session:
            request = session.post(router.url + "/generate", json={**body, "stream": stream})
            try:
                async with asyncio.timeout(0.4), request as response:
                    await response.read()
            except TimeoutError:
                return
            raise AssertionError("a request that should have outlasted its caller has ended")

    await asyncio.gather(*(leave(number % 2 == 0) for number in range(30)))
    await asyncio.gather(*(engine.until_running(0) for engine in engines))
    short = {**body, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    streamed = {**short, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(router.url + "/generate", json=streamed) as response:
        lines = [line async for line in response.content if line.strip()]
    assert lines[-1].strip() == b"data: [DONE]"
    assert len(json.loads(lines[-2][6:])["output_ids"]) == 5
    answers = await asyncio.gather(*(router.post("/generate", short) for _ in range(20)))
    assert Counter(status for status, _ in answers) == {200: 20}


async def test_bad_input_comes_back_through_the_router_as_the_engine_said_it(fleet: Fleet) -> None:
    async with EngineClient((await fleet.endpoints())["router"]) as client:
        with pytest.raises(EngineError, match=r"status 400: .*9999 is outside the vocabulary"):
            await client.generate([9999], {}, rid="bad")


async def test_a_publish_reaches_every_replica_while_requests_go_on(fleet: Fleet, models: dict[str, str]) -> None:
    endpoints = await fleet.endpoints()
    engines, version = [Http(url) for url in endpoints["replicas"]], endpoints["version"]
    async with EngineClient(endpoints["router"]) as client:
        sampling = {"max_new_tokens": 800, "ignore_eos": True}
        running = [
            asyncio.create_task(client.generate(random_ids(20, i), sampling, rid=f"r{i}", routing_key=f"r{i}"))
            for i in range(4)
        ]
        await asyncio.gather(*(engine.until_running(2) for engine in engines))
        timings = await fleet.publish(models["new"], version + 1, checksum_of(models["new"]))
        assert set(timings) == {"pause_s", "update_s", "verify_s"}
        assert all(0 < seconds < 60 for seconds in timings.values())
        assert timings["pause_s"] > timings["update_s"] + timings["verify_s"] * 0.5
        for reply in await asyncio.gather(*running):
            assert len(reply.output_ids) == 800
            assert (reply.versions[0], reply.versions[-1]) == (version, version + 1)
            assert reply.versions == sorted(reply.versions)
    status = await fleet.status()
    assert (status["version"], status["replica_versions"]) == (version + 1, 2 * [str(version + 1)])
    assert (await fleet.endpoints())["version"] == version + 1


async def test_a_publish_that_fails_names_the_replicas_and_only_verified_weights_generate(
    fleet: Fleet, models: dict[str, str], tmp_path: Path
) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(models["new"], torn)
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-8])
    version = (await fleet.endpoints())["version"]
    with pytest.raises(
        EngineError, match=r"replica 0 \(pid \d+\): update failed: .*torn.*; publish .* replica 1 \(pid"
    ):
        await fleet.publish(str(torn), version + 1, checksum_of(models["new"]))
    with pytest.raises(EngineError, match=f"version {version} is not above {version}"):
        await fleet.publish(models["new"], version, checksum_of(models["new"]))
    async with EngineClient((await fleet.endpoints())["router"], timeout_s=20) as client:
        reply = await client.generate([5, 6], {"max_new_tokens": 3, "ignore_eos": True}, rid="after")
        assert reply.versions == 3 * [version]
        actual, wanted = checksum_of(models["new"]), checksum_of(models["old"])
        mismatch = rf"checksum failed: .* {actual[:12]}, the trainer's {wanted[:12]}; sent 2 times, .*; it stays paused"
        with pytest.raises(EngineError, match=rf"replica 0 \(pid \d+\): {mismatch}.* to replica 1 .*: {mismatch}"):
            await fleet.publish(models["new"], version + 1, wanted)
        assert (await fleet.status())["version"] == version
        waiting = asyncio.create_task(client.generate([5, 6], {"max_new_tokens": 3, "ignore_eos": True}, rid="still"))
        assert await asyncio.wait([waiting], timeout=0.3) == (set(), {waiting})
        await fleet.publish(models["new"], version + 1, actual)
        assert (await waiting).versions == 3 * [version + 1]


async def test_killed_processes_are_named_and_what_ran_on_them_fails_at_once(
    models: dict[str, str], tmp_path: Path
) -> None:
    async with running_fleet(models["old"], tmp_path) as fleet:
        endpoints = await fleet.endpoints()
        engines = [Http(url) for url in endpoints["replicas"]]
        router = fleet._router
        assert isinstance(router, SglangRouter)
        assert router.pid is not None
        pids = [*(replica.pid for replica in fleet._replicas), router.pid]
        async with EngineClient(endpoints["router"], timeout_s=30) as client:
            running = [
                asyncio.create_task(client.generate([5, 6], FOREVER, rid=f"k{i}", routing_key=f"k{i}"))
                for i in range(4)
            ]
            await asyncio.gather(*(engine.until_running(2) for engine in engines))
            os.kill(pids[0], signal.SIGKILL)
            failed, _ = await asyncio.wait(running, timeout=10, return_when=asyncio.FIRST_EXCEPTION)
            assert any(isinstance(task.exception(), EngineError) for task in failed)
            named = rf"replica 0 \(pid {pids[0]}\) died with signal 9; log .*engine_0\.log"
            with pytest.raises(EngineError, match=named):
                await fleet.status()
            with pytest.raises(EngineError, match=named):
                await fleet.publish("/nowhere", 4, "")
            await engines[1].post("/abort_request", {"abort_all": True})
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        assert sum(isinstance(outcome, EngineError) for outcome in outcomes) == 2
        os.kill(router.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while router.exit_code() is None:
                await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=named + r"; the router died with signal 9"):
            await fleet.status()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_a_replica_that_cannot_start_fails_the_fleet_and_leaves_nothing(tmp_path: Path) -> None:
    made = Fleet(Data(str(tmp_path)), EmbeddedEngine(), SglangRouter(), num_replicas=1, log_dir=str(tmp_path / "logs"))
    with pytest.raises(EngineError, match=r"replica 0 \(pid \d+\) exited with code 1; log .*config\.json"):
        await made.start()
    await made.stop()


async def test_a_port_taken_by_another_process_is_not_fatal(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = (await fleet.endpoints())["replicas"]
    free_port = sglang_module.free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = iter([taken.getsockname()[1]])
        monkeypatch.setattr(sglang_module, "free_port", lambda host: next(given, None) or free_port(host))
        router = SglangRouter()
        url = await router.start(urls, str(tmp_path))
        try:
            async with EngineClient(url) as client:
                assert (await client.generate([5], {"max_new_tokens": 1}, rid="r")).output_ids
        finally:
            await router.stop()
    assert router.exit_code() is not None
