"""Kill a run outright at random moments, go on from it, and see that nothing is lost, doubled or different.

    python -m benchmarks.resume                       20 kills of an asynchronous run, 6 of a synchronous one
    python -m benchmarks.resume --kills 2 --sync-kills 1

Every kill sends SIGKILL to the whole process tree. Its moment is drawn: a step from 0 (the first checkpoint is there)
to the last, and up to two seconds more, so that it falls on every part of a run alike. Then the run is resumed to its
end and held against the rules: no process is left of the killed one, and no Ray session once the next run has started;
the ledger accounts for every sample exactly once; and for synchronous runs with a deterministic engine, every metric
that is no time equals that of an undisturbed run, bit for bit. Prints one table; exits with 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tree import kill_tree, left_of, sessions
from pipelines.ledger import check

STEPS = 8
MORE_S = 2.0
LAPTOP = (
    f"steps={STEPS}",
    "rollout.num_groups=4",
    "rollout.group_size=4",
    "stages.eval.run.num_samples=1",
    "stages.trainer.run.checkpoint_every=2",
    "stages.trainer.run.eval_every=0",
)
MODES = {"async": (), "sync": ("rollout=sync", "engine.deterministic=true")}
RUN_TIMEOUT_S = 300.0
TIMED = ("perf/", "time/", "async/")


@dataclass(slots=True)
class Trial:
    """One kill and what came of it."""

    mode: str
    step: int
    more_s: float
    killed_step: int = 0
    resumed_version: int | None = None
    resume_s: float = 0.0
    problems: list[str] = field(default_factory=list[str])


def main() -> int:
    """Run the trials; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of asynchronous runs")
    parser.add_argument("--sync-kills", type=int, default=6, help="of synchronous runs, compared bit for bit")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    moments = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="miles-resume-"))
    print(f"runs in {folder}", flush=True)
    trials: list[Trial] = []
    for mode, count in (("sync", options.sync_kills), ("async", options.kills)):
        if count == 0:
            continue
        undisturbed = folder / f"{mode}-undisturbed"
        measure(undisturbed, mode)
        for number in range(count):
            done = Trial(mode, moments.randrange(STEPS + 1), moments.uniform(0, MORE_S))
            play(done, folder / f"{mode}-{number}", undisturbed)
            trials.append(done)
            print(line(done), flush=True)
    print("\n| mode | killed | had written step | resumed from | to the end in | problems |")
    print("|---|---|---|---|---|---|")
    for done in trials:
        print(line(done))
    bad = sum(bool(done.problems) for done in trials)
    print(f"\n{len(trials)} kills, {len(trials) - bad} without a problem")
    return 1 if bad else 0


def line(trial: Trial) -> str:
    """A row of the table."""
    problems = "; ".join(trial.problems) or "none"
    resumed = "had ended" if trial.resumed_version is None else trial.resumed_version
    return (
        f"| {trial.mode} | step {trial.step} + {trial.more_s:.1f} s | {trial.killed_step} | {resumed} |"
        f" {trial.resume_s:.0f} s | {problems} |"
    )


def measure(run_dir: Path, mode: str) -> None:
    """Make the undisturbed run."""
    program = start(run_dir, [*LAPTOP, *MODES[mode]])
    try:
        if program.wait(RUN_TIMEOUT_S) != 0:
            sys.exit(f"the undisturbed run failed; see {run_dir}/terminal")
    except subprocess.TimeoutExpired:
        kill_tree(program.pid)
        sys.exit(f"the undisturbed run did not end in {RUN_TIMEOUT_S:g} s; see {run_dir}/terminal")
    if problems := check(run_dir / "ledger.sqlite"):
        sys.exit(f"the undisturbed run's ledger: {problems}")


def wait_for_step(program: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    """Until the run has done `step` steps and can be gone on from; one that ends or hangs before ends this program."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while steps(run_dir) < step or not list((run_dir / "checkpoints").glob("step-*")):
        if program.poll() is not None or time.monotonic() > deadline:
            kill_tree(program.pid)
            sys.exit(f"step {step} did not come; see {run_dir}/terminal")
        time.sleep(0.02)


def play(done: Trial, run_dir: Path, undisturbed: Path) -> None:
    """Kill a run at its moment, resume it, and write into `done` what came of it."""
    mode = done.mode
    program = start(run_dir, [*LAPTOP, *MODES[mode]])
    wait_for_step(program, run_dir, done.step)
    time.sleep(done.more_s)
    processes = kill_tree(program.pid)
    program.wait(10)
    killed = program.pid
    done.problems += left_of(processes)
    done.killed_step = steps(run_dir)
    if (run_dir / "result.json").exists():  # the moment came after the end
        done.problems += verdict(run_dir, mode, undisturbed)
        return
    resumed = run_dir.with_name(f"{run_dir.name}-resumed")
    started = time.monotonic()
    program = start(resumed, [f"resume={run_dir}"])
    try:
        code = program.wait(RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        kill_tree(program.pid)
        code = None
    done.resume_s = time.monotonic() - started
    if code != 0:
        done.problems.append(f"the resumed run ended with {code}; see {resumed}/terminal")
        return
    result = json.loads((resumed / "result.json").read_text())
    done.resumed_version = result["resumed_from"]["version"]
    done.problems += verdict(resumed, mode, undisturbed) + sessions(killed) + sessions(program.pid)


def verdict(run_dir: Path, mode: str, undisturbed: Path) -> list[str]:
    """What is wrong with a run that came to its end."""
    problems = check(run_dir / "ledger.sqlite")
    return problems + (differences(metrics_of(undisturbed), metrics_of(run_dir)) if mode == "sync" else [])


def metrics_of(run_dir: Path) -> dict[str, Any]:
    """What a finished run measured, without times and what depends on them."""
    metrics: dict[str, Any] = json.loads((run_dir / "result.json").read_text())["metrics"]
    return {k: v for k, v in metrics.items() if not k.startswith(TIMED) and not is_timing(k)}


def is_timing(name: str) -> bool:
    """Whether a metric of the rollouts is a time, or follows from when something was asked."""
    return "_s_" in name or name in ("rollout/episode_overhead_ratio", "rollout/prefix_cache_hit_rate")


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """One line for each metric that is not the same."""
    names = sorted(expected.keys() | actual.keys())
    return [
        f"{name}: {expected.get(name)!r} undisturbed, {actual.get(name)!r} resumed"
        for name in names
        if expected.get(name) != actual.get(name)
    ]


def steps(run_dir: Path) -> int:
    """Steps done, by the metrics that the run wrote."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"train/loss"') if path.exists() else 0


def start(run_dir: Path, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    """A run as a user would start it, its output in `terminal`."""
    run_dir.mkdir()
    command = [sys.executable, "-m", "pipelines.run", *overrides, f"run_dir={run_dir}"]
    with open(run_dir / "terminal", "wb") as terminal:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        return subprocess.Popen(command, stdout=terminal, stderr=terminal, env=env, start_new_session=True)


if __name__ == "__main__":
    sys.exit(main())
