"""What a composed config cannot do, found before anything starts: starvation, deadlock, and knobs that cannot act.

Each rule is a generator of findings over the whole resolved config. A finding is a plain dict, so that the planner
needs no import from here: `level` ("error" refuses the run, "inert" and "note" are shown), `path`, `value`, `message`
and `remedy`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from miles_rl.checkpoint import Checkpoint, CheckpointError
from miles_rl.data import other_tasks
from miles_rl.rules import learning, liveness, waits
from miles_rl.rules.finding import Config, Finding, finding


def check(config: Config) -> list[Finding]:
    """All findings of all rules, in order. A rule looks only at parts that this config has."""
    return [found for rule in RULES for found in rule(config)]


def _resume(config: Config) -> Iterator[Finding]:
    if config.get("resume") is None:
        return
    if not config["resume"]:
        yield finding("error", "resume", "''", "names no folder", "give the folder of a run, or null")
        return
    try:
        checkpoint = Checkpoint.open(Path(config["resume"]))
    except CheckpointError as error:
        message, _, remedy = str(error).rpartition("; ")
        yield finding("error", "resume", config["resume"], message, remedy)
        return
    if "_target_" in config.get("suite", {}):
        try:
            tasks = instantiate(config["suite"], _convert_="all").tasks(config["dataset"]["train"])
        except (OSError, ValueError, InstantiationException) as error:
            text = " ".join(str(error.__cause__ or error).split())
            yield finding("error", "dataset.train", config["dataset"]["train"], text, "give the split of that run")
            return
        if problem := other_tasks(checkpoint, tasks):
            message, _, remedy = problem.rpartition("; ")
            yield finding("error", "resume", config["resume"], message, remedy)
    if checkpoint.version > config["steps"] or (checkpoint.version == config["steps"] and _succeeded(checkpoint)):
        yield finding(
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
    *liveness.RULES,
    *waits.RULES,
    *learning.RULES,
    _resume,
)
