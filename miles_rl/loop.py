"""The training loop: take a batch, step, publish at once, look; evaluated before, every now and then, and after."""

from __future__ import annotations

import asyncio
import contextlib
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


class TrainingLoop:
    """Component of the stage `trainer`: drives the run. `trainer` is the backend that holds weights and optimizer."""

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
        self._trainer, self._steps = trainer, steps
        self._eval_every, self._checkpoint_every, self._keep = eval_every, checkpoint_every, keep_checkpoints
        self._step_timeout_s, self._run_dir = step_timeout_s, Path(run_dir)
        self._version = 0
        self._phase = "starting"
        self._metrics: dict[str, float] = {}
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
        """Load the policy into the trainer."""
        initial = await self._data.initial_policy()
        self._version = initial["version"]
        self._train_hash = (await self._data.facts())["task_set_hash"]["train"]
        self._writer = MetricsWriter(self._run_dir)
        await asyncio.to_thread(self._trainer.load, initial["model_dir"], initial.get("checkpoint_dir"))
        self._phase = "ready"

    async def run(self) -> Mapping[str, Any]:
        """Train for `steps` optimizer steps. Returns the metrics of the run."""
        before = await self._evaluate("evaluating before")
        self._log_evaluation(before)
        while self._version < self._steps:
            await self._step()
            if self._eval_every and self._version % self._eval_every == 0 and self._version < self._steps:
                self._evaluate_in_background()
            if self._checkpoint_every and self._version % self._checkpoint_every == 0:
                await self._checkpoint()
        await self._rollout.finish()
        await self._join_background()
        after = await self._evaluate("evaluating after")
        self._log_evaluation(after)
        self._phase = "done"
        return self._summary(before, after)

    async def status(self) -> Mapping[str, Any]:
        """Figures for the display."""
        return {"step": self._version, "steps": self._steps, "phase": self._phase, "metrics": self._metrics}

    async def stop(self) -> None:
        """Give up a background evaluation and close the metrics."""
        if self._background is not None:
            self._background.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._background
        if hasattr(self, "_writer"):
            self._writer.close()
        await asyncio.to_thread(shutil.rmtree, self._run_dir / "weights", ignore_errors=True)

    async def _step(self) -> None:
        """One step on the oldest complete batch. The new weights go out before anything else is done."""
        start = time.time()
        self._phase = "waiting for a batch"
        batch = await self._rollout.next_batch()
        if batch.version != self._version:
            raise RuntimeError(f"trainer: batch for version {batch.version}, but the weights are {self._version}")
        train_start = time.time()
        self._phase = "training"
        async with self._deadline("the optimizer step"):
            metrics = dict(await asyncio.to_thread(self._trainer.step, batch))
        publish_start = time.time()
        self._phase = "publishing"
        async with self._deadline("publishing the weights"):
            await self._publish(self._version + 1)
        self._version += 1
        end = time.time()
        metrics |= await self._rollout.batch_metrics()
        metrics |= {
            "perf/step_s": end - start,
            "perf/wait_s": train_start - start,
            "perf/train_s": publish_start - train_start,
            "perf/publish_s": end - publish_start,
            "perf/overhead_ratio": (end - publish_start) / (end - start),
            "perf/tokens_per_s": metrics["train/num_tokens"] / (end - start),
            "time/train_start_s": train_start,
            "time/train_end_s": publish_start,
            "time/publish_start_s": publish_start,
            "time/publish_end_s": end,
        }
        self._write(metrics)

    async def _publish(self, version: int) -> None:
        folder = self._run_dir / "weights" / f"v{version:06d}"
        checksum = await asyncio.to_thread(self._trainer.export, str(folder))
        await self._fleet.publish(str(folder), version, checksum)
        await self._rollout.published(version)
        for old in sorted(folder.parent.glob("v*"))[:-KEPT_EXPORTS]:
            await asyncio.to_thread(shutil.rmtree, old)

    async def _checkpoint(self) -> None:
        def save(folder: Path) -> None:
            self._trainer.export(str(folder / "model"))
            self._trainer.save(str(folder))

        cursor = await self._rollout.cursor()
        args = (self._run_dir, self._version, cursor, self._train_hash, save, self._keep)
        async with self._deadline("writing a checkpoint"):
            await asyncio.to_thread(Checkpoint.write, *args)

    def _deadline(self, what: str) -> AbstractAsyncContextManager[None]:
        return deadline("stages.trainer.run.step_timeout_s", self._step_timeout_s, what)

    async def _evaluate(self, phase: str) -> Evaluation:
        self._phase = phase
        return await self._eval.evaluate(self._version)

    def _evaluate_in_background(self) -> None:
        """Start an evaluation beside the training; one at a time, and a failure of one is only logged."""
        if self._background is not None and not self._background.done():
            log.warning("evaluation at step %d skipped: the one before still runs", self._version)
            return
        self._background = asyncio.create_task(self._eval.evaluate(self._version))
        self._background.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[Evaluation]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("evaluation failed: %s", error)
        else:
            self._log_evaluation(task.result())

    async def _join_background(self) -> None:
        if self._background is not None:
            await asyncio.wait([self._background])

    def _log_evaluation(self, evaluation: Evaluation) -> None:
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
