from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from composed import EXPERIMENTS, compose_config
from omegaconf import OmegaConf

from miles_rl.checkpoint import Checkpoint
from miles_rl.preflight import check
from miles_rl.rollout.order import TaskOrder
from miles_rl.rollout.scheduler import FailureLimits, Scheduler
from miles_rl.rules.waits import nested
from pipelines.origin import resolve
from pipelines.plan import make_plan
from pipelines.plan_text import plain
from pipelines.schema import GROUPS
from sandbox_env.suites.minibench.suite import Minibench
from sandbox_env.task import task_set_hash

HEALTHY: dict[str, Any] = {
    "steps": 40,
    "resume": None,
    "dataset": {"train": "train69", "train_size": 69, "eval_size": 20},
    "sandbox": {"size": 48, "lease_ttl_s": 3600.0, "preflight_timeout_s": 60.0, "provider": {"create_timeout_s": 30.0}},
    "engine": {"max_context": None, "max_running": 64, "start_timeout_s": 60.0},
    "router": {"request_timeout_s": 3600, "max_idle_s": 3600, "start_timeout_s": 60.0},
    "model": {"architecture": {"context_length": 1024}},
    "trainer": {
        "max_tokens_per_micro_batch": 4096,
        "optimizer_steps_per_batch": 2,
        "warmup_steps": 0,
        "lr_schedule": "linear",
        "schedule_steps": 40,
    },
    "loss": {"advantage": "grpo", "correction": "tis_token", "policy": "ppo_clip", "old_logprobs": "recomputed"},
    "rollout": {
        "mode": "async",
        "max_staleness": 3,
        "num_groups": 8,
        "group_size": 8,
        "concurrency": 32,
        "admission": "sample",
        "protect_after": 1,
        "short_groups": "halt",
        "batch_timeout_s": 300.0,
        "stop_timeout_s": 15.0,
        "max_failures_per_task": 5,
        "max_failures_in_a_row": 64,
        "agent": {
            "turn_tokens": 96,
            "session_tokens": 640,
            "top_p": 1.0,
            "top_k": -1,
            "wall_clock_s": 60.0,
            "command_timeout_s": 10.0,
            "request_timeout_s": 30.0,
            "lease_timeout_s": 60.0,
        },
    },
    "cluster": {"num_cpus": 2, "num_gpus": 0, "heartbeat_s": 1.0, "heartbeat_timeout_s": 20.0, "stall_s": 10.0},
    "stages": {
        "sandboxes": {"start_timeout_s": 120.0, "call_timeout_s": 600.0},
        "fleet": {
            "start_timeout_s": 120.0,
            "call_timeout_s": 600.0,
            "run": {"_target_": "miles_rl.engine.fleet.Fleet", "num_replicas": 1},
        },
        "eval": {
            "call_timeout_s": 660.0,
            "run": {"concurrency": 16, "num_samples": 8, "max_attempts": 3, "max_retries": 9, "timeout_s": 600.0},
        },
        "rollout": {"call_timeout_s": 600.0, "stop_timeout_s": 20.0},
        "trainer": {"run": {"eval_every": 20, "checkpoint_every": 20, "step_timeout_s": 600.0}},
    },
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
        ("dataset.train_size", 20, "note", "dataset.train_size", "32 groups may be open at once and train69 has 20"),
        ("rollout.protect_after", None, "note", "rollout.protect_after", "no batch waits for a task"),
        ("rollout.protect_after", 0, "note", "rollout.protect_after", "every batch waits for every group"),
        ("rollout.max_failures_in_a_row", 32, "note", "rollout.max_failures_in_a_row", "all 32 samples in flight"),
        ("rollout.max_failures_per_task", 1, "note", "rollout.max_failures_per_task", "no sample is ever refilled"),
        ("engine.max_running", 47, "note", "engine.max_running", "compute 47 requests and 48 may be in flight"),
        ("stages.eval.run.max_retries", 0, "inert", "stages.eval.run.max_attempts", "no episode is played again"),
        ("stages.eval.run.max_attempts", 1, "inert", "stages.eval.run.max_retries", "no episode is played again"),
        ("stages.eval.run.num_samples", 0, "inert", "stages.eval.run.concurrency", "20 tasks x 0 episodes"),
        ("stages.trainer.run.checkpoint_every", 0, "note", "stages.trainer.run.checkpoint_every", "starts afresh"),
        ("resume_changed", True, "error", "resume_changed", "resumes none"),
        ("trainer.schedule_steps", 39, "error", "trainer.schedule_steps", "is 0 after 39 of the steps=40"),
        ("trainer.warmup_steps", 81, "note", "trainer.warmup_steps", "80 optimizer steps"),
        ("rollout.agent.command_timeout_s", 60.0, "inert", "rollout.agent.command_timeout_s", "the episode after 60 s"),
        ("router.request_timeout_s", 20, "inert", "rollout.agent.request_timeout_s", "router.request_timeout_s ends"),
        ("router.max_idle_s", 5, "note", "router.max_idle_s", "a replica without its keys"),
        ("sandbox.lease_ttl_s", 30.0, "note", "sandbox.lease_ttl_s", "would be ended"),
        ("sandbox.provider.create_timeout_s", 60.0, "inert", "sandbox.provider.create_timeout_s", "after 60 s already"),
        ("rollout.agent.lease_timeout_s", 20.0, "inert", "sandbox.provider.create_timeout_s", "after 20 s already"),
        ("stages.sandboxes.call_timeout_s", 50.0, "inert", "rollout.agent.lease_timeout_s", "a call of the sandboxes"),
        (
            "stages.sandboxes.start_timeout_s",
            60.0,
            "inert",
            "sandbox.preflight_timeout_s",
            "the start of the sandboxes",
        ),
        (
            "stages.rollout.call_timeout_s",
            300.0,
            "inert",
            "rollout.batch_timeout_s",
            "the wait for a batch after 300 s",
        ),
        ("rollout.batch_timeout_s", 239.0, "note", "rollout.batch_timeout_s", "32 places need 2 of them for a batch"),
        ("rollout.agent.wall_clock_s", 91.0, "note", "rollout.batch_timeout_s", "an episode may take 181 s"),
        ("rollout.stop_timeout_s", 20.0, "inert", "rollout.stop_timeout_s", "the stop of the stage after 20 s"),
        ("stages.eval.call_timeout_s", 600.0, "inert", "stages.eval.run.timeout_s", "the evaluation after 600 s"),
        ("stages.eval.run.timeout_s", 100.0, "note", "stages.eval.run.timeout_s", "would end the evaluation"),
        ("stages.trainer.run.step_timeout_s", 90.0, "inert", "stages.fleet.run.publish_timeout_s", "after 90 s"),
        ("stages.fleet.call_timeout_s", 120.0, "inert", "stages.fleet.run.publish_timeout_s", "a publish after 120 s"),
        ("stages.fleet.start_timeout_s", 60.0, "inert", "engine.start_timeout_s", "the start of the fleet after 60 s"),
        ("cluster.heartbeat_timeout_s", 15.0, "inert", "stages.fleet.run.status_timeout_s", "a look at the fleet"),
        ("cluster.heartbeat_timeout_s", 29.5, "note", "cluster.heartbeat_timeout_s", "noticed after 30.5 s"),
        ("cluster.heartbeat_s", 0.0, "error", "cluster.heartbeat_s", "no time at all"),
        ("cluster.num_cpus", 0, "error", "cluster.num_cpus", "at least 1"),
        ("cluster.object_store_mb", 50, "error", "cluster.object_store_mb", "at least 76"),
        ("stages.fleet.run.flush_cache", True, None, "", ""),
        ("resume", "/nowhere/run", "error", "resume", "is no folder"),
    ],
)
def test_what_cannot_work_or_act_is_found_with_its_path(
    path: str, value: object, level: str | None, at: str, words: str
) -> None:
    if level is None:
        assert check(with_value(path, value)) == []
        return
    findings = [f for f in check(with_value(path, value)) if f["level"] == level]
    assert [f["path"] for f in findings][:1] == [at]
    assert words in findings[0]["message"]
    assert findings[0]["remedy"]


