import json
import subprocess
from pathlib import Path

import pytest
import yaml
from small_run import small_config, small_plan

from pipelines import result
from pipelines.result import commit, config_hash, write_atomic, write_config, write_result
from pipelines.supervise import Ending


def test_a_result_holds_what_a_comparison_needs(tmp_path: Path):
    ending = Ending(
        "success",
        metrics={"eval/solve_rate_after": 0.5, "broken": float("nan"), "pair": (1, float("inf"))},
        facts={
            "task_set_hash": {"train": "a", "eval": "b"},
            "engine": "x",
            "resumed_from": {"path": "runs/a/checkpoints/step-000004", "version": 4},
        },
        figures={"worker": {"step": 3}, "source": {"step": 99}},
    )
    write_result(tmp_path, small_plan(tmp_path), ending, 1.23456, ["seed=0"])
    told = json.loads((tmp_path / "result.json").read_text())
    assert (told["status"], told["error"], told["name"], told["seed"]) == ("success", None, "small", 0)
    assert (told["steps"], told["wall_s"], told["overrides"]) == (3, 1.235, ["seed=0"])
    assert told["task_set_hash"] == {"train": "a", "eval": "b"}
    assert told["facts"] == {"engine": "x"}
    assert told["resumed_from"] == {"path": "runs/a/checkpoints/step-000004", "version": 4}
    assert told["metrics"] == {"eval/solve_rate_after": 0.5, "broken": None, "pair": [1, None]}
    assert len(told["config_hash"]) == 64


def test_a_failed_run_has_a_result_too(tmp_path: Path):
    write_result(tmp_path, small_plan(tmp_path), Ending("failed", "stage 'x' died: y"), 1.0, [])
    told = json.loads((tmp_path / "result.json").read_text())
    assert (told["status"], told["error"], told["steps"], told["metrics"]) == ("failed", "stage 'x' died: y", 0, {})


def test_the_config_hash_forgets_where_a_run_writes_and_nothing_else(tmp_path: Path):
    here, there = small_config(tmp_path / "a"), small_config(tmp_path / "b")
    assert config_hash(here) == config_hash(there)
    there["stages"]["worker"]["run"]["steps"] = 4
    assert config_hash(here) != config_hash(there)


def test_the_written_config_is_the_config(tmp_path: Path):
    config = small_config(tmp_path)
    write_config(tmp_path, config)
    assert yaml.safe_load((tmp_path / "resolved.yaml").read_text()) == config


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "result.json"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(result.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_the_commit_is_the_checkout_s_and_says_when_files_differ_from_it():
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    if head.returncode != 0:
        assert commit() is None
    else:
        assert commit() in (head.stdout.strip(), head.stdout.strip() + "-dirty")
