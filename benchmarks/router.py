"""How well router policies keep sessions on the replica that knows them, and replicas equally busy.

    python -m benchmarks.router

The real sglang-router before 4 stub engines (real HTTP, real prefix cache, no model), fresh for each policy. 128
sessions at once, 512 in all, of 10 to 30 turns; every prompt begins with all that the session had before, the first
one with a system prompt that all share. Exits with 1 if our policy misses its targets.
"""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from miles_rl.engine.client import EngineClient
from miles_rl.engine.process import ChildProcess
from miles_rl.router.sglang import SglangRouter

NUM_REPLICAS = 4
AT_ONCE = 128
NUM_SESSIONS = 512
TURNS = (10, 30)
SYSTEM_TOKENS, TASK_TOKENS = 200, (100, 400)
REPLY_TOKENS, OBSERVATION_TOKENS = (8, 24), (4, 24)
COMMAND_S = (0.02, 0.2)
CACHE_TOKENS = 120_000
VOCAB = 1000
POLICIES = ("manual", "round_robin", "cache_aware")
MIN_HIT_RATE, MAX_SPREAD = 0.95, 1.25
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Seen:
    """What came of one policy. `spreads` are the busiest replica's requests over the mean, sampled."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    turns_s: list[float] = field(default_factory=list[float])
    spreads: list[float] = field(default_factory=list[float])
    wall_s: float = 0.0
    served: list[int] = field(default_factory=list[int])

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from a prefix cache."""
        return self.cached_tokens / self.prompt_tokens


def main() -> int:
    """Print the table; returns the exit code."""
    found: dict[str, Seen] = {}
    print("| policy | prefix-cache hit rate | requests, busiest/mean | tokens, most/mean | mean turn | turns/s |")
    print("|---|---|---|---|---|---|")
    for policy in POLICIES:
        seen = found[policy] = asyncio.run(measure(policy))
        served = max(seen.served) / statistics.mean(seen.served)
        print(
            f"| {policy} | {seen.hit_rate:.3f} | {statistics.mean(seen.spreads):.2f} | {served:.2f} |"
            f" {statistics.mean(seen.turns_s) * 1000:.0f} ms | {len(seen.turns_s) / seen.wall_s:.0f} |",
            flush=True,
        )
    ours = found["manual"]
    missed = ours.hit_rate < MIN_HIT_RATE or statistics.mean(ours.spreads) > MAX_SPREAD
    print(f"\nmanual: hit rate at least {MIN_HIT_RATE}, spread at most {MAX_SPREAD}: {'missed' if missed else 'met'}")
    return int(missed)


async def measure(policy: str) -> Seen:
    """All sessions through the router under `policy`."""
    seen = Seen()
    sessions = iter(range(NUM_SESSIONS))
    async with (
        replicas() as urls,
        routed(policy, urls) as url,
        EngineClient(url, timeout_s=TIMEOUT_S) as client,
        AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(EngineClient(replica)) for replica in urls]

        async def place() -> None:
            for number in sessions:
                await play(client, number, seen)

        started = time.monotonic()
        sampling = asyncio.create_task(sample(clients, seen))
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(place() for _ in range(AT_ONCE)))
        seen.wall_s = time.monotonic() - started
        sampling.cancel()
        infos = [await replica.server_info() for replica in clients]
        seen.served = [info["internal_states"][0]["num_generated_tokens"] for info in infos]
    return seen


async def play(client: EngineClient, number: int, seen: Seen) -> None:
    """One session: turn by turn, each prompt everything before it."""
    draw = random.Random(number)
    ids = [token % VOCAB for token in range(SYSTEM_TOKENS)]
    ids += [draw.randrange(VOCAB) for _ in range(draw.randint(*TASK_TOKENS))]
    for turn in range(draw.randint(*TURNS)):
        sampling = {"max_new_tokens": draw.randint(*REPLY_TOKENS)}
        reply = await client.generate(ids, sampling, rid=f"s{number}/{turn}", routing_key=f"s{number}")
        seen.prompt_tokens += reply.prompt_tokens
        seen.cached_tokens += reply.cached_tokens
        seen.turns_s.append(reply.latency_s)
        ids += reply.output_ids + [draw.randrange(VOCAB) for _ in range(draw.randint(*OBSERVATION_TOKENS))]
        await asyncio.sleep(draw.uniform(*COMMAND_S))


async def sample(clients: list[EngineClient], seen: Seen) -> None:
    """Look at the replicas again and again while all places are taken."""
    while True:
        await asyncio.sleep(0.25)
        loads = [(await client.loads())[0]["num_running_reqs"] for client in clients]
        if sum(loads) >= AT_ONCE // 4:
            seen.spreads.append(max(loads) / statistics.mean(loads))


@asynccontextmanager
async def replicas() -> AsyncIterator[list[str]]:
    """Addresses of fresh stub engines."""
    processes: list[ChildProcess] = []
    with tempfile.TemporaryDirectory(prefix="miles-router-") as folder:
        try:
            urls: list[str] = []
            for index in range(NUM_REPLICAS):
                with socket.socket() as bound:
                    bound.bind(("127.0.0.1", 0))
                    arguments = [f"--fd={bound.fileno()}", f"--cache-tokens={CACHE_TOKENS}"]
                    urls.append(f"http://127.0.0.1:{bound.getsockname()[1]}")
                    log = Path(folder) / f"stub_{index}.log"
                    module = "miles_rl.simulator.stub_engine"
                    processes.append(ChildProcess(module, arguments, log_path=log, pass_fds=[bound.fileno()]))
            for url, process in zip(urls, processes, strict=True):
                async with EngineClient(url, timeout_s=5.0) as client:
                    await process.wait_ready(client.is_healthy, 30.0, "stub engine")
            yield urls
        finally:
            for process in processes:
                await process.stop()


@asynccontextmanager
async def routed(policy: str, urls: list[str]) -> AsyncIterator[str]:
    """Address of the real router before `urls`."""
    router = SglangRouter(policy=policy)
    with tempfile.TemporaryDirectory(prefix="miles-router-") as folder:
        try:
            yield await router.start(urls, folder)
        finally:
            await router.stop()


if __name__ == "__main__":
    sys.exit(main())
