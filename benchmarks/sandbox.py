"""What a local sandbox costs: create, exec and close, and the CPU time of one whole episode.

    python -m benchmarks.sandbox [--episodes 64] [--concurrency 16]

An episode is what training does: create, two commands, upload the tests, run them, download the reward, close. Every
figure stands next to a plain fork and exec of bash, measured in the same run on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sandbox_env.archive import pack
from sandbox_env.providers.local import LocalProvider
from sandbox_env.task import Task, load_task

T = TypeVar("T")
DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY notes.txt ./\n"
TEST = "mkdir -p /logs/verifier\n[ -f /app/sorted.txt ] && echo 1 > /logs/verifier/reward.txt\n"
REWARD = "/logs/verifier/reward.txt"


@dataclass(slots=True)
class Timings:
    """Wall times in ms."""

    create: list[float] = field(default_factory=list[float])
    exec: list[float] = field(default_factory=list[float])
    upload: list[float] = field(default_factory=list[float])
    download: list[float] = field(default_factory=list[float])
    close: list[float] = field(default_factory=list[float])


def cpu_s() -> float:
    """CPU time of this process and of every process that it has waited for."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def write_task(folder: Path) -> Task:
    """A task with one file, whose solution is to sort it."""
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n',
        "instruction.md": "Sort notes.txt into sorted.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/notes.txt": "b\na\n",
        "tests/test.sh": TEST,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_task(folder)


async def timed(timings: list[float], work: Awaitable[T]) -> T:
    """Wait for `work` and note how long that took."""
    started = time.perf_counter()
    result = await work
    timings.append((time.perf_counter() - started) * 1000)
    return result


async def episode(provider: LocalProvider, task: Task, timings: Timings) -> None:
    """One sandbox from start to reward."""
    box = await timed(timings.create, provider.create(task))
    await timed(timings.exec, box.exec("cat notes.txt", timeout_s=30))
    await timed(timings.exec, box.exec("sort notes.txt > sorted.txt", timeout_s=30))
    await timed(timings.upload, box.upload(pack(task.path / "tests"), "/tests"))
    await timed(timings.exec, box.exec("bash /tests/test.sh", timeout_s=30))
    reward = await timed(timings.download, box.download(REWARD, max_bytes=100))
    if reward != b"1\n":
        raise SystemExit(f"the episode ended with reward {reward!r}")
    await timed(timings.close, box.close())


async def run(task: Task, episodes: int, concurrency: int, timings: Timings) -> tuple[float, float]:
    """CPU and wall time in ms of starting a provider, playing `episodes`, and stopping it."""
    cpu, started = cpu_s(), time.perf_counter()
    provider = LocalProvider()
    await provider.start(f"benchmark-{os.getpid()}")
    slots = asyncio.Semaphore(concurrency)

    async def one() -> None:
        async with slots:
            await episode(provider, task, timings)

    await asyncio.gather(*(one() for _ in range(episodes)))
    await provider.stop()
    return (cpu_s() - cpu) * 1000, (time.perf_counter() - started) * 1000


def plain_bash(count: int) -> tuple[list[float], float]:
    """Wall times, and CPU time of one, of bash as an ordinary child process, in ms."""
    walls: list[float] = []
    cpu = cpu_s()
    for _ in range(count):
        started = time.perf_counter()
        os.waitpid(os.posix_spawn("/bin/bash", ["bash", "-c", "cat /dev/null"], os.environ), 0)
        walls.append((time.perf_counter() - started) * 1000)
    return walls, (cpu_s() - cpu) * 1000 / count


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(name: str, values: list[float], unit: float) -> None:
    """One line: median and 90 % in ms, and the median as a multiple of `unit`."""
    middle = statistics.median(values)
    print(f"{name:<22}{middle:8.2f} ms p50 {quantile(values, 0.9):8.2f} ms p90 {middle / unit:8.2f} x bash")


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    walls, bash_cpu = plain_bash(100)
    bash_wall = statistics.median(walls)
    report("fork+exec bash", walls, bash_wall)
    with tempfile.TemporaryDirectory() as folder:
        task = write_task(Path(folder))
        fixed_cpu, fixed_wall = await run(task, 0, 1, Timings())
        for concurrency in (1, options.concurrency):
            timings = Timings()
            cpu, wall = await run(task, options.episodes, concurrency, timings)
            print(f"\n{options.episodes} episodes, {concurrency} at once")
            for name in ("create", "exec", "upload", "download", "close"):
                report(name, getattr(timings, name), bash_wall)
            each = (cpu - fixed_cpu) / options.episodes
            print(f"{'CPU per episode':<22}{each:8.2f} ms {each / bash_cpu:31.2f} x bash ({bash_cpu:.2f} ms CPU)")
            print(f"{'wall per episode':<22}{(wall - fixed_wall) / options.episodes:8.2f} ms")
    print(f"\nstart and stop of the provider: {fixed_wall:.0f} ms, {fixed_cpu:.0f} ms CPU")


if __name__ == "__main__":
    asyncio.run(main())