def test_more_places_than_staleness_can_fill_are_reported_as_inert() -> None:
    config = with_value("rollout.concurrency", 8 * 8 * 4)
    config["sandbox"]["size"] = config["engine"]["max_running"] = config["rollout"]["max_failures_in_a_row"] = 300
    assert check(config) == []
    config["rollout"]["concurrency"] += 1
    assert [(f["level"], f["path"]) for f in check(config)] == [("inert", "rollout.concurrency")]


@pytest.mark.parametrize(("concurrency", "level"), [(7, "error"), (8, None), (20, "inert"), (24, None)])
def test_admission_of_whole_groups_needs_places_for_whole_groups(concurrency: int, level: str | None) -> None:
    config = with_value("rollout.admission", "group")
    config["rollout"] |= {"concurrency": concurrency, "batch_timeout_s": 9999.0}
    config["stages"]["rollout"]["call_timeout_s"] = 99999.0
    assert [(f["level"], f["path"]) for f in check(config)] == ([(level, "rollout.concurrency")] if level else [])


def test_group_admission_without_places_for_a_group_is_a_deadlock_of_the_real_scheduler() -> None:
    for concurrency, starts in ((7, False), (8, True)):
        scheduler = Scheduler(
            TaskOrder(["a"], 0),
            num_groups=1,
            group_size=8,
            max_staleness=1,
            concurrency=concurrency,
            admission="group",
            limits=FailureLimits(5, 5),
        )
        assert (scheduler.next_sample() is not None) == starts


