from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from miles_rl.checkpoint import Checkpoint
from miles_rl.preflight import check
from sandbox_env.suites.minibench.suite import Minibench
from sandbox_env.task import task_set_hash

HEALTHY: dict[str, Any] = {
    "steps": 40,
    "resume": None,
    "dataset": {"train": "train69", "train_size": 69},
    "sandbox": {"size": 48},
    "engine": {"max_context": None},
    "model": {"architecture": {"context_length": 1024}},
    "trainer": {"max_tokens_per_micro_batch": 4096, "optimizer_steps_per_batch": 2},
    "loss": {"advantage": "grpo", "correction": "tis_token", "policy": "ppo_clip", "old_logprobs": "recomputed"},
    "rollout": {
        "mode": "async",
        "max_staleness": 3,
        "num_groups": 8,
        "group_size": 8,
        "concurrency": 32,
        "agent": {"turn_tokens": 96, "session_tokens": 640, "top_p": 1.0, "top_k": -1},
    },
    "stages": {"eval": {"run": {"concurrency": 16}}, "trainer": {"run": {"eval_every": 20}}},
}


def with_value(path: str, value: object) -> dict[str, Any]:
    config = deepcopy(HEALTHY)
    *parents, last = path.split(".")
    node = config
    for key in parents:
        node = node[key]
    node[last] = value
    return config


def test_a_healthy_config_has_no_findings() -> None:
    assert check(HEALTHY) == []


@pytest.mark.parametrize(
    ("path", "value", "level", "at", "words"),
    [
        ("rollout.max_staleness", 0, "error", "rollout.max_staleness", "no batch would ever be admitted"),
        ("rollout.mode", "sync", "error", "rollout.max_staleness", "of the version that consumes them"),
        ("dataset.train_size", 7, "error", "rollout.num_groups", "a batch wants 8 different tasks and train69 has 7"),
        ("sandbox.size", 47, "error", "sandbox.size", "need 48 sandboxes"),
        ("rollout.concurrency", 300, "error", "sandbox.size", "need 316 sandboxes"),
        ("rollout.group_size", 1, "error", "rollout.group_size", "no baseline"),
        ("rollout.agent.turn_tokens", 640, "error", "rollout.agent.turn_tokens", "leaves no room"),
        ("engine.max_context", 512, "error", "rollout.agent.session_tokens", "context"),
        ("trainer.max_tokens_per_micro_batch", 600, "error", "trainer.max_tokens_per_micro_batch", "would not fit"),
        ("rollout.agent.top_p", 0.9, "error", "rollout.agent.top_p", "importance ratio"),
        ("rollout.agent.top_k", 50, "error", "rollout.agent.top_k", "importance ratio"),
        ("trainer.optimizer_steps_per_batch", 1, "inert", "loss.clip_low, loss.clip_high", "the ratio is 1"),
        ("stages.trainer.run.eval_every", 50, "inert", "stages.trainer.run.eval_every", "steps=40"),
        ("loss.correction_low", 0.5, "note", "loss.correction_low", "keeps pushing on them"),
        ("resume", "/nowhere/run", "error", "resume", "is no folder"),
    ],
)
def test_what_cannot_work_is_found_with_its_path(path: str, value: object, level: str, at: str, words: str) -> None:
    findings = [f for f in check(with_value(path, value)) if f["level"] == level]
    assert [f["path"] for f in findings][:1] == [at]
    assert words in findings[0]["message"]
    assert findings[0]["remedy"]


def test_more_places_than_staleness_can_fill_are_reported_as_inert() -> None:
    config = with_value("rollout.concurrency", 200)
    config["sandbox"]["size"] = 300
    assert [(f["level"], f["path"]) for f in check(config)] == [("inert", "rollout.concurrency")]


def test_resuming_a_run_that_is_done_is_refused(tmp_path: Any) -> None:
    Checkpoint.commit(Checkpoint.begin(tmp_path, 40), 40, "hash", {}, keep=1)
    assert check(with_value("resume", str(tmp_path))) == [], "killed in its last evaluation: that is still to do"
    (tmp_path / "result.json").write_text('{"status": "success"}')
    findings = check(with_value("resume", str(tmp_path)))
    assert [(f["level"], f["path"]) for f in findings] == [("error", "steps")]


def test_resuming_with_other_training_tasks_is_refused_and_with_the_same_is_not(tmp_path: Path) -> None:
    suite = Minibench(root=str(tmp_path / "suite"), seed=0)
    config = with_value("resume", str(tmp_path))
    config["suite"] = {
        "_target_": "sandbox_env.suites.minibench.suite.Minibench",
        "root": str(tmp_path / "suite"),
        "seed": 0,
    }
    Checkpoint.commit(Checkpoint.begin(tmp_path, 20), 20, task_set_hash(suite.tasks("train69")), {}, keep=1)
    assert check(config) == []
    config["dataset"]["train"] = "train8"
    (finding,) = check(config)
    assert (finding["level"], finding["path"]) == ("error", "resume")
    assert "it was trained on other tasks (hash " in finding["message"]
    config["dataset"]["train"] = "train7"
    (finding,) = check(config)
    assert (finding["level"], finding["path"]) == ("error", "dataset.train")


def test_a_torn_checkpoint_is_refused_by_name_before_anything_starts(tmp_path: Path) -> None:
    for version in (10, 20):
        Checkpoint.commit(Checkpoint.begin(tmp_path, version), version, "hash", {}, keep=2)
    (tmp_path / "checkpoints/step-000020/loop.json").write_text("{")
    (finding,) = check(with_value("resume", str(tmp_path)))
    assert (finding["level"], finding["path"]) == ("error", "resume")
    assert "step-000020 is torn: loop.json cannot be read" in finding["message"]
    assert finding["remedy"] == f"an older one is complete: resume={tmp_path}/checkpoints/step-000010"
