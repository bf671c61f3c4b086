"""The real graph from the command line: a run, what it leaves behind, and going on from it."""

import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_its_own_command_line_and_its_curves_are_whole(finished: Path) -> None:
    cwd = finished.parents[2]
    resumed = cwd / "runs/smoke/resumed"
    command = "-m pipelines.run resume=runs/smoke/first steps=3 resume_changed=true run_dir=runs/smoke/resumed"
    done = python(command, cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    first, result = (json.loads((run_dir / "result.json").read_text()) for run_dir in (finished, resumed))
    assert result["resumed_from"] == {"path": str(finished / "checkpoints/step-000002"), "version": 2}
    assert first["resumed_from"] is None
    assert (result["name"], result["steps"], result["choices"]) == ("smoke", 3, first["choices"])
    assert [line["step"] for line in lines_of(resumed) if "train/loss" in line] == [1, 2, 3]
    kept = [line for line in lines_of(finished) if line["step"] <= 2]
    assert lines_of(resumed)[: len(kept)] == kept
    before = "eval/solve_rate_before"
    assert result["metrics"][before] == first["metrics"][before]
    evaluated = duckdb.connect().execute(
        f"select distinct version from '{resumed}/episodes/*.parquet' where kind = 'eval'"
    )
    assert evaluated.fetchall() == [(3,)], "what was evaluated before is not evaluated again"
    assert "steps: 2 -> 3" in (resumed / "plan.txt").read_text()
    assert "steps: 2 -> 3" in (resumed / "log.txt").read_text()
    samples = sqlite3.connect(resumed / "ledger.sqlite").execute(
        "select trained_version, count(*) from samples where state = 'trained' group by 1 order by 1"
    )
    assert samples.fetchall() == [(0, 4), (1, 4), (2, 4)]


def refused(arguments: str, cwd: Path) -> list[str]:
    """The lines that a refusal prints; nothing was started, and no folder is left."""
    done = python(f"-m pipelines.run {arguments} run_dir=runs/smoke/refused", cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert not (cwd / "runs/smoke/refused").exists()
    return done.stderr.splitlines()


def test_a_resume_with_another_config_is_refused_with_a_line_for_each_difference(finished: Path) -> None:
    cwd = finished.parents[2]
    remedy = "; differs from the config of runs/smoke/first; take it back, or give resume_changed=true"
    lines = refused("resume=runs/smoke/first steps=3 rollout.concurrency=3", cwd)
    assert sorted(lines) == [f"rollout.concurrency: 4 -> 3{remedy}", f"steps: 2 -> 3{remedy}"]
    (line,) = refused("resume=runs/smoke/first steps=3 dataset=train8 resume_changed=true", cwd)
    assert line.startswith("resume: runs/smoke/first; it was trained on other tasks (hash ")


def test_a_torn_checkpoint_is_refused_by_name_and_the_older_one_that_is_offered_works(finished: Path) -> None:
    cwd = finished.parents[2]
    torn = cwd / "runs/smoke/torn"
    shutil.copytree(finished, torn)
    os.truncate(torn / "checkpoints/step-000002/model/model.safetensors", 100)
    (line,) = refused("resume=runs/smoke/torn", cwd)
    offered = "resume=runs/smoke/torn/checkpoints/step-000001"
    assert "step-000002 is torn: model/model.safetensors has 100 bytes and should have" in line
    assert line.endswith(f"; an older one is complete: {offered}")
    planned = python(f"-m pipelines.run {offered} plan_only=true run_dir=runs/smoke/planned", cwd)
    assert planned.returncode == 0, planned.stderr


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
    if command.endswith(f"resume={finished}"):
        command += "/checkpoints/step-000001"  # the run is done: its newest has nothing left to do
    if command.startswith("-m pipelines.run") and not re.search(r" -h| --cfg| plan_only", command):
        command += " plan_only=true"
    done = python(command, finished.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
