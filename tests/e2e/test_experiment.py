"""The real graph from the command line: a run, what it leaves behind, and going on from it."""

import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def python(arguments: str, cwd: Path, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *shlex.split(arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished smoke run, below `runs/` of a folder of its own."""
    cwd = tmp_path_factory.mktemp("user")
    done = python("-m pipelines.run +experiment=smoke run_dir=runs/smoke/first", cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.strip().splitlines()[-3:]) == 3
    return cwd / "runs/smoke/first"


def test_a_run_leaves_its_result_metrics_episodes_ledger_and_report(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert result["status"] == "success"
    assert {"name", "seed", "choices", "commit", "config_hash", "steps", "wall_s"} <= set(result)
    assert set(result["task_set_hash"]) == {"train", "eval"}
    for name in ("before", "after"):
        low, high = result["metrics"][f"eval/solve_rate_{name}_ci95"]
        assert 0 <= low <= result["metrics"][f"eval/solve_rate_{name}"] <= high <= 1
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2]
    assert (finished / "report.html").stat().st_size > 10_000
    episodes = f"'{finished}/episodes/*.parquet'"
    bad = (
        duckdb.connect()
        .execute(
            f"select count(*) from {episodes} where len(token_ids) != len(loss_mask) or len(token_ids) != len(logprobs)"
            " or len(token_ids) != len(versions) or (reward is null) = (outcome = 'scored')"
        )
        .fetchall()
    )
    assert bad == [(0,)]
    states = dict(
        sqlite3.connect(finished / "ledger.sqlite").execute("select state, count(*) from samples group by state")
    )
    assert states["trained"] == 2 * 4
    assert set(states) <= {"trained", "discarded", "failed"}


def test_a_run_goes_on_from_its_checkpoint_and_only_with_the_same_tasks(finished: Path) -> None:
    cwd = finished.parents[2]
    options = f"-m pipelines.run +experiment=smoke resume={finished} steps=3"
    done = python(f"{options} run_dir=runs/smoke/resumed", cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (cwd / "runs/smoke/resumed/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [3]
    other = python(f"{options} dataset=train8 run_dir=runs/smoke/other", cwd)
    assert other.returncode == 1
    assert "was trained on other tasks" in json.loads((cwd / "runs/smoke/other/result.json").read_text())["error"]


def readme_commands() -> list[str]:
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE))
    return [line.split(" #")[0].strip() for line in blocks.splitlines() if line.startswith("python -m ")]


def test_the_readme_names_commands() -> None:
    assert len(readme_commands()) >= 8


@pytest.mark.parametrize("command", readme_commands())
def test_every_command_of_the_readme_works(command: str, finished: Path) -> None:
    """As written, but for the run that is named; those that would train for minutes are planned."""
    command = command.removeprefix("python ").replace("runs/NAME/STAMP", str(finished))
    command = command.replace("runs/minibench", str(finished.parent))
    if command.startswith("-m pipelines.run") and not re.search(r" -h| --cfg| plan_only", command):
        command += " plan_only=true"
    done = python(command, finished.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
