"""The command `python -m pipelines.simulate` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def simulate(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.simulate", *words]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_it_says_how_the_run_would_go_and_leaves_nothing(tmp_path: Path) -> None:
    done = simulate("simulation.steps=6", "--json", "figures.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["steps"] == 6
    assert f"{figures['samples_per_s']:.3g} samples/s" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_a_deadline_that_the_real_run_would_not_meet_is_named(tmp_path: Path) -> None:
    slow = ("simulation=heavy_tail", "simulation.steps=2", "simulation.bound_episodes=0")
    done = simulate(*slow, "rollout.batch_timeout_s=301", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "would have failed     rollout.batch_timeout_s: 301; the longest wait for a batch was " in done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("simulation=heavy",), "simulation: heavy; no such option; have heavy_tail, laptop"),
        (("rollout.concurency=3",), "rollout.concurency: 3; no such key; did you mean 'concurrency'?"),
        (("rollout.max_staleness=0",), "rollout.max_staleness: 0; "),
        (("simulation.episode.max_turns=0",), "simulation: max_turns: 0; give more than 0"),
        (("simulation.episode.maxturns=3",), "simulation.episode.maxturns: 3; "),
        (("simulation.time=fast",), "simulation.time: fast; "),
        (("--json",), "--json: missing; name a file"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_path(words: tuple[str, ...], line: str, tmp_path: Path) -> None:
    done = simulate(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith(line)
    assert done.stdout == ""
