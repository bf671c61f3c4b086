"""What the asynchronous core costs, and what it gains: the real scheduler, collector and ledger against stubs.

    python -m benchmarks.core                 both tables, about 6 minutes
    python -m benchmarks.core --only cost     in real time, at 128 to 8,192 samples in flight
    python -m benchmarks.core --only gain     in virtual time, on the latencies of `conf/simulation/heavy_tail.yaml`

Cost: episodes of 30 turns with long tails run once in virtual time, where code is infinitely fast, and once in real
time. The ratio of the two is the share of the ideal throughput that is reached. Each runs in a process of its own; CPU
time is of that process, memory is what it grew by.

Gain: asynchronous against synchronous training, admission of samples against groups, and what protecting slow tasks
costs, on the same drawn episodes. The bound of a step is the longer of rollouts alone and of training alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra.utils import instantiate

from miles_rl.simulator.distribution import Distribution
from miles_rl.simulator.episode import EpisodeModel
from miles_rl.simulator.replica import ReplicaModel
from miles_rl.simulator.result import Result
from miles_rl.simulator.simulation import Schedule, Simulation
from miles_rl.simulator.trainer import TrainerModel

ROOT = Path(__file__).parents[1]
SIZES = (128, 1024, 2048, 4096, 8192)
GROUP_SIZE = 8
TURNS = 30
STEPS = 8
RUN_TIMEOUT_S = 300


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cost", "gain"))
    parser.add_argument("--one", nargs=2, metavar=("IN_FLIGHT", "TIME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.one is not None:
        print(json.dumps(measure(int(options.one[0]), options.one[1])))
        return 0
    if options.only in (None, "cost"):
        print_cost()
    if options.only in (None, "gain"):
        print_gain()
    return 0


def print_cost() -> None:
    """The table of real time."""
    print("| in flight | turns/s | of ideal | CPU per turn | CPU of one core | memory per sample |")
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        ideal, real = of_process(size, "virtual"), of_process(size, "real")
        print(
            f"| {size} | {real['num_turns'] / real['wall_s']:.0f} | {ideal['wall_s'] / real['wall_s']:.1%} |"
            f" {real['cpu_s'] / real['num_turns'] * 1e6:.0f} us | {real['cpu_s'] / real['wall_s']:.0%} |"
            f" {real['grown_kib'] / size:.0f} KiB |",
            flush=True,
        )


def of_process(size: int, kind: str) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.core", "--one", str(size), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=True)
    return json.loads(done.stdout)


def measure(size: int, kind: str) -> dict[str, Any]:
    """Run `size` samples in flight; figures of the run and of this process."""
    simulation = Simulation(
        episode=EpisodeModel(
            turns=Distribution(median=TURNS),
            prompt_tokens=Distribution(median=300),
            reply_tokens=Distribution(median=20, sigma=0.6, tail_share=0.02, tail_from=80, tail_alpha=2.0, most=400),
            observation_tokens=Distribution(median=20),
            sandbox_s=Distribution(median=0.3, sigma=0.3),
            command_s=Distribution(median=0.1, sigma=0.8, tail_share=0.01, tail_from=1.0, tail_alpha=2.0, most=5.0),
            verify_s=Distribution(median=0.2, sigma=0.3),
            task_factor=Distribution(median=1.0),
            max_turns=TURNS,
            turn_tokens=1000,
            session_tokens=100_000,
            wall_clock_s=600.0,
        ),
        replica=ReplicaModel(
            token_s=0.02, token_s_per_request=0.0, prefill_tokens_per_s=1e9, max_running=10**6, cache_tokens=10**9
        ),
        trainer=TrainerModel(train_s=Distribution(median=0.01), publish_s=Distribution(median=0.01)),
        time="real" if kind == "real" else "virtual",
        bound_episodes=0,
    )
    schedule = Schedule(
        num_groups=size // 4 // GROUP_SIZE,
        group_size=GROUP_SIZE,
        concurrency=size,
        max_staleness=16,
        num_tasks=1000,
        steps=STEPS,
        max_failures_per_task=1000,
    )
    gc.collect()
    before_kib, cpu_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    result = simulation.run(schedule)
    if result.error:
        sys.exit(result.error)
    return {
        "wall_s": result.wall_s,
        "num_turns": result.num_turns,
        "cpu_s": time.process_time() - cpu_s,
        "grown_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib,
    }


def print_gain() -> None:
    """The table of virtual time."""
    simulation: Simulation = instantiate(yaml.safe_load((ROOT / "conf/simulation/heavy_tail.yaml").read_text()))
    base = Schedule(
        num_groups=8,
        group_size=8,
        concurrency=128,
        max_staleness=8,
        num_tasks=69,
        steps=simulation.steps or 60,
        num_replicas=8,
        max_failures_in_a_row=300,
    )
    variants = {
        "sync, samples": replace(base, max_staleness=0, protect_after=None),
        "async, staleness 1": replace(base, max_staleness=1),
        "async, staleness 3": replace(base, max_staleness=3),
        "async, staleness 8": base,
        "async, staleness 8, groups": replace(base, admission="group"),
        "async, staleness 8, slow tasks not protected": replace(base, protect_after=None),
        "async, staleness 3, slow tasks not protected": replace(base, max_staleness=3, protect_after=None),
    }
    print("\n| schedule | step | to sync | of bound | trainer waits | places in use | too old | starving | cut |")
    print("|---|---|---|---|---|---|---|---|---|")
    sync_s: float | None = None
    for name, schedule in variants.items():
        result = simulation.run(schedule)
        sync_s = sync_s or result.step_s
        print(row(name, result, sync_s), flush=True)
        if result.error:
            print(result.error)


def row(name: str, result: Result, sync_s: float) -> str:
    """One schedule. `too old` is the share of tokens dropped for it, `cut` the tokens after a truncation."""
    return (
        f"| {name} | {result.step_s / 60:.1f} min | {sync_s / result.step_s:.2f} | {result.of_bound:.0%} |"
        f" {result.trainer_idle_ratio:.0%} | {result.places_used_ratio:.0%} | {result.wasted_tokens_ratio:.1%} |"
        f" {len(result.starving_tasks)} | {result.tokens_after_truncation} |"
    )


if __name__ == "__main__":
    sys.exit(main())
