"""The training loop: take a batch, step, publish at once, look; evaluated before, every now and then, and after."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from miles_rl.checkpoint import Checkpoint
from miles_rl.deadline import deadline
from miles_rl.evaluate import Evaluation, paired_change
from miles_rl.metrics import MetricsWriter
from miles_rl.trainer.base import Trainer

log = logging.getLogger(__name__)
KEPT_EXPORTS = 2
STOP_GRACE_S = 5.0

ANSWER_GRACE_S = 10.0
"""What the loop gives a stage beyond the stage's own deadline: the stage knows what was late, and tells it first."""


class TrainingLoop:
    """Component of the stage `trainer`: drives the run. `trainer` is the backend that holds weights and optimizer.

    Checkpoints are written every `checkpoint_every` steps, and one before the first step. A resumed run goes on as if
    it had not ended: it has the evaluation before training and the metrics up to its version from the run it resumes.
    """

    def __init__(
        self,
        data: Any,
        rollout: Any,
        fleet: Any,
        eval: Any,
        *,
        trainer: Trainer,
        steps: int,
        eval_every: int,
        checkpoint_every: int,
        keep_checkpoints: int,
        step_timeout_s: float,
        batch_timeout_s: float,
        eval_timeout_s: float,
        run_dir: str,
    ) -> None:
        self._data, self._rollout, self._fleet, self._eval = data, rollout, fleet, eval
        for name, value in (("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
            if value < 0:
                raise ValueError(f"stages.trainer.run.{name}: {value}; give 0 for never, or more")
        if step_timeout_s <= 0:
            raise ValueError(f"stages.trainer.run.step_timeout_s: {step_timeout_s}; give more than 0")
        if keep_checkpoints < 1:
            raise ValueError(f"stages.trainer.run.keep_checkpoints: {keep_checkpoints}; give at least 1")
        self.trainer, self._steps = trainer, steps
        self._eval_every, self._checkpoint_every, self._keep = eval_every, checkpoint_every, keep_checkpoints
        self._batch_timeout_s, self._eval_timeout_s = batch_timeout_s, eval_timeout_s
        self._step_timeout_s, self._run_dir = step_timeout_s, Path(run_dir)
        self._version = 0
        self._phase = "starting"
        self._metrics: dict[str, float] = {}
        self._evaluations: dict[int, dict[str, float]] = {}
        self._first_step: int | None = None
        self._problem = ""
        self._before: Evaluation | None = None
        self._background: asyncio.Task[Evaluation] | None = None

    @staticmethod
    def describe(options: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes for the plan."""
        return {
            "steps": options["steps"],
            "eval_every": options["eval_every"],
            "checkpoint_every": options["checkpoint_every"],
        }

    async def start(self) -> None:
        """Load the policy into the trainer, and after a resume what the run it goes on from has found out."""
        async with self._deadline("the answer of the data stage"):
            initial, facts = await self._data.initial_policy(), await self._data.facts()
        self._version, self._train_hash = initial["version"], facts["task_set_hash"]["train"]
        self._writer = MetricsWriter(self._run_dir)
        if "checkpoint_dir" in initial:
            self._before = Evaluation.from_dict(initial["before"])
            for step, metrics in self._writer.carry(Path(initial["run_dir"]), self._version):
                self._metrics |= metrics
                if "eval/solve_rate" in metrics:
                    self._evaluations[step] = metrics
        # bounded: by stages.trainer.start_timeout_s, like every start
        await asyncio.to_thread(self.trainer.load, initial["model_dir"], initial.get("checkpoint_dir"))
        self._phase = "ready"

    async def run(self) -> Mapping[str, Any]:
        """Train for `steps` optimizer steps. Returns the metrics of the run."""
        if self._before is None:
            self._before = await self._evaluate("evaluating before training")
            self._log_evaluation(self._before)
            if self._checkpoint_every:
                await self._checkpoint()
        elif self._version not in self._evaluations:
            self._evaluate_if_due()  # the run that is resumed ended before this evaluation did
        self._first_step = self._version
        while self._version < self._steps:
            await self._step()
            self._evaluate_if_due()
            if self._checkpoint_every and self._version % self._checkpoint_every == 0:
                await self._checkpoint()
        self._phase = "ending the rollouts"
        async with self._deadline("the end of the rollouts"):
            await self._rollout.finish()
        self._phase = "waiting for an evaluation"
        if self._background is not None:
            await asyncio.wait([self._background])  # bounded: an evaluation has its deadline
        after = await self._evaluate("evaluating after training")
        self._log_evaluation(after)
        self._phase = "done"
        return self._summary(self._before, after)

    async def status(self) -> Mapping[str, Any]:
        """Figures for the display.

        `first_step` is the version at which this run began to train, after a resume not 0; None before it did.
        `evaluations` are all that are known, in order of version, also those that a resumed run took over.
        `problem` is what went wrong last without ending the run.
        """
        return {
            "step": self._version,
            "first_step": self._first_step,
            "steps": self._steps,
            "phase": self._phase,
            "metrics": self._metrics,
            "problem": self._problem,
            "evaluations": [_shown(version, self._evaluations[version]) for version in sorted(self._evaluations)],
        }

    async def stop(self) -> None:
        """Give up a background evaluation and close the metrics."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.wait([self._background], timeout=STOP_GRACE_S)
        if hasattr(self, "_writer"):
            self._writer.close()
        async with self._deadline("removing exported weights"):
            await asyncio.to_thread(shutil.rmtree, self._run_dir / "weights", ignore_errors=True)

    async def _step(self) -> None:
        """One step on the oldest complete batch. The new weights go out before anything else is done."""
        start = time.monotonic()
        self._phase = "waiting for a batch"
        async with _beyond("rollout.batch_timeout_s", self._batch_timeout_s, "the rollout stage's next batch"):
            batch = await self._rollout.next_batch()
        if batch.version != self._version:
            raise RuntimeError(f"trainer: batch for version {batch.version}, but the weights are {self._version}")
        train_start, train_stamp = time.monotonic(), time.time()
        self._phase = "training"
        async with self._deadline("the optimizer step"):
            metrics = dict(await asyncio.to_thread(self.trainer.step, batch))
        publish_start, publish_stamp = time.monotonic(), time.time()
        self._phase = "publishing"
        async with self._deadline("publishing the weights"):
            await self._publish(self._version + 1)
        self._version += 1
        end, end_stamp = time.monotonic(), time.time()
        async with self._deadline("the rollout stage's metrics"):
            metrics |= await self._rollout.batch_metrics()
        metrics |= {
            "perf/step_s": end - start,
            "perf/wait_s": train_start - start,
            "perf/train_s": publish_start - train_start,
            "perf/publish_s": end - publish_start,
            "perf/overhead_ratio": (end - publish_start) / (end - start),
            "perf/tokens_per_s": metrics["train/num_tokens"] / (end - start),
            "time/train_start_s": train_stamp,
            "time/train_end_s": publish_stamp,
            "time/publish_start_s": publish_stamp,
            "time/publish_end_s": end_stamp,
        }
        self._write(metrics)

    async def _publish(self, version: int) -> None:
        folder = self._run_dir / "weights" / f"v{version:06d}"
        checksum = await asyncio.to_thread(self.trainer.export, str(folder))  # bounded: step_timeout_s, in `_step`
        await self._fleet.publish(str(folder), version, checksum)
        await self._rollout.published(version)
        for old in sorted(folder.parent.glob("v*"))[:-KEPT_EXPORTS]:
            await asyncio.to_thread(shutil.rmtree, old)  # bounded: step_timeout_s, in `_step`

    async def _checkpoint(self) -> None:
        """Weights, trainer and ledger into one checkpoint; the ledger hears that it is complete."""
        self._phase = "writing a checkpoint"
        assert self._before is not None
        before = self._before.as_dict()
        async with self._deadline("writing a checkpoint"):
            with Checkpoint.attempt(self._run_dir, self._version):
                hidden = await asyncio.to_thread(Checkpoint.begin, self._run_dir, self._version)
                await asyncio.to_thread(self._save, hidden)
                await self._rollout.save(str(hidden))
                commit = (hidden, self._version, self._train_hash, before, self._keep)
                await asyncio.to_thread(Checkpoint.commit, *commit)
            await self._rollout.committed(self._version, Checkpoint.kept(self._run_dir))

    def _save(self, folder: Path) -> None:
        self.trainer.export(str(folder / "model"))
        self.trainer.save(str(folder))

    def _deadline(self, what: str) -> AbstractAsyncContextManager[None]:
        return deadline("stages.trainer.run.step_timeout_s", self._step_timeout_s, what)

    async def _evaluate(self, phase: str) -> Evaluation:
        self._phase = phase
        return await self._evaluation(self._version)

    async def _evaluation(self, version: int) -> Evaluation:
        async with _beyond("stages.eval.run.timeout_s", self._eval_timeout_s, "the eval stage's evaluation"):
            return await self._eval.evaluate(version)

    def _evaluate_if_due(self) -> None:
        """Start an evaluation beside the training; one at a time, and a failure of one is only logged."""
        if not self._eval_every or self._version % self._eval_every or not 0 < self._version < self._steps:
            return
        if self._background is not None and not self._background.done():
            log.warning("evaluation at step %d skipped: the one before still runs", self._version)
            return
        self._background = asyncio.create_task(self._evaluation(self._version))
        self._background.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[Evaluation]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._problem = f"an evaluation failed, the run goes on: {error}"
            log.error("%s", self._problem)
        else:
            self._log_evaluation(task.result())  # bounded: it is done

    def _log_evaluation(self, evaluation: Evaluation) -> None:
        """Known now, but it speaks for the version that it was begun with: later steps may be written already."""
        self._evaluations[evaluation.version] = evaluation.metrics()
        self._write(evaluation.metrics(), evaluation.version)

    def _write(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._metrics = {**self._metrics, **metrics}
        self._writer.write(self._version if step is None else step, metrics, time_s=time.time())

    def _summary(self, before: Evaluation, after: Evaluation) -> dict[str, Any]:
        delta, low, high = paired_change(before, after)
        ours = {k: v for k, v in self._metrics.items() if not k.startswith(("time/", "eval/"))}
        return {
            **ours,
            "eval/solve_rate_before": before.solve_rate,
            "eval/solve_rate_before_ci95": list(before.ci95),
            "eval/solve_rate_after": after.solve_rate,
            "eval/solve_rate_after_ci95": list(after.ci95),
            "eval/solve_rate_delta": delta,
            "eval/solve_rate_delta_ci95": [low, high],
            "eval/num_tasks": len(after.solve_rates),
            "eval/failed": before.failed + after.failed,
        }


def _shown(version: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """An evaluation's metrics as the display takes them."""
    ends = [metrics.get(f"eval/solve_rate_ci95_{end}") for end in ("low", "high")]
    return {"version": version, "solve_rate": metrics["eval/solve_rate"], "ci95": ends}


def _beyond(path: str, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
    """A deadline a little after the one that the stage itself keeps under `path`."""
    return deadline(f"{path} (and {ANSWER_GRACE_S:g} s)", seconds + ANSWER_GRACE_S, what)
