"""What every episode leaves behind: one row in `episodes/*.parquet`, failures included.

Query it while the run goes on:

    duckdb -c "select task, outcome, avg(reward), count(*) from 'runs/NAME/STAMP/episodes/*.parquet' group by all"
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from miles_rl.types import Outcome, StopReason, Turn
from sandbox_env.canary import without_canary

TURN = pa.struct(
    [
        ("text", pa.string()),
        ("command", pa.string()),
        ("observation", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("generate_s", pa.float64()),
        ("exec_s", pa.float64()),
        ("cached_tokens", pa.int32()),
    ]
)

SCHEMA = pa.schema(
    [
        ("kind", pa.dictionary(pa.int8(), pa.string())),
        ("task", pa.string()),
        ("group_id", pa.int64()),
        ("sample_id", pa.string()),
        ("attempt", pa.int32()),
        ("version", pa.int32()),
        ("oldest_version", pa.int32()),
        ("newest_version", pa.int32()),
        ("outcome", pa.string()),
        ("stop_reason", pa.string()),
        ("reward", pa.float64()),
        ("num_turns", pa.int32()),
        ("num_policy_tokens", pa.int32()),
        ("turns", pa.list_(TURN)),
        ("prompt_text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("detail", pa.string()),
        ("started_s", pa.float64()),
        ("ready_s", pa.float64()),
        ("finished_s", pa.float64()),
        ("timings", pa.map_(pa.string(), pa.float64())),
    ]
)
"""The columns of `episodes/*.parquet`; `EpisodeRecord` says what each means. Null is always "does not apply"."""

REPEATING = ["kind", "task", "outcome", "stop_reason"]
"""Columns worth a dictionary; trying one on every column makes writing two to three times slower."""

PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "versions")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeRecord:
    """One episode as it is kept, whatever became of it.

    `version` is the version of the weights that the episode was admitted under (train) or that the evaluation speaks
    for (eval), which is also the number of optimizer steps done. `attempt` counts from 0 and rises when an
    infrastructure failure made the sample run again. `reward` is None unless the outcome is SCORED, and then finite.
    Times are seconds since the epoch: `started_s` when a sandbox was asked for, `ready_s` when it was there (None if
    it never was), `finished_s` when the outcome was known. The arrays are [T] and aligned as in
    `miles_rl.types.Trajectory`; a failed episode keeps what it had, often nothing. `detail` is the failure's text.

    Raises `ValueError` at construction when the arrays' lengths differ or reward and outcome disagree.
    """

    kind: Literal["train", "eval"]
    task: str
    sample_id: str
    outcome: Outcome
    stop_reason: StopReason
    started_s: float
    finished_s: float
    ready_s: float | None = None
    group_id: int | None = None
    attempt: int = 0
    version: int | None = None
    reward: float | None = None
    turns: Sequence[Turn] = ()
    prompt_text: str = ""
    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    loss_mask: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    detail: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"{self.sample_id}: arrays of different lengths {sorted(lengths)}")
        scored = self.reward is not None and bool(np.isfinite(self.reward))
        if scored != (self.outcome is Outcome.SCORED) or (self.reward is not None and not scored):
            raise ValueError(f"{self.sample_id}: outcome {self.outcome} with reward {self.reward}")

    def row(self) -> dict[str, object]:
        """The record as one row of `SCHEMA`."""
        row: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        policy_versions = self.versions[self.loss_mask]
        row |= {
            "outcome": str(self.outcome),
            "stop_reason": str(self.stop_reason),
            "oldest_version": int(policy_versions.min()) if policy_versions.size else None,
            "newest_version": int(policy_versions.max()) if policy_versions.size else None,
            "num_turns": len(self.turns),
            "num_policy_tokens": int(self.loss_mask.sum()),
            "turns": [{f.name: _utf8(getattr(turn, f.name)) for f in fields(turn)} for turn in self.turns],
            "timings": list(self.timings.items()),
        }
        return {name: _utf8(row[name]) for name in SCHEMA.names}


class EpisodeRecorder:
    """Writes episode records as parquet parts (zstd) into `folder`, many to a part, beside the caller.

    A part is written under a hidden name and renamed when complete, so `*.parquet` can be read at any time; part
    names are unique, so several recorders (train and eval stages, a resumed run) share a folder. Records go out when
    `flush_every` of them wait, or with the first one that comes `flush_interval_s` after the last part, and at `close`.
    One part is written at a time, in the order of the records, by a thread: an event loop that records is not held up.
    A killed process loses its waiting records from here, never from the run's ledger.

    A write that fails loses nothing: its records wait again, first in order, and its error is raised by the next
    `record` or `close`. `TimeoutError` when a write takes longer than `write_timeout_s`.
    """

    def __init__(
        self,
        folder: str | Path,
        flush_every: int = 64,
        flush_interval_s: float = 10.0,
        write_timeout_s: float = 30.0,
    ) -> None:
        if flush_every < 1:
            raise ValueError(f"flush_every: {flush_every}; give at least 1")
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._flush_every = flush_every
        self._flush_interval_s = flush_interval_s
        self._write_timeout_s = write_timeout_s
        self._changed = threading.Condition()
        self._waiting: list[EpisodeRecord] = []
        self._writing = 0
        self._error: Exception | None = None
        self._last_write_s = time.monotonic()

    def record(self, record: EpisodeRecord) -> None:
        """Keep one episode. Raises what went wrong with an earlier write; this record waits all the same."""
        with self._changed:
            self._waiting.append(record)
            waited_s = time.monotonic() - self._last_write_s
            if self._writing and waited_s > self._write_timeout_s:
                raise self._late()
            error, self._error = self._error, None
            if len(self._waiting) >= self._flush_every or waited_s >= self._flush_interval_s:
                self._begin()
        if error is not None:
            raise error

    def flush(self) -> None:
        """Begin to write the waiting records as one part; without any, or while one is written, nothing."""
        with self._changed:
            self._begin()

    def close(self) -> None:
        """Write what waits, and wait for it: at most `write_timeout_s` a part. Safe to call twice."""
        with self._changed:
            while self._writing or self._waiting:
                if not self._writing:
                    self._error = None  # of a write that is tried again now
                    self._begin()
                if not self._changed.wait_for(lambda: not self._writing, self._write_timeout_s):
                    raise self._late()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error

    def _begin(self) -> None:
        """Hand the waiting records to a thread. It is a daemon: a disk that hangs does not keep the process."""
        if self._writing or not self._waiting:
            return
        records, self._waiting = self._waiting, []
        self._writing, self._last_write_s = len(records), time.monotonic()
        threading.Thread(target=self._write, args=(records,), name="episodes", daemon=True).start()

    def _write(self, records: list[EpisodeRecord]) -> None:
        error: Exception | None = None
        try:
            _write_part(self._folder, [record.row() for record in records])
        except Exception as caught:
            error = caught
        with self._changed:
            if error is not None:
                self._waiting, self._error = records + self._waiting, error
            self._writing, self._last_write_s = 0, time.monotonic()
            self._changed.notify_all()

    def _late(self) -> TimeoutError:
        waiting = self._writing + len(self._waiting)
        return TimeoutError(
            f"{self._folder}: writing episodes did not end within {self._write_timeout_s:g} s, {waiting} wait; see"
            " whether its disk answers"
        )


def _write_part(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """One parquet file with all `rows`, there as a whole or not at all."""
    table = pa.Table.from_arrays([_column(rows, column) for column in SCHEMA], schema=SCHEMA)
    name = f"part-{time.time_ns() // 1_000_000:013d}-{uuid.uuid4().hex[:8]}.parquet"
    hidden = folder / f".{name}.tmp"
    try:
        pq.write_table(
            table,
            hidden,
            compression="zstd",
            use_dictionary=REPEATING,  # pyright: ignore[reportArgumentType]  # its type is guessed from its default
        )
        os.replace(hidden, folder / name)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def _column(rows: Sequence[Mapping[str, object]], column: pa.Field) -> pa.Array:
    """One column of all rows. Per-token arrays go in whole: value by value they would hold up the rollout."""
    values = [row[column.name] for row in rows]
    if column.name not in PER_TOKEN:
        return pa.array(values, column.type)
    arrays = [np.asarray(value) for value in values]
    offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
    flat = pa.array(np.concatenate(arrays), column.type.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=column.type)


def _utf8(value: object) -> object:
    """Text without canaries of a benchmark, and without lone surrogates, which a tokenizer or a command's output can
    carry and parquet cannot.
    """
    return without_canary(value.encode("utf-8", "replace").decode()) if isinstance(value, str) else value
