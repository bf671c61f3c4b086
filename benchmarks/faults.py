"""Break each part of a run on purpose, and tell what came of it: one table.

    python -m benchmarks.faults                            every option of the group `faults`
    python -m benchmarks.faults --only engine_crash disk_full

Every fault gets a run of its own, as a user would start it, and one that fails is resumed without the fault. Rules:
nothing waits longer than a minute after the fault struck, no failure of infrastructure has a reward, no process and no
Ray session is left, the ledger accounts for every sample once, and a resume ends well. Exits with 1 if one is broken.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.resume import start
from benchmarks.tree import descendants, kill_tree, left_of, sessions
from pipelines.ledger import check

ROOT = Path(__file__).parents[1]
RUN = (
    "+experiment=smoke",
    "steps=6",
    "stages.trainer.run.eval_every=0",
    "stages.eval.run.num_samples=2",
    "stages.eval.run.concurrency=4",
)
RUN_TIMEOUT_S = 150.0
MAX_SILENCE_S = 60.0
COLUMNS = ("fault", "strikes", "outcome", "after", "longest silence", "failed samples", "resumed", "message", "broken")
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .* fault: (.*)$", re.MULTILINE)


@dataclass(slots=True)
class Trial:
    """One fault and what came of it. `silence_s` is the longest time in which the run wrote nothing at all."""

    fault: str
    outcome: str = ""
    message: str = ""
    num_strikes: int = 0
    after_s: float = 0.0
    silence_s: float = 0.0
    failures: dict[str, int] = field(default_factory=dict[str, int])
    resumed: str = ""
    problems: list[str] = field(default_factory=list[str])


def main() -> int:
    """Run the trials; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in (ROOT / "conf/faults").glob("*.yaml"))
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAULT")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="miles-faults-"))
    print(f"runs in {folder}", flush=True)
    rows = [
        "| fault | strikes | outcome | after | longest silence | failed samples | resumed | message | rules broken |"
    ]
    rows.append("|" + "---|" * 9)
    bad = 0
    for name in options.only:
        done = trial(folder, name)
        bad += bool(done.problems)
        rows.append(line(done))
        print(rows[-1], flush=True)
    table = "\n".join(rows)
    print(f"\n{table}\n\n{len(options.only)} faults, {bad} with a broken rule")
    if options.out is not None:
        options.out.write_text(table + "\n")
    return 1 if bad else 0


def line(trial: Trial) -> str:
    """A row of the table."""
    failed = ", ".join(f"{name} {count}" for name, count in trial.failures.items()) or "none"
    return (
        f"| {trial.fault} | {trial.num_strikes} | {trial.outcome} | {trial.after_s:.0f} s | {trial.silence_s:.0f} s |"
        f" {failed} | {trial.resumed or '-'} | {trial.message} | {'; '.join(trial.problems) or 'none'} |"
    )


def trial(folder: Path, fault: str, resume: bool = True) -> Trial:
    """Run with one fault, then look at what is left, at the ledger, and at a resume if it failed and `resume`."""
    done, run_dir = Trial(fault), folder / fault
    code, ended_s = watched(run_dir, [*RUN, f"faults={fault}"], done)
    log = (run_dir / "log.txt").read_text() if (run_dir / "log.txt").exists() else ""
    strikes = [datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp() for stamp, _ in STAMP.findall(log)]
    done.num_strikes = len(strikes)
    done.after_s = max(0.0, ended_s - strikes[0]) if strikes else 0.0
    result = json.loads((run_dir / "result.json").read_text()) if (run_dir / "result.json").exists() else {}
    done.outcome = {0: "went on", 1: "failed", None: "hung"}.get(code, f"exit {code}")
    done.message = shortened(str(result.get("error") or ""), folder)
    if code == 1 and not result.get("error"):
        done.problems.append("failed without a message")
    if code == 1 and done.after_s > MAX_SILENCE_S and len(strikes) == 1:
        done.problems.append(f"ended only {done.after_s:.0f} s after the fault")
    if done.silence_s > MAX_SILENCE_S:
        done.problems.append(f"nothing was heard for {done.silence_s:.0f} s")
    if not strikes and fault != "none":
        done.problems.append("the fault did not strike")
    if (run_dir / "ledger.sqlite").exists():
        done.problems += scored_failures(run_dir)
        done.failures = failures(run_dir)
    if code == 0:
        done.problems += check(run_dir / "ledger.sqlite")
    elif code is not None and resume:
        again = Trial(fault)
        resumed = folder / f"{fault}-resumed"
        code, _ = watched(resumed, [f"resume={run_dir}"], again)
        done.resumed = "ended well" if code == 0 else f"exit {code}"
        done.problems += again.problems
        done.problems += check(resumed / "ledger.sqlite") if code == 0 else [f"the resume failed; see {resumed}"]
    return done


def watched(run_dir: Path, overrides: Sequence[str], done: Trial) -> tuple[int | None, float]:
    """Run to the end. Returns the exit code, None if it had to be killed, and the time of day of its end."""
    program = start(run_dir, overrides)
    processes: set[int] = set()
    started = changed = time.monotonic()
    sizes: dict[Path, int] = {}
    while (code := program.poll()) is None and time.monotonic() - started < RUN_TIMEOUT_S:
        processes |= descendants(program.pid)
        files = [*run_dir.glob("*"), *run_dir.glob("*/*")]
        now = {path: path.stat().st_size for path in files if path.exists()}
        if now != sizes:
            sizes, changed = now, time.monotonic()
        done.silence_s = max(done.silence_s, time.monotonic() - changed)
        time.sleep(0.2)
    ended_s = time.time()
    if code is None:
        done.problems.append(f"did not end within {RUN_TIMEOUT_S:g} s")
        kill_tree(program.pid)
    else:
        done.problems += left_of(processes) + sessions(program.pid)
    try:
        program.wait(10)
    except subprocess.TimeoutExpired:
        done.problems.append("the driver survived SIGKILL")
    return code, ended_s


def failures(run_dir: Path) -> dict[str, int]:
    """Samples that infrastructure failed, by outcome."""
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        query = "SELECT outcome, COUNT(*) FROM samples WHERE state = 'failed' GROUP BY outcome"
        return dict(ledger.execute(query).fetchall())


def scored_failures(run_dir: Path) -> list[str]:
    """Failures of infrastructure that have a reward: in the ledger, and in the episodes."""
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        query = "SELECT sample_id FROM samples WHERE state = 'failed' AND reward IS NOT NULL"
        found = [f"{sample_id} failed and has a reward" for (sample_id,) in ledger.execute(query)]
    for path in (run_dir / "episodes").glob("*.parquet"):
        for row in pq.read_table(path, columns=["sample_id", "outcome", "reward"]).to_pylist():
            if row["outcome"] != "scored" and row["reward"] is not None:
                found.append(f"episode {row['sample_id']} is {row['outcome']} and has a reward")
    return found


def shortened(message: str, folder: Path) -> str:
    """A message that fits a cell."""
    text = " ".join(message.replace(f"{folder}/", "").replace("|", "/").split())
    return text if len(text) <= 300 else text[:297] + "..."


if __name__ == "__main__":
    sys.exit(main())
