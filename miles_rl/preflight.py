"""What a composed config cannot do, found before anything starts: starvation, deadlock, and knobs that cannot act.

Each rule is a generator of findings over the whole resolved config. A finding is a plain dict, so that the planner
needs no import from here: `level` ("error" refuses the run, "inert" and "note" are shown), `path`, `value`, `message`
and `remedy`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from miles_rl.checkpoint import Checkpoint, CheckpointError
from miles_rl.data import other_tasks

Config = dict[str, Any]
Finding = dict[str, Any]


def check(config: Config) -> list[Finding]:
    """All findings of all rules, in order. A rule looks only at parts that this config has."""
    return [finding for rule in RULES for finding in rule(config)]


def _finding(level: str, path: str, value: object, message: str, remedy: str) -> Finding:
    return {"level": level, "path": path, "value": value, "message": message, "remedy": remedy}


def _staleness(config: Config) -> Iterator[Finding]:
    rollout = config["rollout"]
    staleness = rollout["max_staleness"]
    if rollout["mode"] == "async" and staleness < 1:
        yield _finding(
            "error",
            "rollout.max_staleness",
            staleness,
            "asynchronous rollouts are at least one version old, so no batch would ever be admitted",
            "give 1 or more, or rollout=sync",
        )
    if rollout["mode"] == "sync" and staleness != 0:
        yield _finding(
            "error",
            "rollout.max_staleness",
            staleness,
            "synchronous rollouts are of the version that consumes them",
            "give 0, or rollout=async",
        )


def _dataset(config: Config) -> Iterator[Finding]:
    size, groups = config["dataset"]["train_size"], config["rollout"]["num_groups"]
    if size < groups:
        yield _finding(
            "error",
            "rollout.num_groups",
            groups,
            f"a batch wants {groups} different tasks and {config['dataset']['train']} has {size}",
            f"give at most {size}, or a larger dataset",
        )


def _sandboxes(config: Config) -> Iterator[Finding]:
    rollouts = config["rollout"]["concurrency"]
    evals = config["stages"].get("eval", {}).get("run", {}).get("concurrency", 0)
    size = config["sandbox"]["size"]
    if rollouts + evals > size:
        yield _finding(
            "error",
            "sandbox.size",
            size,
            f"rollout.concurrency {rollouts} and stages.eval.run.concurrency {evals} need {rollouts + evals} sandboxes",
            f"give {rollouts + evals} or more, or lower the concurrency",
        )


def _concurrency(config: Config) -> Iterator[Finding]:
    rollout = config["rollout"]
    window = rollout["num_groups"] * rollout["group_size"] * max(1, rollout["max_staleness"])
    if rollout["concurrency"] > window:
        yield _finding(
            "inert",
            "rollout.concurrency",
            rollout["concurrency"],
            f"staleness admits at most {window} samples ahead of the trainer",
            f"more than {window} places stay empty; raise max_staleness or the batch",
        )


def _groups(config: Config) -> Iterator[Finding]:
    if config["rollout"]["group_size"] < 2 and config["loss"].get("advantage") != "reinforce_pp":
        yield _finding(
            "error",
            "rollout.group_size",
            config["rollout"]["group_size"],
            "a group of one has no baseline: every advantage is 0 and nothing is learned",
            "give 2 or more, or loss=reinforce_pp",
        )


def _lengths(config: Config) -> Iterator[Finding]:
    rollout = config["rollout"]["agent"]
    if rollout["turn_tokens"] >= rollout["session_tokens"]:
        yield _finding(
            "error",
            "rollout.agent.turn_tokens",
            rollout["turn_tokens"],
            f"one turn fills the session of {rollout['session_tokens']} tokens and leaves no room for a prompt",
            "give less than rollout.agent.session_tokens",
        )
    model_context = config["model"].get("architecture", {}).get("context_length")
    context = config["engine"].get("max_context") or model_context
    if context is not None and rollout["session_tokens"] > context:
        yield _finding(
            "error",
            "rollout.agent.session_tokens",
            rollout["session_tokens"],
            f"the engine serves at most {context} tokens of context",
            f"give at most {context}",
        )
    budget = config["trainer"].get("max_tokens_per_micro_batch")
    if budget is not None and rollout["session_tokens"] > budget:
        yield _finding(
            "error",
            "trainer.max_tokens_per_micro_batch",
            budget,
            f"one session may have {rollout['session_tokens']} tokens and would not fit",
            f"give {rollout['session_tokens']} or more",
        )


def _support(config: Config) -> Iterator[Finding]:
    rollout, loss = config["rollout"]["agent"], config["loss"]
    uses_ratio = loss.get("correction", "none") != "none" or loss.get("old_logprobs") == "rollout"
    if (rollout["top_p"] < 1 or rollout["top_k"] > 0) and uses_ratio:
        yield _finding(
            "error",
            "rollout.agent.top_p" if rollout["top_p"] < 1 else "rollout.agent.top_k",
            rollout["top_p"] if rollout["top_p"] < 1 else rollout["top_k"],
            "log-probabilities are over the whole vocabulary and the samples are not, so every importance ratio is off"
            " by the mass that was kept",
            "give top_p=1 and top_k=-1, or loss.correction=none with loss.old_logprobs=recomputed",
        )


def _clip(config: Config) -> Iterator[Finding]:
    loss = config["loss"]
    single = config["trainer"].get("optimizer_steps_per_batch") == 1
    if single and loss.get("old_logprobs") == "recomputed" and loss.get("policy") in ("ppo_clip", "gspo", "cispo"):
        yield _finding(
            "inert",
            "loss.clip_low, loss.clip_high",
            (loss.get("clip_low"), loss.get("clip_high")),
            "with one optimizer step per batch and recomputed old log-probabilities the ratio is 1",
            "only loss.correction acts; raise trainer.optimizer_steps_per_batch to make the clip act",
        )


def _correction_low(config: Config) -> Iterator[Finding]:
    loss = config["loss"]
    if loss.get("correction") in ("tis_token", "tis_sequence") and loss.get("correction_low", 0) > 0:
        yield _finding(
            "note",
            "loss.correction_low",
            loss["correction_low"],
            "it lifts the weight of tokens that the policy has left, which keeps pushing on them",
            "0 is the safe value",
        )


def _periods(config: Config) -> Iterator[Finding]:
    run = config["stages"].get("trainer", {}).get("run", {})
    for name in ("eval_every", "checkpoint_every"):
        if run.get(name) and run[name] > config["steps"]:
            yield _finding(
                "inert",
                f"stages.trainer.run.{name}",
                run[name],
                f"the run ends after steps={config['steps']}",
                "give at most that",
            )


def _resume(config: Config) -> Iterator[Finding]:
    if config.get("resume") is None:
        return
    try:
        checkpoint = Checkpoint.open(Path(config["resume"]))
    except CheckpointError as error:
        message, _, remedy = str(error).rpartition("; ")
        yield _finding("error", "resume", config["resume"], message, remedy)
        return
    if "_target_" in config.get("suite", {}):
        try:
            tasks = instantiate(config["suite"], _convert_="all").tasks(config["dataset"]["train"])
        except (OSError, ValueError, InstantiationException) as error:
            text = " ".join(str(error.__cause__ or error).split())
            yield _finding("error", "dataset.train", config["dataset"]["train"], text, "give the split of that run")
            return
        if problem := other_tasks(checkpoint, tasks):
            message, _, remedy = problem.rpartition("; ")
            yield _finding("error", "resume", config["resume"], message, remedy)
    if checkpoint.version > config["steps"] or (checkpoint.version == config["steps"] and _succeeded(checkpoint)):
        yield _finding(
            "error",
            "steps",
            config["steps"],
            f"{config['resume']} has done {checkpoint.version} steps already",
            f"give more than {checkpoint.version}",
        )


def _succeeded(checkpoint: Checkpoint) -> bool:
    """Did the run end well? One that was killed after its last step still has its last evaluation to do."""
    try:
        return json.loads((checkpoint.run_dir / "result.json").read_text())["status"] == "success"
    except (OSError, ValueError, KeyError):
        return False


RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _staleness,
    _dataset,
    _sandboxes,
    _concurrency,
    _groups,
    _lengths,
    _support,
    _clip,
    _correction_low,
    _periods,
    _resume,
)
