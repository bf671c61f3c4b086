"""Where a run's figures go: `metrics.jsonl` for our own readers, TensorBoard events for everybody's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

RESERVED = frozenset({"step", "time_s", "non_finite"})

EPOCH_PREFIX = "time/"
"""Metrics under this prefix are seconds since the epoch. TensorBoard keeps float32, which resolves today's epoch to
128 s only, so they go to `metrics.jsonl` alone."""


class MetricsWriter:
    """Appends figures to `metrics.jsonl` and `tensorboard/` of a run folder, on disk before a write returns.

    `metrics.jsonl` holds one JSON object per line: `step`, `time_s` (seconds since the epoch) and the metrics under
    their flat names. JSON has no word for nan and infinity, so such a metric is null and its value stands as text under
    `non_finite`: `{"train/loss": null, "non_finite": {"train/loss": "nan"}}`. TensorBoard gets the value itself.

    Lines are in the order in which their figures became known: whoever follows a run only reads on. `step` is the
    version of the weights that the figures speak for. An evaluation of version v goes on beside the training, so its
    line may stand behind those of later steps. Training steps among themselves, and evaluations among themselves, are
    in order of `step`. Whoever draws curves sorts by `step`. Several lines may carry the same step (training and
    evaluation, or a step that was redone after a resume): a reader merges them, the later line wins key by key.

    One process writes one run folder. A line that a killed process left torn is closed off, and skipped by readers.
    Raises `ValueError` for a metric name that is reserved or empty, `OSError` when the folder cannot be written.
    """

    def __init__(self, run_dir: str | Path) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        torn = _ends_torn(path)
        self._lines = path.open("a", encoding="ascii")
        if torn:
            self._lines.write("\n")
        self._events = EventFileWriter(str(folder / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float], *, time_s: float) -> None:
        """Record `metrics` of `step`, measured at `time_s` seconds since the epoch."""
        values = {name: float(value) for name, value in metrics.items()}
        if reserved := sorted(name for name in values if not name or name in RESERVED):
            raise ValueError(f"metric name {reserved[0]!r} is reserved; rename the metric")
        line: dict[str, object] = {"step": step, "time_s": time_s}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        if odd := {name: str(value) for name, value in values.items() if not math.isfinite(value)}:
            line["non_finite"] = odd
        self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        self._lines.flush()
        scalars = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if not name.startswith(EPOCH_PREFIX)
        ]
        self._events.add_event(Event(step=step, wall_time=time_s, summary=Summary(value=scalars)))
        self._events.flush()

    def carry(self, run_dir: Path, last_step: int) -> list[tuple[int, dict[str, float]]]:
        """Take over what another run wrote up to `last_step`, so that the curves of a resumed run are whole.

        Returns steps with their metrics, in order; nothing if that run has no `metrics.jsonl`. Torn lines are left out.
        """
        carried: list[tuple[int, dict[str, float]]] = []
        path = run_dir / "metrics.jsonl"
        for text in path.read_text(encoding="ascii", errors="replace").splitlines() if path.exists() else ():
            try:
                line: dict[str, Any] = json.loads(text)
                step, time_s, odd = line.pop("step"), line.pop("time_s"), line.pop("non_finite", {})
                metrics = {name: float(value) for name, value in {**line, **odd}.items()}
            except (ValueError, KeyError, AttributeError, TypeError):
                continue
            if step <= last_step:
                self.write(step, metrics, time_s=time_s)
                carried.append((step, metrics))
        return carried

    def close(self) -> None:
        """Flush and close both files. Safe to call twice."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ends_torn(path: Path) -> bool:
    """True if the file's last line has no end: its writer was killed in the middle of it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
