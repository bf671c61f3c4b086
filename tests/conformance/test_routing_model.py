"""The simulator's model of the router against the real one, before stub engines."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.router import replicas, routed
from miles_rl.engine.client import EngineClient
from miles_rl.simulator.routing import Manual, RoundRobin, make_routing

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELD = {"max_new_tokens": 100_000}
SHORT_TOKENS = 1


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engines() -> AsyncIterator[list[str]]:
    async with replicas() as urls:
        yield urls


async def counts(urls: list[str]) -> list[int]:
    found = []
    for url in urls:
        async with EngineClient(url) as client:
            found.append((await client.loads())[0]["num_running_reqs"])
    return found


async def settled(urls: list[str], total: int) -> list[int]:
    async with asyncio.timeout(10):
        while sum(loads := await counts(urls)) != total:
            await asyncio.sleep(0.01)
    return loads


async def test_manual_takes_a_least_loaded_replica_for_a_new_session_and_stays_there(engines: list[str]) -> None:
    """Requests are held open one after another, so that both see the same loads."""
    draw, model = random.Random(0), Manual()
    held: list[asyncio.Task[object]] = []
    at: dict[str, int] = {}
    async with routed("manual", engines) as url, EngineClient(url, timeout_s=60) as client:
        for number in range(40):
            session = f"s{draw.randrange(24)}"
            before = await settled(engines, len(held))
            held.append(asyncio.create_task(client.generate([1, 2, 3], HELD, rid=f"r{number}", routing_key=session)))
            after = await settled(engines, len(held))
            (real,) = [index for index in range(len(engines)) if after[index] > before[index]]
            if session in at:
                assert real == at[session] == model.route(session, before)
            else:
                assert before[real] == min(before)
                assert before[model.route(session, before)] == min(before)
                model._at[session] = at[session] = real  # among equals the real one draws
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await settled(engines, 0)


async def test_callers_that_leave_do_not_count_as_load_any_more(engines: list[str]) -> None:
    """A count that only grew would keep new sessions away from a replica for ever."""
    async with routed("manual", engines) as url, EngineClient(url, timeout_s=60) as client:

        async def hold(number: int, session: str) -> asyncio.Task[object]:
            held = asyncio.create_task(client.generate([1, 2, 3], HELD, rid=f"r{number}", routing_key=session))
            await settled(engines, number + 1)
            return held

        left = [await hold(number, "one") for number in range(8)]
        assert sorted(await counts(engines)) == [0, 0, 0, 8]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await settled(engines, 0)
        staying = [await hold(number, f"new{number}") for number in range(8)]
        assert await counts(engines) == [2, 2, 2, 2]
        for task in staying:
            task.cancel()
        await asyncio.gather(*staying, return_exceptions=True)
        await settled(engines, 0)


async def test_round_robin_takes_the_replicas_in_turn(engines: list[str]) -> None:
    model = RoundRobin()
    assert [model.route("s", [0, 0, 0]) for _ in range(5)] == [0, 1, 2, 0, 1]

    async def served() -> list[int]:
        found = []
        for replica in engines:
            async with EngineClient(replica) as client:
                found.append((await client.server_info())["internal_states"][0]["num_generated_tokens"])
        return found

    before = await served()
    async with routed("round_robin", engines) as url, EngineClient(url, timeout_s=60) as client:
        for number in range(8):
            await client.generate([1, 2, 3], {"max_new_tokens": SHORT_TOKENS}, rid=f"t{number}", routing_key="s")
    after = await served()
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2, 2, 2]


async def test_a_policy_that_is_not_modelled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"router\.policy: cache_aware; the simulator models manual, round_robin"):
        make_routing("cache_aware")