@pytest.mark.parametrize(("mode", "most"), [("async", 1), ("async", 3), ("sync", 0)])
def test_the_window_of_admission_is_what_the_real_scheduler_opens(mode: str, most: int) -> None:
    scheduler = Scheduler(
        TaskOrder(["a", "b", "c"], 0),
        num_groups=3,
        group_size=2,
        max_staleness=most,
        concurrency=1000,
        limits=FailureLimits(5, 5),
    )
    while scheduler.next_sample() is not None:
        pass
    config = with_value("rollout", {**HEALTHY["rollout"], "mode": mode, "num_groups": 3, "group_size": 2})
    config["rollout"] |= {"max_staleness": most, "protect_after": None, "max_failures_in_a_row": 99}
    for concurrency, inert in ((scheduler.num_running, False), (scheduler.num_running + 1, True)):
        config["rollout"]["concurrency"] = concurrency
        found = {f["path"] for f in check(config) if f["level"] == "inert"}
        assert ("rollout.concurrency" in found) == inert


def test_protection_and_short_groups_that_cannot_act_are_inert() -> None:
    config = with_value("rollout", {**HEALTHY["rollout"], "mode": "sync", "max_staleness": 0})
    assert [(f["level"], f["path"]) for f in check(config)] == [("inert", "rollout.protect_after")]
    config = with_value("rollout", {**HEALTHY["rollout"], "short_groups": "train", "group_size": 2})
    assert ("inert", "rollout.short_groups") in [(f["level"], f["path"]) for f in check(config)]


def test_knobs_of_other_engines_and_of_no_reference_are_inert() -> None:
    config = with_value("engine._target_", "miles_rl.engine.embedded.engine.EmbeddedEngine")
    config["stages"]["fleet"]["run"]["flush_cache"] = True
    config["trainer"]["reference_model_dir"], config["loss"]["kl_coef"] = "base", 0.0
    paths = [f["path"] for f in check(config) if f["level"] == "inert"]
    assert {"stages.fleet.run.flush_cache", "trainer.reference_model_dir"} <= set(paths)


OPTIONS = [
    f"{group}={path.stem}"
    for group in (*GROUPS, "pipeline")
    for path in sorted((Path(__file__).parents[2] / "conf" / group).glob("*.yaml"))
]


@pytest.mark.parametrize("word", [*OPTIONS, *(f"+experiment={name}" for name in EXPERIMENTS)])
def test_no_option_that_ships_is_refused_and_every_finding_is_one_line(word: str) -> None:
    more = ["model.path=/models/some"] if word == "model=hf" else []
    config = OmegaConf.to_container(compose_config(word, *more), resolve=True)
    assert isinstance(config, dict)
    findings = check({str(key): value for key, value in config.items()})
    assert [f for f in findings if f["level"] == "error"] == []
    for found in findings:
        assert "\n" not in found["message"] + found["remedy"]
        assert found["remedy"]


def test_a_deadline_that_never_acts_is_in_no_config_that_ships() -> None:
    for word in ("rollout=async", "rollout=sync", "+experiment=smoke"):
        config = OmegaConf.to_container(compose_config(word), resolve=True)
        assert isinstance(config, dict)
        assert list(nested({str(key): value for key, value in config.items()})) == []


def test_what_is_inert_or_worth_knowing_is_seen_in_the_plan() -> None:
    plan = make_plan(*resolve(compose_config("rollout.protect_after=0", "rollout.concurrency=46")))
    told = " ".join(plain(plan).split())
    assert "note: rollout.protect_after: 0; every batch waits for every group" in told
    assert "inert: loss.clip_low, loss.clip_high: (0.2, 0.28); with one optimizer step per batch" in told


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
