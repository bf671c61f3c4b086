"""The run's ledger: every sample from admission to its end, with what a resume needs to go on from it.

SQLite in WAL mode: it can be read while the run goes on, and a transaction that was committed outlives `kill -9` of
the process. What belongs together is one transaction, so at any moment the file is a state that a resume can go on
from. See `ledger_schema` for the tables.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from miles_rl.rollout.codec import decode, encode
from miles_rl.rollout.groups import Sample, UnfinishedGroup
from miles_rl.rollout.ledger_schema import PRUNE, ROLLBACK, RUN_ENDED, SCHEMA, SampleState
from miles_rl.types import Outcome, Trajectory, WeightVersion

LEDGER_FILE = "ledger.sqlite"
_BUSY_TIMEOUT_S = 10.0
_UNWRITABLE = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}


class LedgerError(Exception):
    """The file is not a ledger that one can go on from. The message names it."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a resume starts from: open groups in order, where the data stands, and the counts so far."""

    groups: Sequence[UnfinishedGroup] = ()
    next_group_id: int = 0
    cursor: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[tuple[str, Outcome], int] = field(default_factory=dict)
    stale_by_task: Mapping[str, int] = field(default_factory=dict)
    trained_by_task: Mapping[str, int] = field(default_factory=dict)


class Ledger:
    """Append and update rows of one run. One writer; any number of readers."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_TIMEOUT_S)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(SCHEMA)

    def admit(self, sample: Sample, version: WeightVersion, group_size: int, cursor: Mapping[str, Any]) -> None:
        """An attempt is admitted under weights `version`, for the first time or again after a resume.

        `cursor` is where the data order stands; the first sample of a group opens it, with `group_size` members.
        `sqlite3.IntegrityError` if the id was used before and does not wait to run again.
        """
        now = time.time()
        with self._transaction():
            opened = self._db.execute(
                "INSERT OR IGNORE INTO groups (group_id, task, size, opened_s) VALUES (?, ?, ?, ?)",
                (sample.group_id, sample.task, group_size, now),
            )
            if opened.rowcount == 1:
                self._set_cursor(cursor)
            admitted = self._db.execute(
                "INSERT INTO samples (sample_id, group_id, sample_index, attempt, task, state, admitted_version,"
                " admitted_s, changed_s) VALUES (?, ?, ?, ?, ?, 'leased', ?, ?, ?) ON CONFLICT (sample_id) DO UPDATE"
                " SET reason = '', admitted_version = excluded.admitted_version, num_leases = num_leases + 1,"
                " changed_s = excluded.changed_s WHERE state = 'leased' AND reason != ''",
                (sample.sample_id, sample.group_id, sample.index, sample.attempt, sample.task, version, now, now),
            )
            if admitted.rowcount != 1:
                raise sqlite3.IntegrityError(f"ledger: sample {sample.sample_id} was admitted before")

    def run(self, sample_id: str, sandbox_id: str) -> None:
        """The sandbox of the attempt is ready."""
        self._move(sample_id, SampleState.RUNNING, sandbox_id=sandbox_id, running_s=time.time())

    def score(self, trajectory: Trajectory) -> None:
        """The attempt ended with a reward; the trajectory is kept until no resume can need it."""
        with self._transaction():
            self._move(
                trajectory.sample_id,
                SampleState.SCORED,
                reward=trajectory.reward,
                outcome=trajectory.outcome,
                oldest_version=trajectory.oldest_version,
                newest_version=trajectory.newest_version,
                num_tokens=len(trajectory.token_ids),
                ended_s=time.time(),
            )
            self._db.execute("INSERT INTO trajectories VALUES (?, ?)", (trajectory.sample_id, encode(trajectory)))

    def fail(self, sample_id: str, outcome: Outcome, detail: str) -> None:
        """The attempt failed for infrastructure; it is refilled, never scored."""
        self._move(sample_id, SampleState.FAILED, outcome=outcome, reason=detail, ended_s=time.time())

    def train(self, groups: Mapping[int, Sequence[str]], version: WeightVersion) -> None:
        """The samples of these groups are handed to the trainer, which consumes them at `version`."""
        with self._transaction():
            for group_id, sample_ids in groups.items():
                self._end_group(group_id, "trained", version)
                for sample_id in sample_ids:
                    self._move(sample_id, SampleState.TRAINED, trained_version=version, trained_s=time.time())
            self._db.execute(PRUNE, {"ended": RUN_ENDED})

    def drop(self, group_id: int, reason: str, cursor: Mapping[str, Any]) -> None:
        """The group will never be trained, for `reason` (`stale`, `short`). What it had is discarded."""
        with self._transaction():
            self._end_group(group_id, reason, None)
            self._db.execute(
                "UPDATE samples SET state = 'discarded', reason = ?, changed_s = ?, ended_s = coalesce(ended_s, ?)"
                " WHERE group_id = ? AND state IN ('leased', 'running', 'scored')",
                (reason, time.time(), time.time(), group_id),
            )
            self._db.execute(
                "DELETE FROM trajectories WHERE sample_id IN (SELECT sample_id FROM samples WHERE group_id = ?)",
                (group_id,),
            )
            self._set_cursor(cursor)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """What is written within is one transaction: a kill leaves all of it or nothing."""
        return self._transaction()

    def end_run(self) -> None:
        """Every attempt that is neither trained nor ended is given up; a resume goes on with it."""
        self._db.execute(
            "UPDATE samples SET state = 'discarded', reason = ?, changed_s = ?"
            " WHERE state IN ('leased', 'running', 'scored')",
            (RUN_ENDED, time.time()),
        )

    def counts(self) -> dict[str, int]:
        """Number of attempts per state."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state").fetchall())

    def save(self, folder: Path) -> None:
        """Write a copy into `folder`, consistent while this ledger is written to. Callable from another thread."""
        with _connected(self.path) as source, _connected(folder / LEDGER_FILE) as target:
            source.backup(target)

    def committed(self, version: WeightVersion, kept: Sequence[WeightVersion]) -> None:
        """The checkpoint of `version` is complete, and those in `kept` can be resumed from."""
        with self._transaction():
            self._db.execute("DELETE FROM checkpoints")
            rows = [(v, time.time()) for v in sorted({version, *kept})]
            self._db.executemany("INSERT INTO checkpoints VALUES (?, ?)", rows)
            self._db.execute(PRUNE, {"ended": RUN_ENDED})

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @classmethod
    def resume(cls, sources: Sequence[Path], path: Path, version: WeightVersion) -> tuple[Ledger, Resumed]:
        """A new ledger at `path` that goes on from the first of `sources` that is whole, turned back to `version`.

        Give the run's own ledger first, which knows what happened after the checkpoint, then the checkpoint's copy.
        Raises `LedgerError` if none can be read.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        problems: list[str] = []
        for source in sources:
            try:
                _copy(source, path, version)
                with contextlib.ExitStack() as unless_whole:
                    ledger = cls(path)
                    unless_whole.callback(ledger.close)
                    resumed = ledger._roll_back(version)
                    unless_whole.pop_all()
                return ledger, resumed
            except (LedgerError, sqlite3.Error, ValueError) as error:
                problems.append(f"{source}: {error}")
        raise LedgerError("; ".join(problems) or "no ledger to go on from")

    def _roll_back(self, version: WeightVersion) -> Resumed:
        values = {"version": version, "ended": RUN_ENDED, "now": time.time()}
        with self._transaction():
            for statement in ROLLBACK.split(";"):
                self._db.execute(statement, values)
        cursor = {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM cursor")}
        (last,) = self._db.execute("SELECT coalesce(max(group_id), -1) FROM groups").fetchone()
        failures = self._db.execute("SELECT task, outcome, COUNT(*) FROM samples WHERE state = 'failed' GROUP BY 1, 2")
        return Resumed(
            groups=tuple(self._unfinished()),
            next_group_id=last + 1,
            cursor=cursor,
            failures={(task, Outcome(outcome)): count for task, outcome, count in failures},
            stale_by_task=self._ended_by_task("stale"),
            trained_by_task=self._ended_by_task("trained"),
        )

    def _ended_by_task(self, ended: str) -> dict[str, int]:
        return dict(self._db.execute("SELECT task, COUNT(*) FROM groups WHERE ended = ? GROUP BY task", (ended,)))

    def _unfinished(self) -> Iterator[UnfinishedGroup]:
        for group_id, task, size in self._db.execute(
            "SELECT group_id, task, size FROM groups WHERE ended = '' ORDER BY group_id"
        ).fetchall():
            attempts, scored = [0] * size, dict[int, Trajectory]()
            rows = self._db.execute(
                "SELECT sample_index, attempt, state, data FROM samples LEFT JOIN trajectories USING (sample_id)"
                " WHERE group_id = ? ORDER BY attempt",
                (group_id,),
            )
            for index, attempt, state, data in rows:
                attempts[index] = attempt + (state == SampleState.FAILED)
                if state == SampleState.SCORED:
                    scored[index] = decode(data)
            yield UnfinishedGroup(group_id, task, tuple(attempts), scored)

    def _end_group(self, group_id: int, ended: str, version: WeightVersion | None) -> None:
        self._one_row(
            self._db.execute(
                "UPDATE groups SET ended = ?, trained_version = ? WHERE group_id = ? AND ended = ''",
                (ended, version, group_id),
            ),
            f"no open group {group_id} to end as {ended}",
        )

    def _move(self, sample_id: str, state: SampleState, **columns: str | int | float) -> None:
        names = "".join(f", {name} = ?" for name in columns)
        cursor = self._db.execute(
            f"UPDATE samples SET state = ?, changed_s = ?{names} WHERE sample_id = ?"
            " AND state IN ('leased', 'running', 'scored')",
            (state, time.time(), *columns.values(), sample_id),
        )
        self._one_row(cursor, f"no unfinished sample {sample_id!r} to move to {state}")

    @staticmethod
    def _one_row(cursor: sqlite3.Cursor, problem: str) -> None:
        if cursor.rowcount != 1:
            raise KeyError(f"ledger: {problem}")

    def _set_cursor(self, cursor: Mapping[str, Any]) -> None:
        rows = [(key, json.dumps(value)) for key, value in cursor.items()]
        self._db.executemany("INSERT OR REPLACE INTO cursor VALUES (?, ?)", rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._db.in_transaction:  # part of a larger one
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


@contextlib.contextmanager
def _connected(place: Path | str) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(place, timeout=_BUSY_TIMEOUT_S, uri=isinstance(place, str))) as database:
        yield database


def _copy(source: Path, target: Path, version: WeightVersion) -> None:
    """`LedgerError` or `sqlite3.Error` unless `source` is whole and knows all that was trained before `version`.

    A machine that loses power may take the last transactions with it, and leave a checkpoint that came after them.
    """
    if not source.is_file():
        raise LedgerError("there is no such file")
    for leftover in (target, *(target.with_name(target.name + end) for end in ("-wal", "-shm"))):
        leftover.unlink(missing_ok=True)
    _take_over(source, target)
    with _connected(target) as new:
        (state,) = new.execute("PRAGMA quick_check").fetchone()
        if state != "ok":
            raise LedgerError(f"damaged: {state}")
        tables = {name for (name,) in new.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"groups", "samples", "trajectories", "cursor"} <= tables:
            raise LedgerError("it holds no ledger")
        (last,) = new.execute("SELECT coalesce(max(trained_version), -1) FROM groups").fetchone()
        if last < version - 1:
            raise LedgerError(f"it ends at version {last + 1}, before the checkpoint of version {version}")


def _take_over(source: Path, target: Path) -> None:
    """Copy a ledger that is at rest, without a write beside it but the index of its log, nor that where it cannot."""
    log = Path(f"{source}-wal")
    how = "mode=ro" if log.exists() else "immutable=1"
    try:
        with _connected(f"file:{quote(str(source.absolute()))}?{how}") as old, _connected(target) as new:
            old.backup(new)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in _UNWRITABLE or not log.exists():
            raise
        shutil.copyfile(log, f"{target}-wal")  # SQLite finds it there, and takes in what was written last
        shutil.copyfile(source, target)
