"""The training loop over stages that answer from memory; what they do in a run is tested end to end."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from makers import make_trajectory

from miles_rl.checkpoint import Checkpoint, CheckpointError
from miles_rl.evaluate import Evaluation
from miles_rl.loop import TrainingLoop
from miles_rl.types import Batch, Group
from pipelines.report.curves import solve_rates
from pipelines.report.run_folder import RunFolder


class Stages:
    """Data, rollout, fleet and eval in one; `late` names the method that never answers."""

    def __init__(self, initial: Mapping[str, Any], late: str = "") -> None:
        self.initial, self.late = initial, late
        self.version: int = initial["version"]
        self.evaluated: list[int] = []
        self.commits: list[tuple[int, list[int]]] = []

    async def answer(self, method: str) -> None:
        if method == self.late:
            await asyncio.sleep(60)

    async def initial_policy(self) -> Mapping[str, Any]:
        return self.initial

    async def facts(self) -> Mapping[str, Any]:
        return {"task_set_hash": {"train": "tasks", "eval": "others"}}

    async def next_batch(self) -> Batch:
        await self.answer("next_batch")
        return Batch((Group(0, "a", (make_trajectory("g0.0.0", 0, "a", self.version),)),), self.version)

    async def publish(self, folder: str, version: int, checksum: str) -> None:
        await self.answer("publish")

    async def published(self, version: int) -> None:
        self.version = version

    async def batch_metrics(self) -> dict[str, float]:
        await self.answer("batch_metrics")
        return {"rollout/reward_mean": 0.5}

    async def save(self, folder: str) -> None:
        await self.answer("save")
        (Path(folder) / "ledger.sqlite").write_bytes(b"rows")

    async def committed(self, version: int, kept: list[int]) -> None:
        self.commits.append((version, kept))

    async def evaluate(self, version: int) -> Evaluation:
        await self.answer("evaluate")
        self.evaluated.append(version)
        rates = {"a": 0.0, "b": version / 10}
        return Evaluation(version, rates, version / 20, (0.0, 1.0), version, version, 0, 1.0, 2.0)

    async def finish(self) -> None:
        await self.answer("finish")


class SmallTrainer:
    """Weights that are one number. `full` makes the disk refuse the state of that step."""

    def __init__(self, full: int | None = None) -> None:
        self.steps, self.full = 0, full

    def load(self, model_dir: str, checkpoint_dir: str | None) -> None:
        self.steps = json.loads((Path(model_dir) / "weights.json").read_text()) if checkpoint_dir else 0

    def step(self, batch: Batch) -> Mapping[str, float]:
        self.steps += 1
        return {"train/loss": 1 / self.steps, "train/num_tokens": 10.0}

    def export(self, target_dir: str) -> str:
        Path(target_dir).mkdir(parents=True)
        (Path(target_dir) / "weights.json").write_text(json.dumps(self.steps))
        return "checksum"

    def save(self, target_dir: str) -> None:
        if self.steps == self.full:
            raise OSError(28, "No space left on device")


def make_loop(stages: Stages, run_dir: Path, **options: Any) -> TrainingLoop:
    plain = {"trainer": SmallTrainer(), "steps": 4, "eval_every": 2, "checkpoint_every": 2, "keep_checkpoints": 2}
    timeouts = {"step_timeout_s": 5.0, "batch_timeout_s": 5.0, "eval_timeout_s": 5.0}
    return TrainingLoop(stages, stages, stages, stages, run_dir=str(run_dir), **{**plain, **timeouts, **options})


async def run(loop: TrainingLoop) -> Mapping[str, Any]:
    try:
        await loop.start()
        return await loop.run()
    finally:
        await loop.stop()


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def untimed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.startswith(("perf/", "time"))}


def resumed_from(path: Path) -> dict[str, Any]:
    """What the data stage tells after a resume."""
    checkpoint = Checkpoint.open(path)
    return {
        "model_dir": str(checkpoint.model_dir),
        "version": checkpoint.version,
        "checkpoint_dir": str(checkpoint.path),
        "run_dir": str(checkpoint.run_dir),
        "before": checkpoint.before,
    }


FRESH = {"model_dir": "unused", "version": 0}


@pytest.mark.parametrize(("version", "evaluations"), [(0, [2, 4]), (2, [4])])
def test_a_resumed_run_ends_with_the_figures_and_curves_of_an_undisturbed_one(
    tmp_path: Path, version: int, evaluations: list[int]
) -> None:
    first = Stages(FRESH)
    undisturbed = asyncio.run(run(make_loop(first, tmp_path / "first", keep_checkpoints=9)))
    assert first.evaluated == [0, 2, 4]
    assert first.commits == [(0, [0]), (2, [0, 2]), (4, [0, 2, 4])]
    second = Stages(resumed_from(tmp_path / f"first/checkpoints/step-{version:06d}"))
    resumed = asyncio.run(run(make_loop(second, tmp_path / "second")))
    assert untimed(resumed) == untimed(undisturbed)
    assert second.evaluated == evaluations, "the evaluation before is not done again"
    by_step = {(line["step"], "train/loss" in line): untimed(line) for line in lines_of(tmp_path / "second")}
    assert by_step == {(line["step"], "train/loss" in line): untimed(line) for line in lines_of(tmp_path / "first")}
    assert len(by_step) == len(lines_of(tmp_path / "second"))


def test_an_evaluation_that_the_killed_run_did_not_finish_is_done_after_the_resume(tmp_path: Path) -> None:
    asyncio.run(run(make_loop(Stages(FRESH), tmp_path / "first")))
    metrics = tmp_path / "first/metrics.jsonl"
    killed = [line for line in metrics.read_text().splitlines(True) if '"step": 2' not in line or "train" in line]
    metrics.write_text("".join(killed))
    second = Stages(resumed_from(tmp_path / "first/checkpoints/step-000002"))
    asyncio.run(run(make_loop(second, tmp_path / "second")))
    assert second.evaluated == [2, 4]


class LateEvaluation(Stages):
    """An evaluation of version 2 ends only when version 4 is in force; with `failing`, badly."""

    def __init__(self, failing: bool = False) -> None:
        super().__init__(FRESH)
        self.failing = failing

    async def evaluate(self, version: int) -> Evaluation:
        while version == 2 and self.version < 4:
            await asyncio.sleep(0.01)
        if version == 2 and self.failing:
            raise RuntimeError("eval: nothing was scored")
        return await super().evaluate(version)


def test_an_evaluation_that_ends_late_is_written_when_it_is_known_for_the_version_it_speaks_for(tmp_path: Path) -> None:
    asyncio.run(run(make_loop(LateEvaluation(), tmp_path, steps=6, eval_every=2, checkpoint_every=0)))
    lines = lines_of(tmp_path)
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)
    of_eval = [line["step"] for line in lines if "eval/solve_rate" in line]
    assert of_eval in ([0, 2, 6], [0, 2, 4, 6])
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    late = next(place for place, line in enumerate(lines) if line["step"] == 2 and "eval/solve_rate" in line)
    assert 3 in [line["step"] for line in lines[:late]]
    run_folder = RunFolder.read(tmp_path)
    assert {version: rate for version, (rate, _) in solve_rates(run_folder).items()} == {v: v / 20 for v in of_eval}
    assert [step for step, _ in run_folder.series("eval/solve_rate")] == sorted(of_eval)


def test_an_evaluation_that_fails_beside_the_training_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    loop = make_loop(LateEvaluation(failing=True), tmp_path, steps=6, eval_every=2, checkpoint_every=0)
    asyncio.run(run(loop))
    status = asyncio.run(loop.status())
    assert status["step"] == 6
    assert status["problem"] == "an evaluation failed, the run goes on: eval: nothing was scored"
    assert 2 not in [evaluation["version"] for evaluation in status["evaluations"]]


def test_the_loop_tells_at_which_step_this_run_began_to_train_and_all_evaluations(tmp_path: Path) -> None:
    first = make_loop(Stages(FRESH), tmp_path / "first")
    assert asyncio.run(first.status())["first_step"] is None
    asyncio.run(run(first))
    assert asyncio.run(first.status())["first_step"] == 0
    second = make_loop(Stages(resumed_from(tmp_path / "first/checkpoints/step-000002")), tmp_path / "second")
    asyncio.run(second.start())
    assert asyncio.run(second.status())["first_step"] is None
    asyncio.run(run(second))
    status = asyncio.run(second.status())
    assert status["first_step"] == 2
    assert [(e["version"], e["solve_rate"], e["ci95"]) for e in status["evaluations"]] == [
        (version, version / 20, [0.0, 1.0]) for version in (0, 2, 4)
    ]


def test_a_run_that_was_killed_in_its_last_evaluation_has_only_that_to_do(tmp_path: Path) -> None:
    undisturbed = asyncio.run(run(make_loop(Stages(FRESH), tmp_path / "first")))
    second = Stages(resumed_from(tmp_path / "first"))
    resumed = asyncio.run(run(make_loop(second, tmp_path / "second")))
    assert second.evaluated == [4]
    assert untimed(resumed) == untimed(undisturbed)


@pytest.mark.parametrize(
    ("late", "key"),
    [
        ("evaluate", "stages.eval.run.timeout_s"),
        ("next_batch", "rollout.batch_timeout_s"),
        ("publish", "stages.trainer.run.step_timeout_s"),
        ("batch_metrics", "stages.trainer.run.step_timeout_s"),
        ("save", "stages.trainer.run.step_timeout_s"),
        ("finish", "stages.trainer.run.step_timeout_s"),
    ],
)
def test_a_stage_that_never_answers_ends_the_run_with_the_key_of_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, key: str
) -> None:
    monkeypatch.setattr("miles_rl.loop.ANSWER_GRACE_S", 0.1)
    timeouts = {"step_timeout_s": 0.5, "batch_timeout_s": 0.1, "eval_timeout_s": 0.1}
    with pytest.raises(TimeoutError) as ended:
        asyncio.run(run(make_loop(Stages(FRESH, late), tmp_path, **timeouts)))
    assert str(ended.value).startswith(key)
    assert list(tmp_path.glob("checkpoints/.*")) == []


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_older_ones(tmp_path: Path) -> None:
    stages = Stages(FRESH)
    with pytest.raises(CheckpointError) as ended:
        asyncio.run(run(make_loop(stages, tmp_path, trainer=SmallTrainer(full=2))))
    line = str(ended.value)
    assert line.startswith(f"run_dir: {tmp_path}; the checkpoint of step 2 could not be written (OSError: [Errno 28]")
    assert f"resume={tmp_path}/checkpoints/step-000000" in line
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000"]
    assert stages.commits == [(0, [0])]
    assert Checkpoint.open(tmp_path).version == 0
