import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles_rl.metrics import MetricsWriter


def lines_of(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def test_a_write_is_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run")
    writer.write(3, {"train/loss": 0.5, "perf/step_s": 2}, time_s=1.7e9)
    assert [json.loads(line) for line in lines_of(tmp_path / "run")] == [
        {"step": 3, "time_s": 1.7e9, "train/loss": 0.5, "perf/step_s": 2.0}
    ]
    writer.close()
    writer.close()


def test_values_that_json_cannot_hold_are_null_and_keep_their_name(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, time_s=2.0)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    row = json.loads(lines_of(tmp_path)[0], parse_constant=refuse)
    assert (row["a"], row["b"], row["c"], row["d"]) == (None, None, None, 1.0)
    assert row["non_finite"] == {"a": "nan", "b": "inf", "c": "-inf"}


def test_tensorboard_reads_the_same_figures_but_not_the_epoch_times(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(step, {"train/loss": step / 4, "time/train_start_s": 1.7e9 + step}, time_s=1.7e9 + step)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert events.Scalars("train/loss")[2].wall_time == 1.7e9 + 2


def test_a_second_writer_appends_and_closes_off_a_torn_line(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1.0}, time_s=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, {"a": 2.0}, time_s=2.0)
    lines = lines_of(tmp_path)
    assert len(lines) == 3
    assert json.loads(lines[0])["a"] == 1.0
    assert json.loads(lines[2])["a"] == 2.0


def test_a_resumed_run_takes_over_the_curves_up_to_its_version(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "old") as writer:
        for step in range(4):
            writer.write(step, {"train/loss": step / 3, "odd": math.inf}, time_s=1.7e9 + step)
    with (tmp_path / "old/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')
    with MetricsWriter(tmp_path / "new") as writer:
        carried = writer.carry(tmp_path / "old", 2)
        assert writer.carry(tmp_path / "nowhere", 2) == []
    assert carried == [(step, {"train/loss": step / 3, "odd": math.inf}) for step in range(3)]
    assert lines_of(tmp_path / "new") == lines_of(tmp_path / "old")[:3]
    events = EventAccumulator(str(tmp_path / "new/tensorboard"))
    events.Reload()
    assert [(e.step, e.wall_time) for e in events.Scalars("train/loss")] == [(step, 1.7e9 + step) for step in range(3)]


@pytest.mark.parametrize("name", ["step", "time_s", "non_finite", ""])
def test_a_reserved_metric_name_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="reserved"):
        writer.write(1, {name: 1.0}, time_s=1.0)
    assert lines_of(tmp_path) == []
