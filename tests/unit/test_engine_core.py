"""The model thread: it fails loudly, it never leaves anybody waiting, and one bad request is one error."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from engines import random_ids, run_to_end

from miles_rl.engine.embedded.backend import StepOutput
from miles_rl.engine.embedded.core import EngineCore, EngineDead
from miles_rl.engine.embedded.qwen3_backend import Qwen3Backend
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.engine.embedded.request import Request, SamplingParams
from miles_rl.engine.embedded.server import EngineServer


class Breakable(Qwen3Backend):
    """Fails, blocks or spoils one request's logits when told to."""

    broken = False
    spoiled: str | None = None
    gate: threading.Event | None = None

    def forward(self, prefill: Sequence[tuple[Request, int]]) -> StepOutput:
        if self.broken:
            raise MemoryError("no memory left")
        if self.gate is not None:
            self.gate.wait(20)
        output = super().forward(prefill)
        logits = output.logits.clone()
        for row, request in enumerate(output.requests):
            if request.rid == self.spoiled:
                logits[row] = torch.nan
        return StepOutput(output.requests, logits)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_random_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def backend(model_dir: str) -> Breakable:
    return Breakable(model_dir)


@pytest.fixture
def finished() -> queue.Queue[Request]:
    return queue.Queue()


@pytest.fixture
def core(backend: Breakable, finished: queue.Queue[Request]) -> Iterator[EngineCore]:
    def notify(requests: list[Request]) -> None:
        for request in requests:
            finished.put(request)

    engine_core = EngineCore(backend, notify=notify)
    engine_core.start()
    yield engine_core
    if backend.gate is not None:
        backend.gate.set()
    engine_core.stop()


def request(rid: str = "r", count: int = 20, max_new_tokens: int = 4) -> Request:
    return Request(rid, random_ids(count, 1), SamplingParams(max_new_tokens=max_new_tokens))


def test_a_failure_of_the_model_gives_every_request_an_error(
    core: EngineCore, backend: Breakable, finished: queue.Queue[Request]
) -> None:
    core.call(lambda: core.pause("in_place")).result(10)
    core.submit([request(str(i)) for i in range(5)])
    backend.broken = True
    core.call(core.resume).result(10)
    failed = [finished.get(timeout=10) for _ in range(5)]
    assert {r.rid for r in failed} == set("01234")
    assert all("MemoryError: no memory left" in str(r.error) for r in failed)
    with pytest.raises(EngineDead, match="MemoryError"):
        core.submit([request()])
    with pytest.raises(EngineDead, match="MemoryError"):
        core.call(core.resume)


def test_stopping_gives_every_request_an_error(core: EngineCore, finished: queue.Queue[Request]) -> None:
    core.submit([request("long", max_new_tokens=2000)])
    core.stop()
    assert finished.get(timeout=10).error == "the engine is stopping"


def test_logits_that_are_not_finite_end_that_request_alone(
    core: EngineCore, backend: Breakable, finished: queue.Queue[Request]
) -> None:
    backend.spoiled = "bad"
    core.submit([request("good"), request("bad"), request("fine")])
    results = {r.rid: r for r in (finished.get(timeout=10) for _ in range(3))}
    assert "not finite" in str(results["bad"].error)
    assert results["good"].num_output == results["fine"].num_output == 4
    assert results["good"].error is results["fine"].error is None


def test_an_error_in_a_call_is_the_callers_and_the_engine_goes_on(
    core: EngineCore, finished: queue.Queue[Request]
) -> None:
    with pytest.raises(ZeroDivisionError):
        core.call(lambda: 1 // 0).result(10)
    core.submit([request()])
    assert finished.get(timeout=10).error is None


async def test_health_fails_when_the_model_thread_is_dead_or_stuck(model_dir: str) -> None:
    backend = Breakable(model_dir)
    core = EngineCore(backend)
    server = EngineServer(core, model_dir=model_dir, info={}, max_step_s=0.2)
    async with TestClient(TestServer(server.app)) as client:
        server.attach(asyncio.get_running_loop())
        core.start()
        assert (await client.get("/health")).status == 200
        backend.gate = threading.Event()
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        core.submit([request()])
        while core.step_started_s is None or time.monotonic() - core.step_started_s < 0.3:
            time.sleep(0.01)
        answer = await client.get("/health")
        assert (answer.status, "a model step has taken" in await answer.text()) == (503, True)
        backend.gate.set()
        assert (await client.post("/generate", json=body)).status == 200
        assert (await client.get("/health")).status == 200
        backend.broken = True
        failed = await client.post("/generate", json=body)
        assert (failed.status, "MemoryError" in await failed.text()) == (500, True)
        for path in ("/health", "/ready"):
            answer = await client.get(path)
            assert (answer.status, "MemoryError" in await answer.text()) == (503, True)
        assert (await client.post("/generate", json=body)).status == 503
        assert (await client.post("/pause_generation", json={})).status == 503
        core.stop()


async def test_an_engine_that_is_full_says_so(model_dir: str) -> None:
    core = EngineCore(Breakable(model_dir))
    server = EngineServer(core, model_dir=model_dir, info={}, max_queued=3)
    async with TestClient(TestServer(server.app)) as client:
        server.attach(asyncio.get_running_loop())
        core.start()
        body = {"input_ids": [[5], [6], [7], [8]], "sampling_params": {"max_new_tokens": 1}}
        assert (await client.post("/generate", json=body)).status == 503
        assert (await client.post("/generate", json={**body, "input_ids": [[5], [6], [7]]})).status == 200
        core.stop()


def test_memory_bounds_what_runs_together_and_keeps_the_order(tmp_path: Path) -> None:
    backend = Qwen3Backend(write_random_qwen3(tmp_path), running_kv_gib=300 * 2048 / 2**30)
    assert backend.context_length == 300
    core = EngineCore(backend)
    order: list[str] = []
    core.notify = lambda requests: order.extend(r.rid for r in requests)
    big = [request(str(i), 150, max_new_tokens=100) for i in range(3)]
    small = request("small", 10, max_new_tokens=10)
    core.waiting.extend([*big, small])
    core.step()
    assert len(core.running) == 1
    run_to_end(core, [])
    assert [rid for rid in order if rid != "small"] == ["0", "1", "2"]
    assert order.index("small") >= 2, "a small request overtook one that waits for memory"


def test_a_waiting_request_can_be_aborted_and_a_retracted_one_goes_first(backend: Breakable) -> None:
    core = EngineCore(backend, max_running=1)
    first, second, third = (request(name, 20 + i, max_new_tokens=30) for i, name in enumerate("abc"))
    core.waiting.extend([first, second, third])
    for _ in range(5):
        core.step()
    core.abort(lambda r: r.rid == "b", "test")
    assert second.finish_reason is not None
    assert second.num_output == 0
    core.pause("retract")
    assert [r.rid for r in core.waiting] == ["a", "c"]
    core.resume()
    run_to_end(core, [])
    assert (first.num_output, third.num_output, first.num_retractions) == (30, 30, 1)
