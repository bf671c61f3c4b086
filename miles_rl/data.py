"""The data stage: reads the tasks, checks the splits, and prepares the policy that the run starts from."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_rl.checkpoint import Checkpoint, CheckpointError
from miles_rl.model.base import PolicySource
from sandbox_env.suites.base import Suite
from sandbox_env.task import Task, task_set_hash


class DataPrep:
    """Component of the stage `data`. `dataset` names the splits and their sizes, which must hold."""

    def __init__(
        self, suite: Suite, dataset: Mapping[str, Any], model: PolicySource, resume: str | None = None
    ) -> None:
        self._suite, self._dataset, self._model, self._resume = suite, dataset, model, resume
        self._progress = "reading tasks"

    @staticmethod
    def describe(options: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes for the plan."""
        dataset = options["dataset"]
        return {use: f"{dataset[use]}, {dataset[f'{use}_size']} tasks" for use in ("train", "eval")}

    async def start(self) -> None:
        """Read both splits, refuse an overlap, and make the first policy ready (warm start or checkpoint)."""
        # bounded: start_timeout_s of the stage
        self._tasks = {use: await asyncio.to_thread(self._suite.tasks, self._dataset[use]) for use in ("train", "eval")}
        self._check_splits()
        self._initial = await asyncio.to_thread(self._prepare_policy)  # bounded: start_timeout_s of the stage
        self._progress = ""

    async def tasks(self, use: str) -> list[Task]:
        """The tasks for `use`: "train" or "eval"."""
        return self._tasks[use]

    async def all_tasks(self) -> list[Task]:
        """Every task of both splits."""
        return [*self._tasks["train"], *self._tasks["eval"]]

    async def initial_policy(self) -> dict[str, Any]:
        """`model_dir` and `version`; after a resume also `checkpoint_dir`, and of the old run its `run_dir` and the
        evaluation `before` training.
        """
        return self._initial

    async def facts(self) -> Mapping[str, Any]:
        """What `result.json` tells of the data, and what the run went on from."""
        facts: dict[str, Any] = {"task_set_hash": {use: task_set_hash(tasks) for use, tasks in self._tasks.items()}}
        if "checkpoint_dir" in self._initial:
            facts["resumed_from"] = {"path": self._initial["checkpoint_dir"], "version": self._initial["version"]}
        return facts

    async def status(self) -> Mapping[str, Any]:
        """Progress of the preparation."""
        return {"progress": self._progress} if self._progress else {}

    async def stop(self) -> None:
        """Nothing is held."""

    def _prepare_policy(self) -> dict[str, Any]:
        if self._resume is None:
            return {"model_dir": self._model.prepare(self._suite, self._report), "version": 0}
        try:
            checkpoint = Checkpoint.open(Path(self._resume).absolute())
        except CheckpointError as error:
            raise ValueError(f"resume: {self._resume}; {error}") from None
        if problem := other_tasks(checkpoint, self._tasks["train"]):
            raise ValueError(f"resume: {self._resume}; {problem}")
        return {
            "model_dir": str(checkpoint.model_dir),
            "version": checkpoint.version,
            "checkpoint_dir": str(checkpoint.path),
            "run_dir": str(checkpoint.run_dir),
            "before": checkpoint.before,
        }

    def _report(self, step: int, steps: int, loss: float) -> None:
        self._progress = f"warm start {step}/{steps}, loss {loss:.3f}"

    def _check_splits(self) -> None:
        for use, tasks in self._tasks.items():
            if len(tasks) != (size := self._dataset[f"{use}_size"]):
                raise ValueError(f"dataset.{use}_size: {size}; the split {self._dataset[use]} has {len(tasks)} tasks")
        instructions = {use: {_key(t) for t in tasks} for use, tasks in self._tasks.items()}
        if both := instructions["train"] & instructions["eval"]:
            raise ValueError(f"dataset: {len(both)} tasks are in both train and eval; give disjoint splits")


def other_tasks(checkpoint: Checkpoint, tasks: Sequence[Task]) -> str:
    """Why a run that trains on `tasks` cannot go on from `checkpoint`; "" if it can."""
    if (here := task_set_hash(tasks)) == checkpoint.train_hash:
        return ""
    return (
        f"it was trained on other tasks (hash {checkpoint.train_hash[:12]}, here {here[:12]}); give the dataset and"
        " suite of that run"
    )


def _key(task: Task) -> str:
    return hashlib.sha256(task.instruction.encode()).hexdigest()
