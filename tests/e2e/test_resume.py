"""A run whose whole process tree is killed goes on as if nothing had been: same figures, every sample once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from program import alive, wait_for

from benchmarks.resume import differences, metrics_of, start, steps
from benchmarks.tree import kill_tree, sessions
from pipelines.ledger import check

SYNC = ["+experiment=smoke", "steps=5", "rollout=sync", "engine.deterministic=true", "stages.trainer.run.eval_every=0"]


def finish(program: "subprocess.Popen[bytes]", run_dir: Path) -> dict[str, Any]:
    assert program.wait(100) == 0, (run_dir / "terminal").read_text()
    assert check(run_dir / "ledger.sqlite") == []
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.timeout(300)
def test_a_killed_synchronous_run_ends_with_the_figures_of_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed, killed, resumed = (tmp_path / name for name in ("undisturbed", "killed", "resumed"))
    finish(start(undisturbed, SYNC), undisturbed)

    program = start(killed, SYNC)
    wait_for(lambda: steps(killed) >= 2 or program.poll() is not None, "the second step")
    processes = kill_tree(program.pid)
    program.wait(10)
    wait_for(lambda: not alive(processes), "the end of all its processes")
    assert steps(killed) < 5

    result = finish(start(resumed, [f"resume={killed}"]), resumed)
    assert differences(metrics_of(undisturbed), metrics_of(resumed)) == []
    assert 1 <= result["resumed_from"]["version"] < 5
    lines = [json.loads(text) for text in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in lines if "train/loss" in entry] == [1, 2, 3, 4, 5], "the curve is whole"
    assert sessions(program.pid) == [], "the next run removed what the killed one could not"
    command = [sys.executable, "-m", "pipelines.ledger", str(resumed)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ))
    assert "every sample is in a final state" in shown.stdout
